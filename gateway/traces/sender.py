"""Sends spans to a collector by OTLP, over HTTP or gRPC, from a thread of its own.

What it cannot take costs spans, which are counted, and nothing else: the queue is bounded, and who
puts something there waits for nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from foundation.tasks import LogAndContinue
from gateway.settings.file import TracesConfig
from gateway.settings.load import read_secret
from gateway.traces.span_encoding import EncodedTrace, SpanEnvelope

log = logging.getLogger(__name__)

MAX_WAITING_TRACES = 2048
MAX_WAITING_BYTES = 32 * 1024 * 1024
"""Texts make a trace large, where projects store them; the last one may go beyond it."""
MAX_SPANS_AT_ONCE = 2048
MAX_BYTES_AT_ONCE = 1024 * 1024
"""A collector takes 4 MiB by gRPC, as it is delivered. A trace that is longer goes alone."""
SEND_INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 5.0
"""With all that the exporter does to try again."""
CLOSE_TIMEOUT_S = 2.0


class Exporter(Protocol):
    """Sends one message to a collector, an `ExportTraceServiceRequest`, and tells whether it was
    taken."""

    def send(self, message: bytes) -> bool: ...

    def shutdown(self) -> None: ...


class SpanSender:
    """Sends traces as they come, in messages of an envelope. `count_sent`, `count_lost`: hear of
    how many spans, in the thread."""

    def __init__(
        self,
        exporter: Exporter,
        envelope: SpanEnvelope,
        *,
        count_sent: Callable[[int], object],
        count_lost: Callable[[int], object],
    ) -> None:
        self._exporter, self._envelope = exporter, envelope
        self._count_sent, self._count_lost = count_sent, count_lost
        self._waiting: deque[EncodedTrace] = deque()
        self._bytes_put = 0  # counted by who puts
        self._bytes_taken = 0  # by who sends
        self._num_refused = 0  # counted by who puts, told by who sends
        self._num_told = 0
        self._ended, self._is_away = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    @contextmanager
    def running(self) -> Iterator[SpanSender]:
        """Send what is left at the end; a collector that is away is not waited for."""
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join(CLOSE_TIMEOUT_S)
            # Beside it: an exporter that is at work is not waited for either.
            threading.Thread(target=self._exporter.shutdown, daemon=True).start()

    @property
    def has_room(self) -> bool:
        """Whether another trace may wait; asked before one is made."""
        return (
            len(self._waiting) < MAX_WAITING_TRACES
            and self._bytes_put - self._bytes_taken < MAX_WAITING_BYTES
        )

    def put(self, trace: EncodedTrace) -> None:
        """Append the spans of one request, for which there is room; called by one thread."""
        self._bytes_put += len(trace.data)
        self._waiting.append(trace)

    def refuse(self, num_spans: int) -> None:
        """Count spans for which there is no room; called by the same thread."""
        self._num_refused += num_spans

    def send_waiting(self) -> None:
        """Send the traces that wait by now."""
        batch: list[EncodedTrace] = []
        num_spans = num_bytes = 0
        for _ in range(len(self._waiting)):
            trace = self._waiting.popleft()
            self._bytes_taken += len(trace.data)
            num_spans += trace.num_spans
            num_bytes += len(trace.data)
            if batch and (num_spans > MAX_SPANS_AT_ONCE or num_bytes > MAX_BYTES_AT_ONCE):
                self._send(batch)
                batch, num_spans, num_bytes = [], trace.num_spans, len(trace.data)
            batch.append(trace)
        if batch:
            self._send(batch)
        if num_refused := self._num_refused - self._num_told:
            self._num_told += num_refused
            self._count_lost(num_refused)

    def _send(self, batch: Sequence[EncodedTrace]) -> None:
        num_spans, is_taken = sum(trace.num_spans for trace in batch), False
        try:
            is_taken = self._exporter.send(self._envelope.message_of(batch))
        finally:
            (self._count_sent if is_taken else self._count_lost)(num_spans)
            self._note(is_away=not is_taken)

    def _note(self, *, is_away: bool) -> None:
        """Log once that the collector takes no spans, and once that it does again."""
        if is_away != self._is_away:
            self._is_away = is_away
            said = "takes no spans: they are lost" if is_away else "takes spans again"
            log.warning("traces: the collector %s", said)

    def _run(self) -> None:
        log_and_continue = LogAndContinue(log, "spans are lost")
        while not self._ended.wait(SEND_INTERVAL_S):
            with log_and_continue:
                self.send_waiting()
        with log_and_continue:
            self.send_waiting()


class HttpExporter(OTLPSpanExporter):
    """Sends messages that are encoded already as OpenTelemetry's exporter sends those that it makes
    of spans: with its retries, headers, certificates and compression."""

    def send(self, message: bytes) -> bool:
        return self._client.export(message).success


def make_exporter(config: TracesConfig) -> Exporter:
    """Make OpenTelemetry's exporter for a protocol; what it logs of each failure is said once
    here. Its libraries are extras."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    headers = read_headers(config.headers_env)
    if config.protocol == "http":
        endpoint = f"{config.endpoint.rstrip('/')}/v1/traces"
        return HttpExporter(endpoint=endpoint, headers=headers, timeout=EXPORT_TIMEOUT_S)
    return make_grpc_exporter(config.endpoint, headers)


def make_grpc_exporter(endpoint: str, headers: Mapping[str, str]) -> Exporter:
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

    class GrpcExporter(grpc.OTLPSpanExporter):
        """The same over gRPC, whose stub takes messages alone."""

        def send(self, message: bytes) -> bool:
            return self._export(message) is SpanExportResult.SUCCESS  # type: ignore[arg-type]

        def _translate_data(self, data: bytes) -> ExportTraceServiceRequest:  # type: ignore[override]
            made: ExportTraceServiceRequest = ExportTraceServiceRequest.FromString(data)
            return made

    return GrpcExporter(
        endpoint=endpoint,
        insecure=endpoint.startswith("http://"),
        headers=tuple(headers.items()),
        timeout=EXPORT_TIMEOUT_S,
    )


def read_headers(variable: str | None) -> dict[str, str]:
    """Read `name=value,name=value`, as OTEL_EXPORTER_OTLP_HEADERS is written."""
    pairs = read_secret(variable, "traces.headers_env").split(",") if variable else ()
    split = (pair.partition("=") for pair in pairs if "=" in pair)
    return {name.strip().lower(): value.strip() for name, _, value in split}
