"""Registers the routes of administration, of the console and of signing in when the first of them
is asked for: a worker that nobody administers does without 13 MB, and starts earlier.

An ASGI layer around those of the framework. What is asked for meanwhile is served: the modules are
imported in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.routes.shared.problem import near_paths

FOLDERS = frozenset({"admin", "console", "oauth", "organization"})
"""The folders of `gateway.routes` that are late."""
PATHS = (
    *("/.well-known", "/account", "/console", "/invites", "/oauth", "/passwords"),
    *("/v1/admin", "/v1/organization"),
)
"""All routes of those folders are at or below one of these."""


class LateRoutes:
    """`load`: registers them, in whatever thread; once is enough."""

    def __init__(self, app: ASGIApp, load: Callable[[], None]) -> None:
        self._app, self._load = app, load
        self._are_loaded = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._are_loaded and scope["type"] == ScopeType.HTTP and concerns(scope["path"]):
            await asyncio.to_thread(self._load)
            self._are_loaded = True
        await self._app(scope, receive, send)


def concerns(path: str) -> bool:
    """Return whether a late route may be at a path, or be what somebody means who asks for it."""
    return is_late(path) or any(is_late(near) for near in near_paths(path))


def is_late(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in PATHS)
