"""A request that is kept is a trace with a span for each of its stages, as the conventions say."""

from __future__ import annotations

import json
import time

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from foundation.request_context import LogContext
from foundation.stages import MAX_STAGES
from foundation.trace_context import TracePolicy
from gateway.generate_request import ChatPrompt, GenerateRequest
from gateway.generation_events import (
    CachedTokens,
    CacheOutcome,
    MeteredUsage,
    ReplicaEvent,
    TextDelta,
)
from gateway.principal import Principal
from gateway.request_log.answers import NotedAnswer
from gateway.routes.asgi.access_log import AccessLog
from gateway.settings.file import LogsConfig
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from gateway.traces import request_spans
from gateway.traces.request_spans import RequestSpans
from gateway.traces.sender import SpanSender
from gateway.traces.span_encoding import EncodedTrace
from tests.gateway.inference.test_price_lists import WHO
from tests.gateway.routes.asgi.test_access_log import CHAT, REQUEST, billed
from tests.gateway.traces.collectors import said

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = ((b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"tracestate", b"a=1"))
ALL = TracePolicy(ratio=1, client_sampled_per_s=100, trusts_clients=True)
NONE, STRANGERS = TracePolicy(ratio=0), TracePolicy(ratio=1)
REMOTE = 0x300
"""`SpanFlags`: it is known whether the parent is remote, and it is."""
BEGAN_AT, ENDED_AT, DURATION_S = 50.0, 1_000.0, 1.5
"""The begin on the clock of stages, the end in Unix seconds."""


def answered(
    context: LogContext,
    *,
    status: str = "200",
    meter: RequestMeter | None = None,
    who: Principal | None = WHO,
    duration_s: float = DURATION_S,
) -> NotedAnswer:
    return NotedAnswer(
        ENDED_AT, duration_s, "POST", CHAT, status, context, "m", who, meter, None, BEGAN_AT
    )


class KeepingSender(SpanSender):
    """Keeps what it is to send."""

    def __init__(self) -> None:
        self.traces: list[EncodedTrace] = []

    has_room = True  # type: ignore[assignment]

    def put(self, trace: EncodedTrace) -> None:
        self.traces.append(trace)


def traces_of(
    *answers: NotedAnswer, slow_s: float | None = 10.0, with_content: bool = False
) -> list[EncodedTrace]:
    sender = KeepingSender()
    spans = RequestSpans(sender, slow_s=slow_s, with_content=with_content)
    log = AccessLog(LogsConfig(), Telemetry(models=["m"]), lambda _: None, process="worker-0")
    for answer in answers:
        spans.record(answer, log.to_line(answer))
    return sender.traces


def spans_of(
    *answers: NotedAnswer, slow_s: float | None = 10.0, with_content: bool = False
) -> list[Span]:
    made = traces_of(*answers, slow_s=slow_s, with_content=with_content)
    spans = [span for each in made for span in ScopeSpans.FromString(each.data).spans]
    assert len(spans) == sum(each.num_spans for each in made)
    return spans


def metered(context: LogContext) -> RequestMeter:
    """A meter of a request that was answered by the second replica."""
    meter = RequestMeter(Telemetry(models=["m"]), "m")
    meter.stages = context.stages
    with meter.begin_attempt("m/0", "another", is_upstream=True) as failed:
        failed.outcome = "ReplicaUnavailable"
    with meter.begin_attempt("m/1", "a", is_upstream=True) as attempt:
        meter.used(
            billed(MeteredUsage(uncached_input=3, cache_read=2, output=5, reasoning_output=1))
        )
        meter._add_queue(0.0)
        meter._add_prefill(attempt.began_at)
        found = CachedTokens(pool=0, tier=1, fetched=1)
        meter.found_cached(attempt, CacheOutcome(cause="evicted", found=found))
    return meter


