"""How a route says who may use it, and how a handler reaches what `app` wired."""

from __future__ import annotations

from typing import Any, cast

from litestar.connection import ASGIConnection

from gateway.services import Services

SCOPE = "scope"
"""The key in a route's `opt`: every route declares one, `None` for the whole world."""
PUBLIC: dict[str, Any] = {SCOPE: None}


def needs(scope: str) -> dict[str, Any]:
    return {SCOPE: scope}


def services(connection: ASGIConnection[Any, Any, Any, Any]) -> Services:
    return cast(Services, connection.app.state.services)
