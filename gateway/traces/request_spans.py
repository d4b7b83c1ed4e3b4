"""Makes the spans of an answered request: its own, and one below it for each stage.

Made of what the access log knows, in its thread, when all has ended; so which requests are kept
beside those that were sampled can be decided by how they ended, and a request itself pays nothing.
A trace is the client's where it is trusted, or its id is the digits of the request's id and the
client's is linked to: the `trace` of each line of a log. Nothing of a prompt, an answer or an
argument is in it, but where a project stores contents: then the last attempt has them, as far as
they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
from msgspec import UNSET
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from billing.events import COMPONENTS, UsageEvent
from billing.pricing.rating import rate
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

NANOSECONDS = 1_000_000_000
MAX_KEPT_PER_S = 50.0
"""How many traces a second are kept for how they ended: when all requests fail, a worker does not
work for its traces alone."""
SCOPE = InstrumentationScope(names.TOLLGATE)
SAMPLED, NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
FAILED, FINE = Status(StatusCode.ERROR), Status(StatusCode.UNSET)
NO_FAILURE = frozenset(("", "left", "asked"))
"""Outcomes of stages that are nobody's error: the client is gone, or answers first."""

Attributes = dict[str, str | int | float | bool]


class RequestSpans:
    """Makes the spans of what a process answers. `slow_s`: how long the first token, or an answer
    without tokens, may take, unless its trace is kept; None: as long as it takes. `with_content`:
    tell what was captured of requests."""

    def __init__(
        self,
        send: Callable[[Sequence[ReadableSpan]], object],
        *,
        process: str,
        version: str,
        slow_s: float | None,
        with_content: bool = False,
    ) -> None:
        self._send, self._slow_s, self._with_content = send, slow_s, with_content
        self._kept = TokenBucket(MAX_KEPT_PER_S)
        self._resource = Resource(
            {
                names.SERVICE_NAME: names.TOLLGATE,
                names.SERVICE_INSTANCE: process,
                names.SERVICE_VERSION: version,
            }
        )

    def record(self, answer: NotedAnswer, line: AccessLine) -> None:
        """Make the spans of a request, if it is kept; called by one thread."""
        kept_for = self._kept_for(answer, line)
        if kept_for is not None:
            self._send(self._spans_of(answer, line, kept_for))

    def _kept_for(self, answer: NotedAnswer, line: AccessLine) -> str | None:
        """Return why a request is kept, if it is."""
        if answer.context is None:
            return None
        if answer.context.is_sampled:
            return "sampled"
        is_slow = self._slow_s is not None and seconds_of(line) >= self._slow_s
        if (line.status >= 500 or is_slow) and self._kept.take():
            return "error" if line.status >= 500 else "slow"
        return None

    def _spans_of(self, answer: NotedAnswer, line: AccessLine, kept_for: str) -> list[ReadableSpan]:
        context = answer.context
        assert context is not None
        client, trace = context.parent, int(context.trace, 16)
        state = state_of(client)

        def named(span_id: int) -> SpanContext:
            return SpanContext(trace, span_id, False, SAMPLED, state)

        parent = None
        if client.parent:
            parent = SpanContext(trace, int(client.parent, 16), True, SAMPLED, state)
        top, times = named(context.span_id), StageTimes(answer)
        is_work = answer.kind in ("background", "batch")
        attributes = request_attributes(line, is_work=is_work) | {names.KEPT_FOR: kept_for}
        message = next((each for each in context.stages if each.name == "mcp_message"), None)
        if context.stages.num_left_out:
            attributes[names.LEFT_OUT] = context.stages.num_left_out
        spans = [
            ReadableSpan(
                f"{answer.kind if is_work else line.method} {line.route}",
                top,
                parent,
                self._resource,
                attributes,
                links=links_to(context.link),
                kind=SpanKind.INTERNAL if is_work else SpanKind.SERVER,
                status=FAILED if line.status >= 500 else FINE,
                start_time=times.began_ns,
                end_time=times.ended_ns,
                instrumentation_scope=SCOPE,
            )
        ]
        bills = {each.id: each for each in answer.billed}
        for stage in context.stages:
            stage.span_id = stage.span_id or new_span_id()
        attempts = (stage for stage in reversed(context.stages) if stage.name == "attempt")
        last = next(attempts, None)
        for stage in context.stages:
            told = describe(stage, line, bills)
            if self._with_content and stage is last:
                told.attributes |= content_attributes(answer)
            within = stage.within
            if stage.name in ("mcp_request", "tool_call"):
                within = message
            spans.append(
                ReadableSpan(
                    told.name,
                    named(stage.span_id),
                    top if within is None else named(within.span_id),
                    self._resource,
                    told.attributes,
                    told.events(times.end_of(stage)),
                    kind=told.kind,
                    status=FINE if stage.outcome in NO_FAILURE else FAILED,
                    start_time=times.to_ns(stage.began_at),
                    end_time=times.end_of(stage),
                    instrumentation_scope=SCOPE,
                )
            )
        return spans


