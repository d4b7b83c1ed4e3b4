"""Answers HEAD wherever there is a GET (RFC 9110, 9.3.2): the same answer without its body.

The innermost ASGI layer, around Litestar, which knows HEAD only where a handler says so. What a
proof of possession is compared with stays what was asked (`asked_method`).
"""

from __future__ import annotations

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.routes.shared.request_state import ASKED_METHOD

ALLOW = b"allow"


class HeadMethod:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self.app(scope, receive, send)
            return
        asked = str(scope["method"])

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 405:
                message["headers"] = [with_head(*header) for header in message["headers"]]
            await send(message)

        if asked != "HEAD":
            await self.app(scope, receive, send_allowed)
            return
        scope.setdefault("state", {})[ASKED_METHOD] = asked

        async def send_head(message: Message) -> None:
            scope["method"] = "HEAD"  # the server has to know, too
            if message["type"] == "http.response.body":
                message["body"] = b""
            await send_allowed(message)

        scope["method"] = "GET"
        await self.app(scope, receive, send_head)


def with_head(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Add HEAD to `Allow`."""
    methods = {each.strip() for each in value.split(b",")}
    if name.lower() != ALLOW or b"GET" not in methods:
        return name, value
    return name, b", ".join(sorted(methods | {b"HEAD"}))
