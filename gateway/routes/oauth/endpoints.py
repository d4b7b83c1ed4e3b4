"""The authorization server's endpoints for machines: tokens, revocation, introspection, metadata,
keys, userinfo.

Nothing here may be kept by a cache but the metadata and the keys. What pages of other origins may
call is said by `routes.cors`: no cookie counts here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.connection import ASGIConnection

from gateway.audit.log import Actor
from gateway.auth.errors import AuthUnavailable, InvalidToken
from gateway.auth.oauth import (
    rfc6749_token,
    rfc7009_revoke,
    rfc7662_introspect,
    rfc8414_metadata,
    rfc9449_dpop,
)
from gateway.auth.oauth.authority import Authority
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.form import MAX_BODY_BYTES, Form, parse
from gateway.auth.oauth.rfc6749_errors import OAuthError, unavailable
from gateway.auth.oauth.rfc6749_token import TokenRequest
from gateway.auth.oauth.rfc8414_metadata import (
    INTROSPECTION_PATH,
    JWKS_PATH,
    METADATA_PATHS,
    REVOCATION_PATH,
    TOKEN_PATH,
    USERINFO_PATH,
)
from gateway.auth.oauth.rfc9449_dpop import InvalidProof
from gateway.auth.oauth.tokens import oidc
from gateway.auth.oauth.tokens.signing_keys import JWKS_MAX_AGE_S
from gateway.db import tenant
from gateway.routes.shared.access import (
    ANY_AUDIENCE,
    AUDIENCE,
    PUBLIC,
    AuthenticatedRequest,
    address_of,
    needs,
    services,
)
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import RouteGroup
from gateway.routes.shared.request_state import REQUEST_ID
from gateway.wire.admin.oauth import (
    HeldToken,
    Introspection,
    OAuthErrorBody,
    PublicKeys,
    ServerMetadata,
    TokenAnswer,
    TokenForm,
    UserInfo,
)

log = logging.getLogger(__name__)

UNCACHED = {"cache-control": "no-store", "pragma": "no-cache"}
CACHED = {"cache-control": f"public, max-age={JWKS_MAX_AGE_S}"}
oauth = RouteGroup(tag="OAuth", opt=PUBLIC)
signed_in = RouteGroup(tag="OAuth", opt={**needs("openid"), AUDIENCE: ANY_AUDIENCE})
BASIC = 'Basic realm="tollgate", charset="UTF-8"'

BOUNDED = {"request_max_body_size": MAX_BODY_BYTES}
REFUSALS = {status: {JSON: OAuthErrorBody} for status in (400, 401, 429, 503)}
"""RFC 6749, 5.2."""

Exchange = tuple[Authority, Form, Client, Actor]


@oauth.post(
    TOKEN_PATH,
    "Tokens for a grant",
    form=TokenForm,
    answer=TokenAnswer,
    said=REFUSALS,
    options=BOUNDED,
)
async def token(request: Request[Any, Any, Any]) -> Response[bytes]:
    try:
        authority, form, client, actor = await authenticated(request)
        asked = TokenRequest(
            form=form, client=client, jkt=await proven(request, authority), actor=actor
        )
        return Response(
            await rfc6749_token.respond(authority, asked), media_type=JSON, headers=UNCACHED
        )
    except OAuthError as error:
        return refused(error)


@oauth.post(REVOCATION_PATH, "Revoke a token", form=HeldToken, said=REFUSALS, options=BOUNDED)
async def revoke(request: Request[Any, Any, Any]) -> Response[bytes]:
    try:
        await rfc7009_revoke.revoke(*await authenticated(request))
        return Response(b"", headers=UNCACHED)
    except OAuthError as error:
        return refused(error)


@oauth.post(
    INTROSPECTION_PATH,
    "Introspect a token",
    form=HeldToken,
    answer=Introspection,
    said=REFUSALS,
    options=BOUNDED,
)
async def introspect(request: Request[Any, Any, Any]) -> Response[bytes]:
    try:
        authority, form, client, _ = await authenticated(request)
        return json(await rfc7662_introspect.introspect(authority, form, client), UNCACHED)
    except OAuthError as error:
        return refused(error)


@signed_in.route(["GET", "POST"], USERINFO_PATH, "Who is logged in", answer=UserInfo)
async def userinfo(request: AuthenticatedRequest) -> Response[bytes]:
    principal = request.user
    if principal.user_id is None:
        raise InvalidToken("it speaks for no user")
    async with tenant(services(request).db, principal.org_id) as conn:
        said = await oidc.userinfo(
            conn, org_id=principal.org_id, user_id=principal.user_id, scopes=principal.scopes
        )
    return json(said, UNCACHED)


@oauth.get(list(METADATA_PATHS), "What the authorization server can do", answer=ServerMetadata)
async def metadata(request: Request[Any, Any, Any]) -> Response[bytes]:
    return json(rfc8414_metadata.metadata(services(request).authority.issuer), CACHED)


@oauth.get(JWKS_PATH, "The public keys of our tokens", answer=PublicKeys)
async def jwks(request: Request[Any, Any, Any]) -> Response[bytes]:
    return json(services(request).authority.keys.ring.jwks(), CACHED)


async def authenticated(request: Request[Any, Any, Any]) -> Exchange:
    """Return the form and its client. Raises: OAuthError."""
    authority = services(request).authority
    credentials = request.headers.getall("authorization", [])
    if len(credentials) > 1:
        raise OAuthError("invalid_request", "two Authorization headers")
    form = parse(await request.body(), request.headers.get("content-type", ""))
    found = address_of(request)
    address = None if found is None else str(found)
    client = await authority.clients.authenticate(
        form, credentials[0] if credentials else None, address or "unknown"
    )
    return authority, form, client, client_actor(request, client, address)


def client_actor(
    request: ASGIConnection[Any, Any, Any, Any], client: Client, address: str | None
) -> Actor:
    request_id = request.scope.get("state", {}).get(REQUEST_ID)
    return Actor(kind="client", id=client.id, ip=address, request_id=request_id)


async def proven(request: Request[Any, Any, Any], authority: Authority) -> str | None:
    """Return the thumbprint of the key whose proof came along (RFC 9449, 5). Raises: OAuthError."""
    proofs = request.headers.getall("dpop", [])
    if not proofs:
        return None
    if len(proofs) > 1:
        raise OAuthError("invalid_dpop_proof", "two")
    try:
        return await rfc9449_dpop.verify(
            proofs[0],
            redis=authority.redis,
            method="POST",
            url=authority.token_endpoint,
            now=authority.clock(),
        )
    except InvalidProof as error:
        raise OAuthError("invalid_dpop_proof", str(error)) from error
    except AuthUnavailable as error:
        raise unavailable(str(error)) from error


def refused(error: OAuthError) -> Response[bytes]:
    """Make an error response (RFC 6749, 5.2)."""
    log.info("refused: %s", error)
    headers = dict(UNCACHED)
    if error.status == 401:
        headers["www-authenticate"] = BASIC
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    body = {"error": error.error, "error_description": error.description}
    return json(body, headers, status=error.status)


def json(
    body: Mapping[str, Any], headers: Mapping[str, str], *, status: int = 200
) -> Response[bytes]:
    return Response(
        msgspec.json.encode(body), status_code=status, media_type=JSON, headers=dict(headers)
    )


routes = [token, revoke, introspect, userinfo, metadata, jwks]
