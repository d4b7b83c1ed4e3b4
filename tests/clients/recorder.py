"""Stands between a client and Tollgate: passes requests on, and remembers them as a test can keep
them.

What is kept has no text that is long (it is the vendor's), no name of a folder and no identity of
the machine.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

TIMEOUT_S = 120.0
MAX_TEXT_CHARS = 160
SHOWN_CHARS = 60
KEPT_HEADERS = ("anthropic-beta", "anthropic-version", "content-type", "user-agent", "originator")
HOP_BY_HOP = ("connection", "content-length", "host", "transfer-encoding")
IDENTITIES = ("user_id", "client_metadata", "prompt_cache_key")
WHOLE = ("definition",)
"""Grammars, which mean something only as they are."""
FOLDER = "/home/user"
DATE = re.compile(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}")


class Recorder:
    """Forwards to `base_url`. `statuses`: those of all answers so far; `requests`: what was asked,
    with bodies as they came."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.requests: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[Recorder]:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_any(self) -> None:
                recorder.forward(self)

            do_GET = do_POST = do_HEAD = do_any

            def log_message(self, format: str, *args: Any) -> None:
                """Be silent."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        self.requests.append(
            {
                "method": handler.command,
                "path": handler.path,
                "headers": dict(handler.headers.items()),
                "body": json.loads(body) if body else None,
            }
        )
        sent = {
            name: value for name, value in handler.headers.items() if name.lower() not in HOP_BY_HOP
        }
        with httpx.stream(
            handler.command,
            self.base_url + handler.path,
            content=body,
            headers={**sent, "accept-encoding": "identity"},
            timeout=TIMEOUT_S,
        ) as answer:
            self.statuses.append(answer.status_code)
            handler.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    handler.send_header(name, value)
            handler.send_header("connection", "close")
            handler.end_headers()
            for piece in answer.iter_raw():
                handler.wfile.write(piece)
                handler.wfile.flush()
        handler.close_connection = True

    def kept(self, folder: str) -> list[dict[str, Any]]:
        """Return the requests as a test keeps them. `folder`: where all of the client lay."""
        return [
            {
                **request,
                "headers": {
                    name.lower(): value
                    for name, value in request["headers"].items()
                    if name.lower() in KEPT_HEADERS
                },
                "body": shortened(request["body"], folder),
            }
            for request in self.requests
        ]


def shortened(value: Any, folder: str, name: str = "") -> Any:
    """Cut what is long, and leave out who and where. `name`: of the field that holds it."""
    if name in IDENTITIES:
        return {"client": "x"} if isinstance(value, Mapping) else "x"
    if isinstance(value, Mapping):
        return {key: shortened(each, folder, key) for key, each in value.items()}
    if isinstance(value, list):
        return [shortened(each, folder) for each in value]
    if not isinstance(value, str):
        return value
    text = DATE.sub("2026-01-01", value.replace(folder, FOLDER))
    most = SHOWN_CHARS if name == "description" else MAX_TEXT_CHARS
    return text if len(text) <= most or name in WHOLE else text[:SHOWN_CHARS]
