"""A trace is read as the standard has it, recorded and told to others as the operator says."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

import pytest

from foundation.logs import JsonFormatter
from foundation.request_context import LOG_CONTEXT, LogContext, note_client_trace, outgoing_trace
from foundation.stages import Stages
from foundation.trace_context import ClientTrace, TokenBucket, TracePolicy, read_trace
from gateway.ids import uuid7_hex

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01".encode()
SENT = ((b"traceparent", TRACEPARENT), (b"tracestate", b"a=1"), (b"tracestate", b"b=2"))
OTHER = (b"traceparent", b"00-" + b"1" * 32 + TRACEPARENT[35:])
SAMPLED = ClientTrace(TRACE, PARENT, is_sampled=True)
REQUEST = "req_01890000000070008000000000000000"


@pytest.mark.parametrize(
    ("header", "trace"),
    [
        (TRACEPARENT, TRACE),
        (b"cc" + TRACEPARENT[2:] + b"-what-is-to-come", TRACE),
        (b"ff" + TRACEPARENT[2:], ""),
        (TRACEPARENT.upper(), ""),
        (b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01".encode(), ""),
        (TRACEPARENT + b"-" + b"x" * 300, ""),
        (TRACEPARENT + b"\n", ""),
        (b"", ""),
    ],
)
def test_a_trace_is_read_as_the_standard_has_it(header: bytes, trace: str) -> None:
    assert read_trace([(b"traceparent", header)]).trace == trace


def test_flags_and_state_are_read_and_what_is_named_twice_is_nothing() -> None:
    assert read_trace(SENT) == ClientTrace(TRACE, PARENT, True, "a=1,b=2")
    assert not read_trace([(b"traceparent", TRACEPARENT[:-2] + b"00")]).is_sampled
    assert read_trace([*SENT, SENT[0]]) == ClientTrace()
    for state in (b"a=1\r\nx: y", b"x" * 513, "a=\u00e9".encode()):
        assert read_trace([SENT[0], (b"tracestate", state)]) == ClientTrace(TRACE, PARENT, True)


def test_a_share_of_the_requests_is_recorded_whatever_their_clients_choose() -> None:
    policy = TracePolicy(ratio=0.25)
    requests = [f"req_{uuid7_hex()}" for _ in range(4000)]
    plain = sum(policy.samples(each, ClientTrace()) for each in requests)
    assert 800 < plain < 1200
    # One trace id for all, which says that it is recorded: the share is the same.
    assert sum(policy.samples(each, SAMPLED) for each in requests) == plain
    unsampled = SAMPLED._replace(is_sampled=False)
    assert sum(policy.samples(each, unsampled) for each in requests) == plain
    trusting = TracePolicy(ratio=0.25, trusts_clients=True)
    assert not any(trusting.samples(each, unsampled) for each in requests)
    assert all(TracePolicy(ratio=1).samples(each, ClientTrace()) for each in requests)
    assert not any(TracePolicy(ratio=0).samples(each, ClientTrace()) for each in requests)


def test_clients_have_so_many_traces_a_second_recorded() -> None:
    now = 0.0
    bucket = TokenBucket(2.0, clock=lambda: now)
    assert [bucket.take() for _ in range(4)] == [True, True, False, False]
    now = 0.5
    assert [bucket.take() for _ in range(2)] == [True, False]
    assert not TokenBucket(0).take()
    policy = TracePolicy(ratio=0, client_sampled_per_s=3)
    assert sum(policy.samples(REQUEST, SAMPLED) for _ in range(100)) == 3


@pytest.mark.parametrize(
    ("send_to", "told"),
    [
        ((), set()),
        (("m",), {"m"}),
        (("*",), {"m", "n"}),
        (("mcp/s",), {"mcp/s"}),
        (("mcp/*", "n"), {"mcp/s", "mcp/t", "n"}),
    ],
)
def test_the_context_goes_where_the_operator_says(send_to: tuple[str, ...], told: set[str]) -> None:
    policy = TracePolicy(ratio=1, send_to=send_to)
    assert {each for each in ("m", "n", "mcp/s", "mcp/t") if policy.sends_to(each)} == told


async def test_what_is_sent_continues_the_trace_below_its_stage() -> None:
    stage = Stages().begin("attempt", "m/0")
    assert outgoing_trace(stage, "m") == {}, "no request, no trace"
    policy = TracePolicy(ratio=0, client_sampled_per_s=1, trusts_clients=True, send_to=["m"])
    LOG_CONTEXT.set(context := LogContext(REQUEST, SENT, policy))
    sent = outgoing_trace(stage, "m")
    assert sent == {
        "traceparent": f"00-{TRACE}-{stage.span_id:016x}-01",
        "tracestate": "a=1,b=2",
    }
    assert outgoing_trace(stage, "m") == sent, "decided once, with one id"
    assert outgoing_trace(stage, "n") == outgoing_trace(None, "m") == {}
    assert context.is_sampled
    LOG_CONTEXT.set(LogContext(REQUEST, (), policy))
    assert outgoing_trace(stage, "m") == {
        "traceparent": f"00-{REQUEST[-32:]}-{stage.span_id:016x}-00"
    }


async def test_the_trace_of_a_client_that_is_not_trusted_is_linked_to_and_goes_nowhere() -> None:
    policy = TracePolicy(ratio=0, client_sampled_per_s=1, send_to=["m"])
    LOG_CONTEXT.set(context := LogContext(REQUEST, SENT, policy))
    stage = Stages().begin("attempt", "m/0")
    assert outgoing_trace(stage, "m") == {
        "traceparent": f"00-{REQUEST[-32:]}-{stage.span_id:016x}-01"
    }
    assert (context.trace, context.parent.trace) == (REQUEST[-32:], "")
    assert (context.link.trace, context.link.parent) == (TRACE, PARENT)
    line = logging.LogRecord("x", logging.INFO, "", 0, "said", None, None)
    said = json.loads(JsonFormatter().format(line))
    assert (said["trace"], said["client_trace"]) == (REQUEST[-32:], TRACE)
    assert LogContext(REQUEST, (), policy).link.trace == ""


@pytest.mark.parametrize(
    ("headers", "named", "trace"),
    [
        ((), {"traceparent": TRACEPARENT.decode(), "token": "x"}, TRACE),
        (
            ((b"traceparent", b"00-" + b"1" * 32 + TRACEPARENT[35:]),),
            {"traceparent": "x"},
            "1" * 32,
        ),
        ((), {"traceparent": "\ud800"}, REQUEST[-32:]),
        ((), {"traceparent": 7}, REQUEST[-32:]),
    ],
)
async def test_a_message_names_a_trace_where_the_headers_name_none(
    headers: tuple[tuple[bytes, bytes], ...], named: Mapping[str, object], trace: str
) -> None:
    LOG_CONTEXT.set(context := LogContext(REQUEST, headers))
    note_client_trace(named)
    assert context.trace == trace
