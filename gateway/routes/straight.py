"""A hot route's requests go straight to its handler.

An ASGI layer between `envelope` and all others. What it passes by is layers that would do nothing
for such a request, and the framework's routing, which would find the same handler, build the same
request and call it with nothing else: a tenth of what a request costs. Whatever is not plainly one
(another method, a path written otherwise, a page's `Origin`, a `Host` that is to be looked at) goes
the long way, which knows what to do with it.

Above: `app`. Below: `access.HotRoute`, whose handlers take a request, and the guards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from litestar import Litestar, Request, Response
from litestar.enums import ScopeType
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.routes.access import HotRoute

Refuse = Callable[[Request[Any, Any, Any], Exception], Response[bytes]]
PLAIN_HOST = re.compile(rb"[A-Za-z0-9.-]+(?::[0-9]+)?")


class Straight:
    def __init__(self, app: ASGIApp, litestar: Litestar, refuse: Refuse) -> None:
        self._app, self._refuse = app, refuse
        self._handlers = {
            (method, route.path): handler
            for route in litestar.routes
            if isinstance(route, HTTPRoute)
            for method, (handler, _) in route.route_handler_map.items()
            if isinstance(handler, HotRoute)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == ScopeType.HTTP:
            handler = self._handlers.get((scope["method"], scope["path"]))
        if handler is None or not is_plain(scope["headers"]):
            await self._app(scope, receive, send)
            return
        scope["path_template"], scope["path_params"] = scope["path"], {}
        scope["route_handler"] = handler
        request: Request[Any, Any, Any] = Request(scope, receive, send)
        try:
            await handler.authorize_connection(request)
            answer: ASGIApp = await handler.fn(request)
        except Exception as error:
            answer = self._refuse(request, error).to_asgi_response(None, request)
        await answer(scope, receive, send)


def is_plain(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"origin" or (name == b"host" and PLAIN_HOST.fullmatch(value) is None):
            return False
    return True
