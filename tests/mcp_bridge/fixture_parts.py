"""Holds what is no tool of the fixture server: its log of events, its seal, how it refuses an
era."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import mcp_types as types
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.shared.exceptions import MCPError

MODERN = "2026-07-28"
KEY = b"only this fixture's"


def sealed(value: str) -> str:
    return f"{value}.{hmac.digest(KEY, value.encode(), hashlib.sha256).hex()}"


def unsealed(state: str) -> str:
    value, _, _ = state.rpartition(".")
    if not hmac.compare_digest(sealed(value), state):
        raise MCPError(types.INVALID_PARAMS, "Invalid or expired requestState")
    return value


class Log(EventStore):
    """All events, so that whoever lost a stream reads on."""

    def __init__(self) -> None:
        self.events: list[tuple[str, types.JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: str, message: types.JSONRPCMessage | None) -> str:
        self.events.append((stream_id, message))
        return str(len(self.events))

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        if not last_event_id.isdigit() or not 0 < int(last_event_id) <= len(self.events):
            return None
        stream = self.events[int(last_event_id) - 1][0]
        for number, (of, message) in enumerate(self.events, 1):
            if number > int(last_event_id) and of == stream and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream


def of_one_era(app: Any, era: str) -> Any:
    """As a server that knows no other."""

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and era != "both":
            headers = dict(scope["headers"])
            version = headers.get(b"mcp-protocol-version", b"").decode()
            modern = version not in ("", "2025-11-25", "2025-06-18", "2025-03-26")
            if modern != (era == MODERN):
                error: Any = {"code": -32000, "message": "Bad Request: Unsupported version"}
                if era == MODERN:
                    error = {"code": -32022, "message": "Unsupported protocol version"}
                    error["data"] = {"supported": [MODERN], "requested": version}
                body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
                head = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 400, "headers": head})
                await send({"type": "http.response.body", "body": body})
                return
        await app(scope, receive, send)

    return asgi
