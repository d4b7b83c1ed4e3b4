"""Adds the headers of every response, whoever made it: `x-request-id`, which Anthropic's clients
read as `request-id`, `openai-version` and `openai-processing-ms`.

An outer ASGI layer: it names the request, for the log too, and times it until the first byte of
the answer. The id is the server's own, whatever a client's `X-Client-Request-Id` says.
"""

from __future__ import annotations

import time

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from foundation.request_context import LOG_CONTEXT, LogContext
from gateway.ids import uuid7_hex
from gateway.routes.asgi.access_log import AccessLog
from gateway.routes.asgi.request_metrics import ACCESS_LOG
from gateway.routes.shared.request_state import REQUEST_ID

OPENAI_VERSION = b"2020-10-01"


def named(request_id: str, *, elapsed_ms: float) -> list[tuple[bytes, bytes]]:
    name = request_id.encode()
    return [
        (b"x-request-id", name),
        (b"request-id", name),
        (b"openai-version", OPENAI_VERSION),
        (b"openai-processing-ms", str(round(elapsed_ms)).encode()),
    ]


class ResponseHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self.app(scope, receive, send)
            return
        request_id = f"req_{uuid7_hex()}"
        scope.setdefault("state", {})[REQUEST_ID] = request_id
        access_log: AccessLog | None = scope["litestar_app"].state.get(ACCESS_LOG)
        policy = None if access_log is None else access_log.policy
        # For this task and what it makes.
        LOG_CONTEXT.set(LogContext(request_id, scope["headers"], policy))
        received_at = time.perf_counter()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                elapsed_ms = (time.perf_counter() - received_at) * 1000
                message["headers"] = [
                    *message["headers"],
                    *named(request_id, elapsed_ms=elapsed_ms),
                ]
            await send(message)

        await self.app(scope, receive, send_named)
