"""Makes the spans of an answered request: its own, and one below it for each stage.

Made of what the access log knows, in its thread, when all has ended; so which requests are kept
beside those that were sampled can be decided by how they ended, and a request itself pays nothing.
A trace is the client's where it is trusted, or its id is the digits of the request's id and the
client's is linked to: the `trace` of each line of a log. Nothing of a prompt, an answer or an
argument is in it, but where a project stores contents: then the last attempt has them, as far as
they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import msgspec
from msgspec import UNSET
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, TraceState

from billing.events import COMPONENTS, Component, UsageEvent
from billing.pricing.rating import rate
from foundation.request_context import LogContext
from foundation.stages import Stage, new_span_id
from foundation.trace_context import ClientTrace, TokenBucket
from gateway.mcp.service.service import own_version
from gateway.request_log.answers import NotedAnswer
from gateway.routes.asgi.access_log import AccessLine
from gateway.settings.file import TracesConfig
from gateway.telemetry.metrics import Telemetry
from gateway.traces import conventions as names
from gateway.traces.content_messages import content_attributes
from gateway.traces.sender import SpanSender, make_exporter
from gateway.traces.span_encoding import (
    Attributes,
    EncodedTrace,
    SpanEnvelope,
    SpanPlace,
    encode_attributes,
    encode_event,
    encode_head,
    encode_link,
)

NANOSECONDS = 1_000_000_000
MAX_KEPT_PER_S = 50.0
"""How many traces a second are kept for how they ended: when all requests fail, a worker does not
work for its traces alone."""
MAX_HEADS = 1024
"""How many heads of spans are kept encoded, of each kind: some 200 bytes each."""
SCOPE = InstrumentationScope(names.TOLLGATE)
NO_FAILURE = frozenset(("", "left", "asked", "overtaken", "moved", "taken_back"))
"""Outcomes of stages that are nobody's error: the client is gone, or answers first, or another
replica does, or goes on."""
NAMED_ELSEWHERE = frozenset(("tool_call", "mcp_request", "mcp_message"))
"""Stages that are about what others named: a head of theirs seldom comes again."""
COST_LINES: Mapping[Component, str] = {
    component: names.COST_LINE.format(component=component) for component in COMPONENTS
}


class RequestSpans:
    """Makes the spans of what a process answers. `slow_s`: how long the first token, or an answer
    without tokens, may take, unless its trace is kept; None: as long as it takes. `with_content`:
    tell what was captured of requests."""

    def __init__(
        self, sender: SpanSender, *, slow_s: float | None, with_content: bool = False
    ) -> None:
        self._sender, self._slow_s, self._with_content = sender, slow_s, with_content
        self._kept = TokenBucket(MAX_KEPT_PER_S)

    def record(self, answer: NotedAnswer, line: AccessLine) -> None:
        """Make the spans of a request, if it is kept; called by one thread."""
        context = answer.context
        if context is None:
            return
        kept_for = self._kept_for(context, line)
        if kept_for is None:
            return
        if self._sender.has_room:
            self._sender.put(self._encode(answer, context, line, kept_for))
        else:
            self._sender.refuse(1 + len(context.stages))

    def _kept_for(self, context: LogContext, line: AccessLine) -> str | None:
        """Return why a request is kept, if it is."""
        if context.is_sampled:
            return "sampled"
        is_slow = self._slow_s is not None and seconds_of(line) >= self._slow_s
        if (line.status >= 500 or is_slow) and self._kept.take():
            return "error" if line.status >= 500 else "slow"
        return None

    def _encode(
        self, answer: NotedAnswer, context: LogContext, line: AccessLine, kept_for: str
    ) -> EncodedTrace:
        place = SpanPlace(context.trace, state_of(context.parent))
        spans = [encode_request(place, answer, context, line, kept_for)]
        stages, times, route = context.stages, StageTimes(answer), line.route
        bills = {each.id: each for each in answer.billed}
        message: Stage | None = None
        last_attempt: Stage | None = None
        for stage in stages:
            stage.span_id = stage.span_id or new_span_id()
            if stage.name == "attempt":
                last_attempt = stage
            elif stage.name == "mcp_message" and message is None:
                message = stage
        for stage in stages:
            name, within = stage.name, stage.within
            head_of = encode_stage if name in NAMED_ELSEWHERE else repeated_stage
            head = head_of(
                *(name, stage.about, route, stage.outcome),
                has_ended=stage.has_ended,
                is_upstream=stage.is_upstream,
            )
            begins_ns, ends_ns = times.to_ns(stage.began_at), times.end_of(stage)
            rest = b""
            if name == "attempt":
                rest = encode_use(stage, bills.get(stage.ref), ends_ns)
                if self._with_content and stage is last_attempt:
                    rest += encode_attributes(content_attributes(answer))
            elif name in NAMED_ELSEWHERE:
                if name != "mcp_message":
                    within = message
                else:
                    rest = encode_attributes(message_attributes(stage))
            parent_id = context.span_id if within is None else within.span_id
            spans.append(place.encode(stage.span_id, parent_id, begins_ns, ends_ns, head, rest))
        return EncodedTrace(len(spans), b"".join(spans))


@contextmanager
def recording_spans(
    config: TracesConfig, telemetry: Telemetry, *, process: str, with_content: bool = False
) -> Iterator[Callable[[NotedAnswer, AccessLine], None]]:
    """Send the spans of what a process answers, as long as it does; yields what records them."""
    sender = SpanSender(
        make_exporter(config),
        SpanEnvelope(resource_of(process), SCOPE),
        count_sent=telemetry.spans_sent.inc,
        count_lost=telemetry.spans_lost.inc,
    )
    with sender.running():
        yield RequestSpans(sender, slow_s=config.slow_s, with_content=with_content).record


def resource_of(process: str) -> Resource:
    return Resource(
        {
            names.SERVICE_NAME: names.TOLLGATE,
            names.SERVICE_INSTANCE: process,
            names.SERVICE_VERSION: own_version(),
        }
    )


def state_of(named: ClientTrace) -> str:
    return TraceState.from_header([named.state]).to_header() if named.state else ""


def encode_request(
    place: SpanPlace, answer: NotedAnswer, context: LogContext, line: AccessLine, kept_for: str
) -> bytes:
    """Encode the span that stands for all of a request."""
    head = repeated_request(
        line.method,
        line.route,
        line.status,
        work=answer.kind if answer.kind in ("background", "batch") else "",
        key=line.key if isinstance(line.key, str) else "",
        org=line.org if isinstance(line.org, str) else "",
        model=line.model if isinstance(line.model, str) else "",
        kept_for=kept_for,
    )
    rest = encode_attributes(own_attributes(line, context.stages.num_left_out))
    if (linked := context.link).trace:
        rest += encode_link(linked.trace, linked.parent, state_of(linked))
    times = StageTimes(answer)
    span = (context.span_id, times.began_ns, times.ended_ns, head, rest)
    if parent := context.parent.parent:
        return place.encode_below_remote(span[0], int(parent, 16), *span[1:])
    return place.encode(span[0], 0, *span[1:])


class StageTimes:
    """Turns the clock of an answer's stages into Unix nanoseconds."""

    def __init__(self, answer: NotedAnswer) -> None:
        self.ended_ns = round(answer.ended_at * NANOSECONDS)
        self.began_ns = self.ended_ns - round(answer.duration_s * NANOSECONDS)
        self._began_at = answer.began_at

    def to_ns(self, at: float) -> int:
        return self.began_ns + round((at - self._began_at) * NANOSECONDS)

    def end_of(self, stage: Stage) -> int:
        """Return when a stage ended; one that has not, with its request."""
        began_ns = self.to_ns(stage.began_at)
        ended_ns = self.to_ns(stage.ended_at) if stage.ended_at else self.ended_ns
        return max(began_ns, ended_ns)


