"""An MCP server in a thread that counts the calls that reach it, and can be held amid one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

HELD_S = 60.0
LOOK: dict[str, Any] = {
    "name": "look",
    "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}},
    "annotations": {"readOnlyHint": True},
}
TOOLS = [LOOK, {**LOOK, "name": "hold"}, {**LOOK, "name": "fail"}, {**LOOK, "name": "break"}]
"""`fail` says that it failed; `break` is no answer at all; `hold` waits until `release` is set."""


class Counting:
    def __init__(self) -> None:
        self.called: list[str] = []
        self.asked: list[tuple[str, str]] = []
        """Paths and methods, of all that came."""
        self.tools = TOOLS
        self.prompts: list[dict[str, Any]] = [{"name": "hello"}]
        self.resources: list[dict[str, Any]] = []
        self.instructions: str | None = None
        self.error: dict[str, Any] = {"code": -32000, "message": "broken"}
        self.holds, self.release = threading.Event(), threading.Event()
        self.is_down = False
        self.url = ""

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        method = message["method"]
        if method == "server/discover":
            can = {"tools": {}, "prompts": {}, "resources": {}}
            said = {} if self.instructions is None else {"instructions": self.instructions}
            return {"result": {"supportedVersions": ["2026-07-28"], "capabilities": can, **said}}
        kind, _, is_list = method.rpartition("/")
        if is_list == "list":
            listed = {kind: getattr(self, kind)}
            return {"result": {**listed, "ttlMs": 0, "cacheScope": "public"}}
        name = message["params"]["name"]
        self.called.append(name)
        if method == "prompts/get":
            return {"result": {"messages": []}}
        if name == "hold":
            self.holds.set()
            self.release.wait(HELD_S)
        if name == "break":
            return {"error": self.error}
        content = [{"type": "text", "text": "all is well"}]
        return {"result": {"content": content, "isError": name == "fail"}}


@contextmanager
def counting() -> Iterator[Counting]:
    found = Counting()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            message = msgspec.json.decode(body)
            found.asked.append((self.path, message["method"]))
            said = {"jsonrpc": "2.0", "id": message.get("id"), **found.answer(message)}
            content = msgspec.json.encode(said)
            self.send_response(503 if found.is_down else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """To nobody."""

    class Listening(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Ignore the error: a client that was killed takes no answer."""

    server = Listening(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield found
    finally:
        found.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
