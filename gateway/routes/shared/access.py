"""Declares who may use a route, and how a handler reaches what `app` wired."""

from __future__ import annotations

from typing import Any, cast

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import HTTPRouteHandler
from litestar.types import ExceptionHandlersMap

from gateway.audit.log import Actor
from gateway.net.client_address import client_address
from gateway.networks import Address
from gateway.permissions import PROJECT_OWNER, SCOPES
from gateway.principal import Principal
from gateway.routes.shared.request_state import REQUEST_ID
from gateway.routes.shared.services import Services
from gateway.tenancy.idempotency_keys import CLAIM

SCOPE = "scope"
"""The key in a route's `opt`: every route declares one, `None` for the whole world."""
AUDIENCE = "audience"
"""The key in a route's `opt` for what an access token must be good for: a path behind the issuer,
with the route's parameters (`/mcp/{org}`), or ANY_AUDIENCE; without it, the API."""
ANY_AUDIENCE = "*"
IN_PROJECT = "in_project"
"""The key in a route's `opt` for the parameter of its path that names the project which it is all
about: there its owners may, too."""
PUBLIC: dict[str, Any] = {SCOPE: None}

AuthenticatedRequest = Request[Principal, Any, Any]
"""A request that the guard let pass: `request.user` is its caller."""


class HotRoute(HTTPRouteHandler):
    """A handler for which Litestar does some things once that it would do for each request."""

    _handlers: ExceptionHandlersMap | None = None

    def resolve_exception_handlers(self) -> ExceptionHandlersMap:
        if self._handlers is None:
            self._handlers = super().resolve_exception_handlers()
        return self._handlers

    async def authorize_connection(self, connection: ASGIConnection[Any, Any, Any, Any]) -> None:
        """Hand the guards the handler itself, not a copy of its sixty attributes each: ours read it
        and change nothing."""
        for guard in self.resolve_guards():
            await guard(connection, self)  # type: ignore[misc]


def needs(scope: str) -> dict[str, Any]:
    assert scope in SCOPES, f"{scope}: nothing confers it"
    return {SCOPE: scope}


def needs_in_project(scope: str) -> dict[str, Any]:
    """Declare the scope of a route below one project, which its owners may use."""
    assert scope in PROJECT_OWNER, f"{scope}: owning a project does not confer it"
    return {SCOPE: scope, IN_PROJECT: "project_id"}


def address_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Address | None:
    """Return where the request came from; None where no trusted proxy says so."""
    scope = connection.scope
    peer = scope["client"][0] if scope["client"] else None
    return client_address(peer, scope["headers"], services(connection).trusted_proxies)


def services(connection: ASGIConnection[Any, Any, Any, Any]) -> Services:
    return cast(Services, connection.scope["litestar_app"].state["services"])


def project_of(request: AuthenticatedRequest) -> dict[str, Any]:
    """Return what a function takes that finds what a project owns."""
    return {"org_id": request.user.org_id, "project_id": request.user.project_id}


def actor_of(request: ASGIConnection[Any, Principal, Any, Any]) -> Actor:
    """Return who asks, for the audit log: the credential, and whom it acts for."""
    principal, state = request.user, request.scope.get("state", {})
    address, claim = address_of(request), state.get(CLAIM)
    return Actor(
        kind=principal.actor_kind,
        id=principal.key_id,
        ip=None if address is None else str(address),
        request_id=state.get(REQUEST_ID),
        on_behalf_of=principal.acts_for,
        still_may=None if claim is None else claim.check,
    )