def captured(meter: RequestMeter) -> None:
    """Let a meter hold a call of a tool, and what came of it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "a-secret"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "seven", "tool_call_id": "c"},
    ]
    prompt = ChatPrompt(messages=messages)
    meter.capture(GenerateRequest(model="m", stream=True, include_usage=False, prompt=prompt))
    text = TextDelta(index=0, text="It is ", reasoning="Hm.")
    for item in (text, TextDelta(index=0, text="7", finish_reason="stop")):
        meter.received(ReplicaEvent(items=(item,)), streams=True)


def test_the_last_attempt_has_texts_where_the_project_stores_them() -> None:
    context = LogContext(REQUEST, (), ALL)
    meter = metered(context)
    captured(meter)
    answer = answered(context, meter=meter)
    assert "a-secret" not in str(spans_of(answer))
    spans = spans_of(answer, with_content=True)
    told = [span for span in spans if "gen_ai.input.messages" in said(span)]
    assert [span.name for span in told] == ["chat m"] and told[0] is spans[2]
    texts = {name: value for name, value in said(told[0]).items() if "messages" in name}
    assert {name: json.loads(str(value)) for name, value in texts.items()} == {
        "gen_ai.input.messages": [
            {"role": "user", "parts": [{"type": "text", "content": "a-secret"}]},
            {
                "role": "assistant",
                "parts": [{"type": "tool_call", "name": "f", "arguments": {"a": 1}, "id": "c"}],
            },
            {
                "role": "tool",
                "parts": [{"type": "tool_call_response", "id": "c", "response": "seven"}],
            },
        ],
        "gen_ai.output.messages": [
            {
                "role": "assistant",
                "parts": [
                    {"type": "reasoning", "content": "Hm."},
                    {"type": "text", "content": "It is 7"},
                ],
                "finish_reason": "stop",
            }
        ],
    }
    without = spans_of(answered(LogContext(REQUEST, (), ALL), meter=metered(context)))
    assert all("gen_ai.input.messages" not in said(span) for span in without)


def test_a_request_is_a_span_in_the_trace_of_its_client() -> None:
    [span] = spans_of(answered(LogContext(REQUEST, SENT, ALL)))
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.flags == REMOTE and span.trace_state == "a=1"
    assert (span.name, span.kind) == (f"POST {CHAT}", Span.SPAN_KIND_SERVER)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (998_500_000_000, 10**12)
    assert said(span) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "tollgate.request.id": REQUEST,
        "tollgate.key.id": WHO.key_id,
        "tollgate.org.id": WHO.org_id,
        "tollgate.model": "m",
        "tollgate.kept_for": "sampled",
    }
    [own] = spans_of(answered(LogContext(REQUEST, (), ALL), who=None))
    assert (own.trace_id.hex(), own.parent_span_id) == (REQUEST[-32:], b"")


def test_the_trace_of_a_client_that_is_not_trusted_is_linked_to() -> None:
    context = LogContext(REQUEST, SENT, STRANGERS)
    [span] = spans_of(answered(context))
    assert (span.trace_id.hex(), span.parent_span_id) == (REQUEST[-32:], b"")
    assert span.trace_state == ""
    [link] = span.links
    assert (link.trace_id.hex(), link.span_id.hex()) == (TRACE, PARENT)
    assert (link.flags, link.trace_state) == (REMOTE, "a=1")
    log = AccessLog(LogsConfig(), Telemetry(models=["m"]), lambda _: None, process="worker-0")
    line = log.to_line(answered(context))
    assert (line.trace, line.client_trace) == (REQUEST[-32:], TRACE)


def test_each_stage_is_a_span_below_it() -> None:
    context = LogContext(REQUEST, (), ALL)
    with context.stages.begin("admit") as admit:
        pass
    admit.began_at, admit.ended_at = BEGAN_AT + 0.1, BEGAN_AT + 0.2
    meter = metered(context)
    with context.stages.begin("tool_call", "shop/buy") as call:
        call.outcome = "tool_error"
    context.stages.begin("settle")
    request, *stages = spans_of(answered(context, meter=meter))
    assert [span.name for span in stages] == [
        *("admit", "chat m", "chat m", "queue", "prefill", "decode", "tools/call buy", "settle"),
    ]
    by_id = {span.span_id: span for span in (request, *stages)}
    assert len(by_id) == 9 and len({span.trace_id for span in by_id.values()}) == 1
    first, failed, attempt, *parts, tool, settle = stages
    assert {part.parent_span_id for part in parts} == {attempt.span_id}
    assert said(parts[1]) == {"tollgate.cache.found": "tier 1, fetched 1"}
    assert {each.parent_span_id for each in (first, failed, attempt, tool)} == {request.span_id}
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (
        998_600_000_000,
        998_700_000_000,
    )
    assert failed.status.code == tool.status.code == Status.STATUS_CODE_ERROR
    assert said(failed)["error.type"] == "ReplicaUnavailable"
    assert said(settle) == {"tollgate.unfinished": True}
    assert settle.end_time_unix_nano >= settle.start_time_unix_nano
    assert tool.kind == Span.SPAN_KIND_CLIENT and said(tool) == {
        "gen_ai.operation.name": "execute_tool",
        "mcp.method.name": "tools/call",
        "gen_ai.tool.name": "buy",
        "tollgate.mcp.server": "shop",
        "tollgate.outcome": "tool_error",
        "error.type": "tool_error",
    }


def test_a_message_of_mcp_is_a_span_of_the_server_with_its_calls_below() -> None:
    context = LogContext(REQUEST, (), ALL)
    with context.stages.begin("mcp_message", "tools/call buy") as message:
        message.ref = "7"
        with context.stages.begin("tool_call", "shop/buy"):
            pass
    request, served, call = spans_of(answered(context))
    assert (served.name, served.kind) == ("tools/call buy", Span.SPAN_KIND_SERVER)
    assert (served.parent_span_id, call.parent_span_id) == (request.span_id, served.span_id)
    assert said(served) == {
        "mcp.method.name": "tools/call",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "buy",
        "jsonrpc.request.id": "7",
        "network.protocol.name": "http",
        "network.transport": "tcp",
    }
    listed = LogContext(REQUEST, (), ALL)
    with listed.stages.begin("mcp_message", "tools/list") as failed:
        failed.outcome = "-32601"
    _, span = spans_of(answered(listed))
    assert (span.name, said(span)["error.type"]) == ("tools/list", "-32601")
    assert span.status.code == Status.STATUS_CODE_ERROR


@pytest.mark.parametrize(
    ("name", "is_upstream", "provider"),
    [("m", False, "tollgate"), ("m/0", False, "tollgate"), ("m/0", True, "openai")],
)
def test_an_attempt_names_who_runs_its_model(name: str, is_upstream: bool, provider: str) -> None:
    context = LogContext(REQUEST, (), ALL)
    meter = RequestMeter(Telemetry(models=["m"]), "m")
    meter.stages = context.stages
    with meter.begin_attempt(name, is_upstream=is_upstream):
        pass
    told = said(spans_of(answered(context, meter=meter))[1])
    assert told["gen_ai.provider.name"] == provider
    assert (told["gen_ai.request.model"], told["tollgate.replica"]) == ("m", name)


def test_an_attempt_says_what_it_used_what_the_cache_gave_and_what_it_cost() -> None:
    context = LogContext(REQUEST, (), ALL)
    attempt = spans_of(answered(context, meter=metered(context)))[2]
    assert attempt.kind == Span.SPAN_KIND_CLIENT and said(attempt) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.reasoning.output_tokens": 1,
        "tollgate.replica": "m/1",
        "tollgate.attempt.id": "a",
    }
    cache, cost = attempt.events
    assert (cache.name, said(cache)) == (
        "tollgate.cache",
        {
            "gen_ai.usage.cache_read.input_tokens": 2,
            "gen_ai.usage.cache_write.input_tokens": 0,
            "tollgate.cache.uncached_tokens": 3,
            "tollgate.cache.cause": "evicted",
        },
    )
    by_hand = 3 * 10 + 5 * 100  # reasoning costs what output does; cached tokens have no price
    assert cost.name == "tollgate.cost" and said(cost)["tollgate.cost_pico_usd"] == by_hand
    assert said(cost)["tollgate.cost.uncached_input_pico_usd"] == 30


def test_errors_and_what_is_slow_are_kept_whatever_was_sampled() -> None:
    def kept(answer: NotedAnswer, slow_s: float | None = 10.0) -> str | None:
        spans = spans_of(answer, slow_s=slow_s)
        return str(said(spans[0])["tollgate.kept_for"]) if spans else None

    unsampled = LogContext(REQUEST, (), NONE)
    assert kept(answered(unsampled)) is None
    assert kept(answered(unsampled, status="429")) is None
    assert kept(answered(unsampled, status="503")) == "error"
    assert kept(answered(unsampled, duration_s=11)) == "slow"
    assert kept(answered(unsampled, duration_s=11), slow_s=None) is None
    streamed = RequestMeter(Telemetry(models=["m"]), "m")
    streamed.ttft_s = 0.2
    assert kept(answered(unsampled, duration_s=60, meter=streamed)) is None, "a long answer"
    streamed.ttft_s = 12.0
    assert kept(answered(unsampled, duration_s=60, meter=streamed)) == "slow"
    failed = spans_of(answered(unsampled, status="503"))[0]
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert said(failed)["error.type"] == "503"
    told = LogContext(REQUEST, ((b"traceparent", SENT[0][1][:-2] + b"00"),), ALL)
    assert kept(answered(told)) is None, "its client does not record it"


def test_a_flood_of_errors_is_not_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_spans, "MAX_KEPT_PER_S", 5.0)
    failed = answered(LogContext(REQUEST, (), NONE), status="503")
    begun_at = time.monotonic()
    num_kept = len(spans_of(*[failed] * 1000))
    assert 5 <= num_kept <= 5 + 5 * (time.monotonic() - begun_at) + 1


def test_a_loop_without_end_is_a_trace_of_bounded_size() -> None:
    context = LogContext(REQUEST, (), ALL)
    for _ in range(MAX_STAGES + 5):
        with context.stages.begin("tool_call", "shop/buy"):
            pass
    spans = spans_of(answered(context))
    assert len(spans) == MAX_STAGES + 1
    assert said(spans[0])["tollgate.stages.left_out"] == 5
