"""Answers a command's requests with what a test wrote down, and remembers them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from click.testing import CliRunner, Result

from gateway.cli.main import tollgate


class FakeGateway(ThreadingHTTPServer):
    """`answers`: by method and path, the bodies in the order of requests; the last one stays.
    `asked`: (method, path, query, body)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        self.asked: list[tuple[str, str, dict[str, list[str]], Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def on(self, method: str, path: str, *bodies: Any, status: int = 200) -> None:
        self.answers[method, path] = [(status, each) for each in bodies]

    def run(self, *arguments: str) -> Result:
        """Run `tollgate ARGUMENTS` for this gateway."""
        target = ("--url", self.url, "--key", "sk-test")
        return CliRunner().invoke(tollgate, [*arguments, *target], prog_name="tollgate")


class Handler(BaseHTTPRequestHandler):
    server: FakeGateway

    def answer(self) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((self.command, parts.path, parse_qs(parts.query), body))
        bodies = self.server.answers.get((self.command, parts.path), [(404, {"title": "None."})])
        status, said = bodies.pop(0) if len(bodies) > 1 else bodies[0]
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def log_message(self, *_: Any) -> None:
        """Say nothing: the tests look at `asked`."""


@contextmanager
def serving() -> Iterator[FakeGateway]:
    with FakeGateway() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