@lru_cache(MAX_HEADS)
def repeated_request(
    method: str,
    route: str,
    status: int,
    *,
    work: str,
    key: str,
    org: str,
    model: str,
    kept_for: str,
) -> bytes:
    """Encode what the span of a request has in common with those of others. `work`: what it is,
    where it is none of HTTP; empty: it is one."""
    is_failed = status >= 500
    told: Attributes = {}
    if work:
        told[names.WORK] = work
        if status >= 400:
            told[names.OUTCOME] = str(status)
    else:
        told[names.HTTP_METHOD], told[names.HTTP_ROUTE] = method, route
        told[names.HTTP_STATUS] = status
    if is_failed:
        told[names.ERROR_TYPE] = str(status)
    named = {names.KEY_ID: key, names.ORG_ID: org, names.MODEL: model}
    told |= {name: value for name, value in named.items() if value}
    told[names.KEPT_FOR] = kept_for
    kind = SpanKind.INTERNAL if work else SpanKind.SERVER
    return encode_head(f"{work or method} {route}", kind, told, is_failed=is_failed)


def own_attributes(line: AccessLine, num_left_out: int) -> Attributes:
    """Say what is of a request alone. `num_left_out`: how many stages of it are not kept."""
    named = {
        names.REQUEST_ID: line.request,
        names.COST: line.cost_pico_usd,
        names.TTFT_MS: line.ttft_ms,
        names.QUEUE_MS: line.queue_ms,
        names.CLIENT_ADDRESS: line.client,
    }
    told: Attributes = {name: value for name, value in named.items() if value is not UNSET}
    if num_left_out:
        told[names.LEFT_OUT] = num_left_out
    return told


class StageSpan(msgspec.Struct):
    """The span of a stage, as far as its kind of stage decides."""

    name: str
    kind: SpanKind
    attributes: Attributes


def encode_stage(
    name: str,
    about: str,
    route: str,
    outcome: str,
    *,
    has_ended: bool,
    is_upstream: bool,
) -> bytes:
    """Encode what the span of a stage has in common with others. `route`: of the request."""
    told = describe(name, about, route, is_upstream=is_upstream)
    if outcome:
        told.attributes[names.OUTCOME] = outcome
        if outcome not in NO_FAILURE:
            told.attributes[names.ERROR_TYPE] = outcome
    if not has_ended:
        told.attributes[names.UNFINISHED] = True
    is_failed = outcome not in NO_FAILURE
    return encode_head(told.name, told.kind, told.attributes, is_failed=is_failed)


