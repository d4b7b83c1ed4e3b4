"""Calls the handler of a hot route directly.

An ASGI layer between `response_headers` and all others. It skips the layers that would do nothing
for such a request, and the framework's routing, which would find the same handler, build the same
request and call it with nothing else: a tenth of what a request costs. Whatever is not plainly one
(another method, a path written otherwise, a page's `Origin`, a `Host` that is to be looked at) goes
the long way, which knows what to do with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from litestar import Litestar, Request
from litestar.connection import ASGIConnection
from litestar.enums import ScopeType
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.routes.shared.access import HotRoute

SET_UP_LATE = frozenset(
    {*ASGIConnection.__slots__, *Request.__slots__} - {"scope", "receive", "send"}
)
PLAIN_HOST = re.compile(rb"[A-Za-z0-9.-]+(?::[0-9]+)?")
PLAIN_PATH = re.compile(r"(?:/[A-Za-z0-9_-]+)+")


Way = tuple[HotRoute, str]
"""A handler, and the path that it is declared with."""


class HotRequest(Request[Any, Any, Any]):
    """A request of which a hot route asks its scope, and little else of what the framework keeps:
    that is set up when it is first asked for."""

    __slots__ = ()

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope  # type: ignore[assignment]  # of HTTP
        self.receive, self.send = receive, send

    def __getattr__(self, name: str) -> Any:
        """Set up what is missing; called for what is not set."""
        if name not in SET_UP_LATE:
            raise AttributeError(name)
        super().__init__(self.scope, self.receive, self.send)
        return object.__getattribute__(self, name)


class FastPath:
    def __init__(self, app: ASGIApp, litestar: Litestar) -> None:
        self._app = app
        self._fixed: dict[tuple[str, str], Way] = {}
        self._below: dict[tuple[str, str, int], Way] = {}
        """Routes whose path has only parameters behind its first part, by method, first part and
        number of parameters."""
        for route in litestar.routes:
            if isinstance(route, HTTPRoute):
                for method, (handler, _) in route.route_handler_map.items():
                    if isinstance(handler, HotRoute):
                        self._add(method, route.path_format, handler)

    def _add(self, method: str, path: str, handler: HotRoute) -> None:
        first, *parts = path.removeprefix("/").split("/")
        parameters = [part for part in parts if part.startswith("{")]
        if parameters:
            assert parameters == parts, f"{path}: between parameters"
            self._below[method, first, len(parts)] = handler, path
        else:
            self._fixed[method, path] = handler, path

    def _way(self, method: str, path: str) -> Way | None:
        """Return what the framework would find for a path that is written as plainly as can be."""
        way = self._fixed.get((method, path))
        if way is None and PLAIN_PATH.fullmatch(path) is not None:
            first, *parts = path.removeprefix("/").split("/")
            way = self._below.get((method, first, len(parts)))
        return way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        way = None
        if scope["type"] == ScopeType.HTTP:
            way = self._way(scope["method"], scope["path"])
        if way is None or not is_plain(scope["headers"]):
            await self._app(scope, receive, send)
            return
        handler, scope["path_template"] = way
        scope["path_params"], scope["route_handler"] = {}, handler
        request = HotRequest(scope, receive, send)
        try:
            await handler.authorize_connection(request)
            answer: ASGIApp = await handler.fn(request)
        except Exception as error:
            refuse: Any = handler.resolve_exception_handlers()[Exception]
            answer = refuse(request, error).to_asgi_response(None, request)
        await answer(scope, receive, send)


def is_plain(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"origin" or (name == b"host" and PLAIN_HOST.fullmatch(value) is None):
            return False
    return True
