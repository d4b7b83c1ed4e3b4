"""Sends a span for each answered request to an OpenTelemetry collector (OTLP over HTTP).

Made of what the access log knows, in its thread; a library's thread sends them. A span continues
the trace that the client's `traceparent` names, or begins one by the digits of the request's id,
which is the `trace` of each line of a log. Imported where an endpoint is set: its libraries are an
extra.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import UNSET
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from gateway.routes.asgi.access_log import AccessLine, NotedAnswer, TokenCounts

EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
NANOSECONDS = 1_000_000_000


class GivenTraces(RandomIdGenerator):
    """Begins the trace that was named last."""

    def __init__(self) -> None:
        self.next_trace = 0

    def generate_trace_id(self) -> int:
        return self.next_trace


class RequestSpans:
    """`endpoint`: the collector's base URL. `process`: the name of this one."""

    def __init__(self, endpoint: str, *, process: str) -> None:
        self._traces = GivenTraces()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource({"service.name": "tollgate", "service.instance.id": process}),
            shutdown_on_exit=False,
            id_generator=self._traces,
        )
        exporter = OTLPSpanExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tollgate")

    @contextmanager
    def running(self) -> Iterator[RequestSpans]:
        """Send what is left at the end; a collector that is away is not waited for."""
        try:
            yield self
        finally:
            ending = threading.Thread(target=self._provider.shutdown, daemon=True)
            ending.start()
            ending.join(CLOSE_TIMEOUT_S)

    def record(self, answer: NotedAnswer, line: AccessLine) -> None:
        """Make the span of a request; called by one thread."""
        if answer.context is None:
            return
        self._traces.next_trace = int(answer.context.trace, 16)
        ended_ns = round(answer.ended_at * NANOSECONDS)
        span = self._tracer.start_span(
            f"{line.method} {line.route}",
            context=parent_of(answer.context.trace, answer.context.parent),
            kind=SpanKind.SERVER,
            attributes=attributes_of(line),
            start_time=ended_ns - round(answer.duration_s * NANOSECONDS),
        )
        if line.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(ended_ns)


def parent_of(trace: str, parent: str) -> Context:
    """Return the context of a span with this parent, of which there may be none."""
    if not parent:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED)
    above = SpanContext(int(trace, 16), int(parent, 16), is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(above), Context())


def attributes_of(line: AccessLine) -> dict[str, str | int | float]:
    """Name what a line says as OpenTelemetry's semantic conventions do, where they have a name."""
    found: dict[str, str | int | float] = {
        "http.request.method": line.method,
        "http.route": line.route,
        "http.response.status_code": line.status,
    }
    named = {
        "tollgate.request.id": line.request,
        "tollgate.key.id": line.key,
        "tollgate.org.id": line.org,
        "gen_ai.request.model": line.model,
        "tollgate.cost_pico_usd": line.cost_pico_usd,
        "tollgate.ttft_ms": line.ttft_ms,
        "tollgate.queue_ms": line.queue_ms,
        "client.address": line.client,
    }
    found |= {name: value for name, value in named.items() if value is not UNSET}
    if isinstance(counts := line.tokens, TokenCounts):
        read = counts.uncached + counts.cache_read + counts.cache_write + counts.embedding
        found["gen_ai.usage.input_tokens"] = read
        found["gen_ai.usage.output_tokens"] = counts.output + counts.reasoning
    return found
