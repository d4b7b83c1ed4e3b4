"""How a route says who may use it, and how a handler reaches what `app` wired."""

from __future__ import annotations

from typing import Any, cast

from litestar.connection import ASGIConnection

from gateway.audit.log import Actor
from gateway.auth.policy import SCOPES
from gateway.principal import Principal
from gateway.routes.envelope import REQUEST_ID
from gateway.services import Services

SCOPE = "scope"
"""The key in a route's `opt`: every route declares one, `None` for the whole world."""
PUBLIC: dict[str, Any] = {SCOPE: None}


def needs(scope: str) -> dict[str, Any]:
    assert scope in SCOPES, f"{scope}: nothing confers it"
    return {SCOPE: scope}


def services(connection: ASGIConnection[Any, Any, Any, Any]) -> Services:
    return cast(Services, connection.app.state.services)


def actor_of(request: ASGIConnection[Any, Principal, Any, Any]) -> Actor:
    """Who asks, for the audit log: the credential, and whom it acts for."""
    principal = request.user
    address = request.client
    return Actor(
        kind="api_key" if principal.kind == "key" else "client",
        id=principal.key_id,
        ip=None if address is None else address.host,
        request_id=request.scope.get("state", {}).get(REQUEST_ID),
        on_behalf_of=principal.user_id or principal.service_account_id,
    )