@contextmanager
def recording_spans(
    config: TracesConfig, telemetry: Telemetry, *, process: str, with_content: bool = False
) -> Iterator[Callable[[NotedAnswer, AccessLine], None]]:
    """Send the spans of what a process answers, as long as it does; yields what records them."""
    sender = SpanSender(
        make_exporter(config),
        count_sent=telemetry.spans_sent.inc,
        count_lost=telemetry.spans_lost.inc,
    )
    with sender.running():
        yield RequestSpans(
            sender.put,
            process=process,
            version=own_version(),
            slow_s=config.slow_s,
            with_content=with_content,
        ).record


def state_of(named: ClientTrace) -> TraceState | None:
    return TraceState.from_header([named.state]) if named.state else None


def links_to(named: ClientTrace) -> tuple[Link, ...]:
    """Return the link to a trace that is not continued; none where none is named."""
    if not named.trace:
        return ()
    flags = SAMPLED if named.is_sampled else NOT_SAMPLED
    there = (int(named.trace, 16), int(named.parent, 16))
    return (Link(SpanContext(*there, True, flags, state_of(named))),)


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


class StageSpan(msgspec.Struct):
    """The span of a stage, as far as its kind of stage decides."""

    name: str
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = {}
    bill: UsageEvent | None = None
    cache_cause: str = ""

    def events(self, at_ns: int) -> tuple[Event, ...]:
        """Return what the cache gave and what it cost, of an attempt that is on a bill."""
        if self.bill is None:
            return ()
        used, rated = self.bill.quantities, rate(self.bill.quantities, self.bill.attempt.prices)
        cache: Attributes = {
            names.CACHE_READ_TOKENS: used.cache_read,
            names.CACHE_WRITE_TOKENS: used.cache_write_5m + used.cache_write_1h,
            names.UNCACHED_TOKENS: used.uncached_input,
        }
        if self.cache_cause:
            cache[names.CACHE_CAUSE] = self.cache_cause
        cost: Attributes = {names.COST: rated.amount_pico}
        for component in COMPONENTS:
            if amount := rated.amount_of(component):
                cost[names.COST_LINE.format(component=component)] = amount
        return (Event(names.CACHE_EVENT, cache, at_ns), Event(names.COST_EVENT, cost, at_ns))


