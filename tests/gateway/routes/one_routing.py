"""The application's routes, made once in a process: hundreds of tests make an application, and half
of what that takes is Litestar's reading of the same two hundred handlers.

Each has a state, a lifespan and a router of its own, and only these depend on settings.
"""

from __future__ import annotations

import copy
from functools import cache

from litestar.datastructures import State

from gateway.app import create as product
from gateway.app.application import Application

with_early_routes = product.with_routes


@cache
def _made(max_body_bytes: int) -> Application:
    found = with_early_routes(max_body_bytes)
    found.register_late_routes()
    return found


def with_routes(max_body_bytes: int) -> Application:
    """As `gateway.app.create.with_routes`, with the late ones: tests look at all of them."""
    found = copy.copy(_made(max_body_bytes))
    found.state = State()
    found.event_emitter = copy.copy(found.event_emitter)
    found.asgi_router = copy.copy(found.asgi_router)
    found.asgi_router.app = found
    return found
