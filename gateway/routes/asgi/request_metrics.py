"""Counts every HTTP answer once and notes it in the access log, whoever gave it: a handler, a
guard, or the router itself.

The outermost ASGI layer. It knows no route: a handler that knows a model says so in the request's
state, and a response that knows better than its first line how it ended (the client left, the
stream failed) does so too.
"""

from __future__ import annotations

import time
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, ReceiveMessage, Scope, Send

from foundation.request_context import LOG_CONTEXT, LogContext
from gateway.net.client_address import client_address
from gateway.networks import Networks
from gateway.request_log.answers import NotedAnswer
from gateway.routes.asgi.access_log import AccessLog
from gateway.routes.shared.request_state import (
    ASKED_METHOD,
    CLIENT_LEFT,
    ERROR_CODE,
    METER,
    MODEL,
    OUTCOME,
)
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter

NO_ROUTE = "-"
ACCESS_LOG = "access_log"
"""The key of the application's state under which the log is, where one is written."""


class RequestMetrics:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self.app(scope, receive, send)
            return
        begun_at = time.perf_counter()
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
            shared = scope["litestar_app"].state
            route, model = scope.get("path_template", NO_ROUTE), state.get(MODEL, "")
            status = state.get(OUTCOME, sent)
            telemetry: Telemetry = shared["services"].telemetry
            telemetry.answered(route=route, model=model, status=status)
            meter: RequestMeter | None = state.get(METER)
            is_queued = meter is not None and meter.is_handed_over
            if meter is not None and not is_queued:
                meter.judge(int(status))
            # As its time to the first token: a short answer is written at once, and ends with it.
            since = begun_at if meter is None else min(begun_at, meter.received_at)
            access_log: AccessLog | None = shared.get(ACCESS_LOG)
            if access_log is not None:
                access_log.note(
                    NotedAnswer(
                        time.time(),
                        time.perf_counter() - since,
                        state.get(ASKED_METHOD) or scope["method"],
                        route,
                        status,
                        LOG_CONTEXT.get(),
                        model,
                        scope.get("user"),
                        None if is_queued else meter,
                        shown_client(scope) if access_log.shows_client else None,
                        begun_at,
                        "queued" if is_queued else "request",
                        None,
                        "" if status == CLIENT_LEFT else state.get(ERROR_CODE, ""),
                    )
                )


def note_refused(telemetry: Telemetry, log: AccessLog, request_id: str, status: int) -> None:
    """Count and note what was refused before it was a request of any route: its head was too large,
    or came too slowly."""
    telemetry.answered(route=NO_ROUTE, model="", status=str(status))
    context, now = LogContext(request_id), time.perf_counter()
    log.note(
        NotedAnswer(
            time.time(), 0.0, "-", NO_ROUTE, str(status), context, "", None, None, None, now
        )
    )


def shown_client(scope: HTTPScope) -> str | None:
    """Return where the request came from, as far as trusted proxies tell."""
    trusted: Networks = scope["litestar_app"].state["services"].trusted_proxies
    peer = scope["client"][0] if scope["client"] else None
    address = client_address(peer, scope["headers"], trusted)
    return None if address is None else str(address)
