"""Registers the routes of administration, of the console and of signing in when the first of them
is asked for: a worker that nobody administers does without 11 MB, and starts earlier.

An ASGI layer around those of the framework. What is asked for meanwhile is served: the modules are
imported in a thread.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send
from litestar.utils.path import normalize_path

from gateway.routes.shared.problem import near_paths

FOLDERS = frozenset({"admin", "console", "oauth", "organization"})
"""The folders of `gateway.routes` that are late."""
PATHS = (
    *("/.well-known", "/account", "/console", "/invites", "/oauth", "/passwords"),
    *("/v1/admin", "/v1/organization"),
)
"""All routes of those folders are at or below one of these."""
IS_LATE = re.compile(rf"(?:{'|'.join(map(re.escape, PATHS))})(?:/|\Z)")


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
    """Return whether a late route may be at a path, as the framework reads it, or be what somebody
    means who asks for it."""
    path = normalize_path(path)
    return is_late(path) or any(is_late(near) for near in near_paths(path))


def is_late(path: str) -> bool:
    return IS_LATE.match(path) is not None
