"""How a load speaks MCP: the requests of either era, one after the other or at once.

In the older era requests of one session have numbers, and two under way may not have the same: so
each connection has a session of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from bench.tools.mcp_upstream import ARGUMENTS, LEGACY, MODERN
from mcp_bridge.protocol.eras import SESSION_HEADER, VERSION_HEADER

ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
TIMEOUT_S = 60.0
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
}
CLIENT = {"name": "bench", "version": "1"}

Params = dict[str, Any]


class McpTarget(NamedTuple):
    """An endpoint, and who asks there."""

    url: str
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


def call_of(name: str) -> tuple[str, Params]:
    return "tools/call", {"name": name, "arguments": ARGUMENTS}


def modern(method: str, params: Params) -> tuple[dict[str, str], bytes]:
    headers = {**ACCEPT, VERSION_HEADER: MODERN, "mcp-method": method}
    if "name" in params:
        headers["mcp-name"] = params["name"]
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": META}}
    return headers, msgspec.json.encode(message)


def legacy(method: str, params: Params, session: str) -> tuple[dict[str, str], bytes]:
    headers = {**ACCEPT, VERSION_HEADER: LEGACY, SESSION_HEADER: session}
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return headers, msgspec.json.encode(message)


class Requests:
    """A `bench.tools.load.LoadTarget`: the same request in so many sessions, each in its turn. It
    was answered well once in each of them. Raises: SystemExit, where it was not."""

    def __init__(self, place: McpTarget, era: str, method: str, params: Params, count: int) -> None:
        self._place = place
        sessions: Sequence[str] = [""]
        with httpx.Client(headers=place.headers, timeout=TIMEOUT_S) as http:
            if era == LEGACY:
                sessions = [open_session(http, place.url) for _ in range(count)]
                made = [legacy(method, params, session) for session in sessions]
            else:
                made = [modern(method, params)]
            for headers, body in made:
                check(http.post(place.url, headers=headers, content=body))
        self._sessions = sessions
        self._next = itertools.cycle([written(place, *each) for each in made])

    @property
    def url(self) -> str:
        return self._place.url

    def request(self) -> bytes:
        return next(self._next)

    def close(self) -> None:
        """Ends the sessions."""
        with httpx.Client(headers=self._place.headers, timeout=TIMEOUT_S) as http:
            for session in filter(None, self._sessions):
                headers = {VERSION_HEADER: LEGACY, SESSION_HEADER: session}
                http.delete(self._place.url, headers=headers).raise_for_status()


def written(place: McpTarget, headers: dict[str, str], body: bytes) -> bytes:
    parts = urlsplit(place.url)
    given = {
        "host": parts.netloc,
        **place.headers,
        **headers,
        "content-length": str(len(body)),
    }
    lines = [f"POST {parts.path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def open_session(http: httpx.Client, url: str) -> str:
    """Its id. Raises: SystemExit."""
    params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": CLIENT}
    message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    answer = http.post(url, headers=ACCEPT, json=message)
    check(answer)
    session = answer.headers[SESSION_HEADER]
    said = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    headers = {**ACCEPT, VERSION_HEADER: LEGACY, SESSION_HEADER: session}
    http.post(url, headers=headers, json=said).raise_for_status()
    return str(session)


def check(answer: httpx.Response) -> None:
    """Raises: SystemExit, for anything but a result that is one."""
    found = answer.json() if answer.status_code == 200 else {}
    if "result" not in found or found["result"].get("isError"):
        raise SystemExit(f"{answer.request.url}: {answer.status_code} {answer.text[:2000]}")
