"""Sends spans to a collector by OTLP, over HTTP or gRPC, from a thread of its own.

What it cannot take costs spans, which are counted, and nothing else: the queue is bounded, and who
puts something there waits for nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from foundation.tasks import LogAndContinue
from gateway.settings.file import TracesConfig
from gateway.settings.load import read_secret

log = logging.getLogger(__name__)

MAX_WAITING_TRACES = 2048
MAX_SPANS_AT_ONCE = 512
"""As OpenTelemetry's own processor sends."""
SEND_INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 5.0
"""With all that the exporter does to try again."""
CLOSE_TIMEOUT_S = 2.0

Trace = Sequence[ReadableSpan]


class SpanSender:
    """Sends traces as they come. `count_sent`, `count_lost`: hear of how many spans, in the
    thread."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        count_sent: Callable[[int], object],
        count_lost: Callable[[int], object],
    ) -> None:
        self._exporter = exporter
        self._count_sent, self._count_lost = count_sent, count_lost
        self._waiting: deque[Trace] = deque()
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

    def put(self, trace: Trace) -> None:
        """Append the spans of one request; called by one thread."""
        if len(self._waiting) < MAX_WAITING_TRACES:
            self._waiting.append(trace)
        else:
            self._num_refused += len(trace)

    def send_waiting(self) -> None:
        """Send the traces that wait by now."""
        num_waiting = len(self._waiting)
        batch: list[ReadableSpan] = []
        for _ in range(num_waiting):
            trace = self._waiting.popleft()
            if batch and len(batch) + len(trace) > MAX_SPANS_AT_ONCE:
                self._send(batch)
                batch = []
            batch += trace
        if batch:
            self._send(batch)
        if num_refused := self._num_refused - self._num_told:
            self._num_told += num_refused
            self._count_lost(num_refused)

    def _send(self, batch: list[ReadableSpan]) -> None:
        if self._exporter.export(batch) is SpanExportResult.SUCCESS:
            self._count_sent(len(batch))
            self._note(is_away=False)
        else:
            self._count_lost(len(batch))
            self._note(is_away=True)

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


def make_exporter(config: TracesConfig) -> SpanExporter:
    """Make OpenTelemetry's exporter for a protocol; what it logs of each failure is said once
    here. Its libraries are extras."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    headers = read_headers(config.headers_env)
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter(
            endpoint=config.endpoint,
            insecure=config.endpoint.startswith("http://"),
            headers=tuple(headers.items()),
            timeout=EXPORT_TIMEOUT_S,
        )
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    endpoint = f"{config.endpoint.rstrip('/')}/v1/traces"
    return http.OTLPSpanExporter(endpoint=endpoint, headers=headers, timeout=EXPORT_TIMEOUT_S)


def read_headers(variable: str | None) -> dict[str, str]:
    """Read `name=value,name=value`, as OTEL_EXPORTER_OTLP_HEADERS is written."""
    pairs = read_secret(variable, "traces.headers_env").split(",") if variable else ()
    split = (pair.partition("=") for pair in pairs if "=" in pair)
    return {name.strip().lower(): value.strip() for name, _, value in split}
