"""Counts every HTTP answer once, whoever gave it: a handler, a guard, or the router itself.

The outermost ASGI layer. It knows no route: a handler that knows a model says so in the request's
state, and a response that knows better than its first line how it ended (the client left, the
stream failed) does so too.
"""

from __future__ import annotations

from typing import Any

from litestar import Litestar
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, ReceiveMessage, Scope, Send

from gateway.routes.shared.request_state import CLIENT_LEFT, MODEL, OUTCOME
from gateway.telemetry import Telemetry

NO_ROUTE = "-"


class RequestMetrics:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self.app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        sent = CLIENT_LEFT  # where nothing is answered nobody was there any more

        async def receive_seen() -> ReceiveMessage:
            message = await receive()
            if message["type"] == "http.disconnect" and sent == CLIENT_LEFT:
                state[OUTCOME] = CLIENT_LEFT  # whatever is said from now on, nobody hears it
            return message

        async def send_seen(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive_seen, send_seen)
        except Exception:
            sent = "500"
            raise
        finally:
            telemetry_of(scope["litestar_app"]).answered(
                route=scope.get("path_template", NO_ROUTE),
                model=state.get(MODEL, ""),
                status=state.get(OUTCOME, sent),
            )


def telemetry_of(app: Litestar) -> Telemetry:
    telemetry: Telemetry = app.state["services"].telemetry
    return telemetry
