"""Collectors of OpenTelemetry: they take spans over HTTP or gRPC as its protocol says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Said = dict[str, str | int | float | bool]


class Taken:
    """Holds what a collector took. `url`: where it is."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.resources: list[Said] = []
        self.tokens: list[str] = []
        """The values of the header `x-token` that it was shown."""
        self.held: threading.Event | None = None
        """An event before which it answers nothing."""

    def take(self, asked: ExportTraceServiceRequest, token: str) -> None:
        if self.held is not None:
            self.held.wait(30)
        self.tokens.append(token)
        for resource in asked.resource_spans:
            self.resources.append(said(resource.resource))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


def said(of: Span | Span.Event | Resource) -> Said:
    """Return the attributes of a span, an event or a resource."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@contextmanager
def http_collector() -> Iterator[Taken]:
    taken = Taken()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = ExportTraceServiceRequest()
            asked.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/traces"
            taken.take(asked, self.headers.get("x-token", ""))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.daemon_threads, server.block_on_close = True, False
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        taken.url = f"http://127.0.0.1:{server.server_port}"
        yield taken
        server.shutdown()
        serving.join()


@contextmanager
def grpc_collector() -> Iterator[Taken]:
    taken = Taken()

    class Receiver(TraceServiceServicer):
        def Export(
            self, asked: ExportTraceServiceRequest, context: grpc.ServicerContext
        ) -> ExportTraceServiceResponse:
            shown = dict(context.invocation_metadata())
            taken.take(asked, str(shown.get("x-token", "")))
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Receiver(), server)
    taken.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield taken
    finally:
        server.stop(None)


COLLECTORS: dict[str, Callable[[], object]] = {"http": http_collector, "grpc": grpc_collector}