def describe(stage: Stage, line: AccessLine, bills: Mapping[str, UsageEvent]) -> StageSpan:
    """Say of a stage what the conventions have a name for. `bills`: by the ids of attempts."""
    told: StageSpan
    match stage.name:
        case "attempt":
            told = describe_attempt(stage, line, bills.get(stage.ref))
        case "tool_call":
            server, _, tool = stage.about.partition("/")
            attributes: Attributes = {
                names.OPERATION: names.EXECUTE_TOOL,
                names.MCP_METHOD: names.TOOLS_CALL,
                names.TOOL_NAME: tool,
                names.MCP_SERVER: server,
            }
            told = StageSpan(f"{names.TOOLS_CALL} {tool}", SpanKind.CLIENT, attributes)
        case "mcp_message":
            method, _, target = stage.about.partition(" ")
            told = StageSpan(stage.about, SpanKind.SERVER, mcp_attributes(method, target))
            if stage.ref:
                told.attributes[names.JSONRPC_ID] = stage.ref
        case "mcp_request":
            server, _, method = stage.about.partition(" ")
            attributes = {names.MCP_METHOD: method, names.MCP_SERVER: server}
            told = StageSpan(method, SpanKind.CLIENT, attributes)
        case _:
            told = StageSpan(stage.name, attributes={})
            if stage.about:
                told.attributes[names.REPLICA] = stage.about
    if stage.outcome:
        told.attributes[names.OUTCOME] = stage.outcome
        if stage.outcome not in NO_FAILURE:
            told.attributes[names.ERROR_TYPE] = stage.outcome
    if not stage.ended_at:
        told.attributes[names.UNFINISHED] = True
    return told


def mcp_attributes(method: str, target: str) -> Attributes:
    """Say of a message what it asks for. `target`: the name of a tool or a prompt, if any."""
    found: Attributes = {names.MCP_METHOD: method}
    if method == names.TOOLS_CALL:
        found |= {names.OPERATION: names.EXECUTE_TOOL, names.TOOL_NAME: target}
    elif method == names.PROMPTS_GET:
        found[names.PROMPT_NAME] = target
    return found


def describe_attempt(stage: Stage, line: AccessLine, bill: UsageEvent | None) -> StageSpan:
    operation = names.operation_of(line.route)
    # An engine of ours has the name of its model, an upstream a number behind it.
    model, _, number = stage.about.rpartition("/")
    model = model if number.isdecimal() and model else stage.about
    attributes: Attributes = {
        names.OPERATION: operation,
        names.PROVIDER: names.TOLLGATE if model == stage.about else names.OPENAI,
        names.REQUEST_MODEL: model,
        names.REPLICA: stage.about,
        names.ATTEMPT_ID: stage.ref,
    }
    if bill is not None:
        used = bill.quantities
        attributes[names.INPUT_TOKENS] = used.input_total
        attributes[names.OUTPUT_TOKENS] = used.output_total
        if used.cache_read:
            attributes[names.CACHE_READ_TOKENS] = used.cache_read
        if used.reasoning_output:
            attributes[names.REASONING_TOKENS] = used.reasoning_output
    return StageSpan(f"{operation} {model}", SpanKind.CLIENT, attributes, bill, stage.cache_cause)


def request_attributes(line: AccessLine, *, is_work: bool) -> Attributes:
    """Say of a request what its access line says. `is_work`: it is none of HTTP."""
    found: Attributes = {}
    if is_work:
        found[names.WORK] = str(line.kind)
        if line.status >= 400:
            found[names.OUTCOME] = str(line.status)
    else:
        found[names.HTTP_METHOD], found[names.HTTP_ROUTE] = line.method, line.route
        found[names.HTTP_STATUS] = line.status
    if line.status >= 500:
        found[names.ERROR_TYPE] = str(line.status)
    named = {
        names.REQUEST_ID: line.request,
        names.KEY_ID: line.key,
        names.ORG_ID: line.org,
        names.MODEL: line.model,
        names.COST: line.cost_pico_usd,
        names.TTFT_MS: line.ttft_ms,
        names.QUEUE_MS: line.queue_ms,
        names.CLIENT_ADDRESS: line.client,
    }
    return found | {name: value for name, value in named.items() if value is not UNSET}


def seconds_of(line: AccessLine) -> float:
    """Return how long somebody waited to see something: until the first token, or else the
    answer."""
    waited_ms = line.duration_ms if line.ttft_ms is UNSET else line.ttft_ms
    return float(waited_ms) / 1000
