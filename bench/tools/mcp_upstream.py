"""An MCP server that costs next to nothing, of both eras, over Streamable HTTP.

`python -m bench.tools.mcp_upstream PORT`: `/new` speaks 2026-07-28, `/old` 2025-11-25, `/many` is
`/new` with NUM_MANY tools. Answers are made once, but for the request's id; it keeps nothing and
tells of nothing.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import uvloop

from bench.tools.plain_http import PlainHttp

MODERN, LEGACY = "2026-07-28", "2025-11-25"
NUM_MANY = 1000
TOOL = "look_up"
INFO = {"name": "bench", "version": "1"}
ARGUMENTS = {"city": "Bern", "days": 3, "units": "metric"}
REPORT = {"city": "Bern", "celsius": [11.5, 12.0, 9.5], "rain": False}

Result = dict[str, Any]


def tool(number: int) -> dict[str, Any]:
    """As real ones are: a few arguments, each with a word about it; and a result with a schema."""
    name = TOOL if number == 0 else f"{TOOL}_{number}"
    about = f"Looks the weather of a city up, as the {number}th office sees it."
    arguments = {
        "city": {"type": "string", "minLength": 1, "description": "Where."},
        "days": {"type": "integer", "minimum": 1, "maximum": 14, "description": "How many."},
        "units": {"type": "string", "enum": ["metric", "imperial"], "description": "Of what."},
    }
    report = {
        "city": {"type": "string"},
        "celsius": {"type": "array", "items": {"type": "number"}, "maxItems": 14},
        "rain": {"type": "boolean"},
    }
    return {
        "name": name,
        "title": "Weather",
        "description": about,
        "inputSchema": {"type": "object", "properties": arguments, "required": ["city"]},
        "outputSchema": {"type": "object", "properties": report, "required": ["city", "celsius"]},
        "annotations": {"readOnlyHint": True},
    }


def called() -> Result:
    text = msgspec.json.encode(REPORT).decode()
    return {"content": [{"type": "text", "text": text}], "structuredContent": REPORT}


def results(modern: bool, num_tools: int) -> dict[str, Result]:
    """By method."""
    can: Result = {"tools": {}}
    more: Result = {"resultType": "complete"} if modern else {}
    cached: Result = {"ttlMs": 0, "cacheScope": "private"} if modern else {}
    found: dict[str, Result] = {
        "tools/call": {**called(), **more},
        "tools/list": {"tools": [tool(number) for number in range(num_tools)], **more, **cached},
    }
    if modern:
        meta = {"io.modelcontextprotocol/serverInfo": INFO}
        said = {"supportedVersions": [MODERN], "capabilities": can, "_meta": meta}
        found["server/discover"] = {**said, **more, **cached}
    else:
        said = {"protocolVersion": LEGACY, "capabilities": can, "serverInfo": INFO}
        found |= {"initialize": said, "ping": {}}
    return found


class Site:
    """The server that stands behind one path."""

    def __init__(self, modern: bool, num_tools: int) -> None:
        self._modern = modern
        self._ready = {
            method: msgspec.json.encode(result)
            for method, result in results(modern, num_tools).items()
        }

    def answer(self, verb: bytes, body: bytes) -> bytes:
        if verb != b"POST":
            return plain(b"200 OK" if verb == b"DELETE" else b"405 Method Not Allowed")
        message = msgspec.json.decode(body)
        if "id" not in message or "method" not in message:
            return plain(b"202 Accepted")
        method, id_ = message["method"], msgspec.json.encode(message["id"])
        ready = self._ready.get(method)
        if ready is None:
            error = b'{"jsonrpc":"2.0","id":%b,"error":{"code":-32601,"message":"unknown"}}' % id_
            return json(error, status=b"404 Not Found" if self._modern else b"200 OK")
        session = b"mcp-session-id: bench\r\n" if method == "initialize" else b""
        return json(b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (id_, ready), session)


def plain(status: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status


def json(body: bytes, headers: bytes = b"", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status, headers, len(body)) + body


SITES = {
    b"/new": Site(True, 1),
    b"/old": Site(False, 1),
    b"/many": Site(True, NUM_MANY),
}


class Server(PlainHttp):
    def answer(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        verb, path, _ = head.split(b" ", 2)
        site = SITES.get(path)
        transport.write(plain(b"404 Not Found") if site is None else site.answer(verb, body))


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