repeated_stage = lru_cache(MAX_HEADS)(encode_stage)


def describe(name: str, about: str, route: str, *, is_upstream: bool = False) -> StageSpan:
    """Say of a stage what the conventions have a name for."""
    match name:
        case "attempt":
            return describe_attempt(about, names.operation_of(route), is_upstream=is_upstream)
        case "tool_call":
            server, _, tool = about.partition("/")
            attributes: Attributes = {
                names.OPERATION: names.EXECUTE_TOOL,
                names.MCP_METHOD: names.TOOLS_CALL,
                names.TOOL_NAME: tool,
                names.MCP_SERVER: server,
            }
            return StageSpan(f"{names.TOOLS_CALL} {tool}", SpanKind.CLIENT, attributes)
        case "mcp_message":
            method, _, target = about.partition(" ")
            attributes = mcp_attributes(method, target)
            title = method if names.RESOURCE_URI in attributes else about
            return StageSpan(title, SpanKind.SERVER, attributes)
        case "mcp_request":
            server, _, method = about.partition(" ")
            attributes = {names.MCP_METHOD: method, names.MCP_SERVER: server}
            return StageSpan(method, SpanKind.CLIENT, attributes)
        case "route":
            return StageSpan(name, SpanKind.INTERNAL, {names.ROUTE_CHOICE: about})
        case "prefill":
            return StageSpan(name, SpanKind.INTERNAL, {names.CACHE_FOUND: about} if about else {})
        case _:
            attributes = {names.REPLICA: about} if about else {}
            return StageSpan(name, SpanKind.INTERNAL, attributes)


def mcp_attributes(method: str, target: str) -> Attributes:
    """Say of a message what it asks for. `target`: the name of a tool or a prompt, or the URI of a
    resource, if any."""
    found: Attributes = {
        names.MCP_METHOD: method,
        names.NETWORK_PROTOCOL: names.HTTP,
        names.NETWORK_TRANSPORT: names.TCP,
    }
    if method == names.TOOLS_CALL:
        found |= {names.OPERATION: names.EXECUTE_TOOL, names.TOOL_NAME: target}
    elif method == names.PROMPTS_GET:
        found[names.PROMPT_NAME] = target
    elif target:
        found[names.RESOURCE_URI] = target
    return found


def message_attributes(stage: Stage) -> Attributes:
    """Say what is of an MCP message alone."""
    named = {names.JSONRPC_ID: stage.ref, names.MCP_VERSION: stage.protocol}
    if stage.outcome.removeprefix("-").isdecimal():
        named[names.RPC_STATUS] = stage.outcome
    return {name: value for name, value in named.items() if value}


def describe_attempt(about: str, operation: str, *, is_upstream: bool) -> StageSpan:
    # A replica has the name of its model, and a number behind it unless it is its only engine.
    model, _, number = about.rpartition("/")
    model = model if number.isdecimal() and model else about
    attributes: Attributes = {
        names.OPERATION: operation,
        names.PROVIDER: names.OPENAI if is_upstream else names.TOLLGATE,
        names.REQUEST_MODEL: model,
        names.REPLICA: about,
    }
    return StageSpan(f"{operation} {model}", SpanKind.CLIENT, attributes)


def encode_use(stage: Stage, bill: UsageEvent | None, at_ns: int) -> bytes:
    """Encode what an attempt used, what the cache gave and what it cost, if it is on a bill."""
    told: Attributes = {names.ATTEMPT_ID: stage.ref}
    if bill is None:
        return encode_attributes(told)
    used, rated = bill.quantities, rate(bill.quantities, bill.attempt.prices)
    told[names.INPUT_TOKENS] = used.input_total
    told[names.OUTPUT_TOKENS] = used.output_total
    if used.cache_read:
        told[names.CACHE_READ_TOKENS] = used.cache_read
    if used.reasoning_output:
        told[names.REASONING_TOKENS] = used.reasoning_output
    cache: Attributes = {
        names.CACHE_READ_TOKENS: used.cache_read,
        names.CACHE_WRITE_TOKENS: used.cache_write_5m + used.cache_write_1h,
        names.UNCACHED_TOKENS: used.uncached_input,
    }
    if stage.cache_cause:
        cache[names.CACHE_CAUSE] = stage.cache_cause
    cost: Attributes = {names.COST: rated.amount_pico}
    for each in rated.lines:
        if each.amount_pico:
            cost[COST_LINES[each.component]] = each.amount_pico
    return b"".join(
        (
            encode_attributes(told),
            encode_event(names.CACHE_EVENT, at_ns, cache),
            encode_event(names.COST_EVENT, at_ns, cost),
        )
    )


def seconds_of(line: AccessLine) -> float:
    """Return how long somebody waited to see something: until the first token, or else the
    answer."""
    waited_ms = line.duration_ms if line.ttft_ms is UNSET else line.ttft_ms
    return float(waited_ms) / 1000
