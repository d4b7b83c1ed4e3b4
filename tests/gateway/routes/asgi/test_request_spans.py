"""Each answered request is a span that a collector of OpenTelemetry gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from bench.tools.ports import free_port
from foundation.logs import LogContext
from gateway.generation_events import MeteredUsage
from gateway.routes.asgi.access_log import AccessLog, NotedAnswer
from gateway.routes.asgi.request_spans import RequestSpans
from gateway.settings.file import LogsConfig
from gateway.telemetry import RequestMeter, Telemetry
from tests.gateway.inference.test_price_lists import WHO
from tests.gateway.routes.asgi.test_access_log import CHAT, REQUEST, billed

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = ((b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()),)


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans: list[Span] = []
        self.names: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        asked = ExportTraceServiceRequest()
        asked.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/v1/traces"
        for resource in asked.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.server.names.add(f"{named['service.name']} {named['service.instance.id']}")
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def note(endpoint: str, *answers: NotedAnswer, access: bool = True) -> bytes:
    """Note what was answered, end, and return the lines of the access log."""
    written: list[bytes] = []
    with RequestSpans(endpoint, process="worker-0").running() as spans:
        log = AccessLog(
            LogsConfig(access=access),
            Telemetry(models=["m"]),
            written.append,
            process="worker-0",
            on_answer=spans.record,
        )
        with log.running():
            for answer in answers:
                log.note(answer)
    return b"".join(written)


def test_an_answer_is_a_span_in_the_trace_of_its_client(collector: Collector) -> None:
    meter = RequestMeter(Telemetry(models=["m"]), "m")
    meter.used(*billed(MeteredUsage(uncached_input=3, cache_read=2, output=5)))
    whole = (1_000.0, 1.5, "POST", CHAT, "200", LogContext(REQUEST, SENT), "m", WHO, meter, None)
    failed = (1_001.0, 0.5, "GET", "/x", "500", LogContext(REQUEST), "", None, None, None)
    note(collector.url, NotedAnswer(*whole), NotedAnswer(*failed))
    first, second = collector.spans
    assert collector.names == {"tollgate worker-0"}
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert (first.name, first.kind) == (f"POST {CHAT}", Span.SPAN_KIND_SERVER)
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (998_500_000_000, 10**12)
    said = {each.key: each.value for each in first.attributes}
    assert said["http.response.status_code"].int_value == 200
    assert said["gen_ai.request.model"].string_value == "m"
    assert said["gen_ai.usage.input_tokens"].int_value == 5
    assert said["gen_ai.usage.output_tokens"].int_value == 5
    assert said["tollgate.request.id"].string_value == REQUEST
    assert (second.trace_id.hex(), second.parent_span_id) == (REQUEST[-32:], b"")
    assert second.status.code == Status.STATUS_CODE_ERROR != first.status.code


def test_lines_and_spans_are_wanted_each_by_itself(collector: Collector) -> None:
    answer = NotedAnswer(1.0, 0.1, "GET", "/x", "200", LogContext(REQUEST), "", None, None, None)
    assert note(collector.url, answer, access=False) == b""
    assert len(collector.spans) == 1


def test_a_collector_that_is_away_keeps_no_line_and_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.routes.asgi.request_spans.CLOSE_TIMEOUT_S", 0.05)
    answer = NotedAnswer(1.0, 0.1, "GET", "/x", "200", LogContext(REQUEST), "", None, None, None)
    lines = note(f"http://127.0.0.1:{free_port()}", answer)
    assert REQUEST.encode() in lines
