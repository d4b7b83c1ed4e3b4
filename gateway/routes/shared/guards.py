"""Guards every route: who is calling, and may they? Runs before the body is read.

Each route declares in its `opt` the scope it needs (`routes.access`); one that declares nothing
lets nobody in. Errors are `auth.errors`; `gateway.http_errors` makes them HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from litestar.connection import ASGIConnection
from litestar.exceptions import MethodNotAllowedException
from litestar.handlers import BaseRouteHandler
from litestar.routes import HTTPRoute
from litestar.types import Scope

from foundation.request_context import current_stages
from gateway.auth.errors import (
    AuthError,
    MissingCredential,
    MissingScope,
    RepeatedHeader,
    UnknownScheme,
    WrongNetwork,
    WrongResource,
)
from gateway.auth.oauth import rfc9449_dpop
from gateway.auth.oauth.rfc9449_dpop import InvalidProof
from gateway.auth.resources import API_PATH
from gateway.auth.sent_credential import SentCredential, describe
from gateway.permissions import may
from gateway.principal import Principal
from gateway.routes.shared.access import (
    ANY_AUDIENCE,
    AUDIENCE,
    IN_PROJECT,
    SCOPE,
    address_of,
    services,
)
from gateway.routes.shared.request_state import ASKED_METHOD

UNDECLARED = "(this route declares no scope)"


async def authenticate(
    connection: ASGIConnection[Any, Any, Any, Any], route_handler: BaseRouteHandler
) -> None:
    """Put the `Principal` into `connection.scope["user"]`.

    Raises: AuthError, MissingScope, AuthUnavailable, and MethodNotAllowedException for OPTIONS,
    whose handlers Litestar makes by itself: nothing here is for a page of another origin.
    """
    if connection.scope.get("method") == "OPTIONS":
        raise MethodNotAllowedException(headers={"allow": allowed(connection)})
    scope = route_handler.opt.get(SCOPE, UNDECLARED)
    if scope is None:
        return
    with current_stages().begin("authenticate"):
        await check_principal(connection, route_handler, scope)


async def check_principal(
    connection: ASGIConnection[Any, Any, Any, Any], route_handler: BaseRouteHandler, scope: str
) -> None:
    """Find out who is calling, and whether they may. Raises: AuthError, MissingScope,
    AuthUnavailable."""
    header = read_authorization(connection.scope["headers"])
    try:
        if header[:5].lower() == "dpop ":
            principal = await authenticate_bound(connection, header[5:].strip())
        else:
            principal = await services(connection).authenticator.authenticate(read_bearer(header))
    except AuthError as error:
        error.sent = describe_sent(connection.scope["headers"], header)
        raise
    # Who is refused from here on is known: what a page may read of that is their org's to say.
    connection.scope["user"] = principal
    if principal.kind == "token" and not is_addressed(connection, route_handler, principal):
        raise WrongResource("for another resource")
    check_network(connection, principal)
    named = route_handler.opt.get(IN_PROJECT)
    project_id = None if named is None else connection.path_params[named]
    if not may(principal, scope, project_id=project_id):
        raise MissingScope(scope)


def check_network(connection: ASGIConnection[Any, Any, Any, Any], principal: Principal) -> None:
    """Raises: WrongNetwork."""
    if principal.allowed_networks is None:
        return
    address = address_of(connection)
    if address is None or address not in principal.allowed_networks:
        raise WrongNetwork(principal.key_id)


async def authenticate_bound(
    connection: ASGIConnection[Any, Any, Any, Any], token: str
) -> Principal:
    """Authenticate `Authorization: DPoP` with its proof (RFC 9449, section 7.1). Raises: AuthError,
    AuthUnavailable."""
    proofs = connection.headers.getall("dpop", [])
    if len(proofs) != 1:
        raise InvalidProof("not one proof")
    authority = services(connection).authority
    jkt = await rfc9449_dpop.verify(
        proofs[0],
        redis=authority.redis,
        method=asked_method(connection),
        url=authority.issuer + sent_path(connection.scope),
        now=authority.clock(),
        access_token=token,
    )
    return await services(connection).authenticator.authenticate(token, jkt=jkt)


def sent_path(scope: Scope) -> str:
    """Return the path as it was written on the wire, which is how a client states it; `path` is
    decoded."""
    raw = scope.get("raw_path")
    return quote(scope["path"]) if raw is None else raw.decode("latin-1")


def asked_method(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    scope = connection.scope
    return str(scope.get("state", {}).get(ASKED_METHOD, scope.get("method")))


def is_addressed(
    connection: ASGIConnection[Any, Any, Any, Any],
    route_handler: BaseRouteHandler,
    principal: Principal,
) -> bool:
    """Return whether the token is for this route (RFC 9068, section 4): for what the route's `opt`
    names, by itself for the API."""
    named = route_handler.opt.get(AUDIENCE)
    if named == ANY_AUDIENCE:
        return True
    issuer = services(connection).authority.issuer
    if named is None:
        return not principal.audiences.isdisjoint((issuer, issuer + API_PATH))
    return issuer + str(named).format(**connection.path_params) in principal.audiences


def allowed(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return the value of `Allow` (RFC 9110, 10.2.1) for the route that was found."""
    template = connection.scope["path_template"]
    methods = {
        str(method)
        for route in connection.app.routes
        if isinstance(route, HTTPRoute) and route.path_format == template
        for method in route.methods
    }
    return ", ".join(sorted(methods - {"OPTIONS"}))


def read_authorization(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Read ASGI's own list: an object of all headers costs more than everything else here.

    Raises: RepeatedHeader where there are two; who shall say which one a proxy has checked?
    """
    found: str | None = None
    for name, value in headers:
        if name == b"authorization":
            if found is not None:
                raise RepeatedHeader("more than one Authorization")
            found = value.decode("latin-1")
    return read_api_key(headers) if found is None else found


def read_api_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Read `x-api-key: K`, as Anthropic's clients write it, as `Authorization: Bearer K`.

    Raises: RepeatedHeader.
    """
    keys = [value.decode("latin-1") for name, value in headers if name == b"x-api-key"]
    if len(keys) > 1:
        raise RepeatedHeader("more than one X-Api-Key")
    return f"Bearer {keys[0]}" if keys else ""


def read_bearer(header: str) -> str:
    """Return the token of `Authorization: Bearer <token>` (RFC 6750, section 2.1); the scheme in
    any case (RFC 9110, 11.1).

    Raises: MissingCredential, UnknownScheme.
    """
    scheme, _, token = header.strip().partition(" ")
    if scheme and scheme.lower() != "bearer":
        raise UnknownScheme("not a bearer token")
    if not token.strip():
        raise MissingCredential("no bearer token")
    return token.strip()


def describe_sent(headers: Iterable[tuple[bytes, bytes]], header: str) -> SentCredential:
    """Describe a refused credential: what stands behind the scheme."""
    named = any(name == b"authorization" for name, _ in headers)
    return describe(header.strip().partition(" ")[2].strip(), as_api_key=not named)
