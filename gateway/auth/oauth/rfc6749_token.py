"""The token endpoint (RFC 6749, 3.2, and OAuth 2.1): issues access tokens for authorization codes,
refresh tokens, client credentials and token exchange.

Each request is one transaction: what it uses up and what it issues are committed together or not at
all. If it revokes a grant, that is committed before the response.

A code or refresh token that is used twice revokes the grant: it may have been stolen. But a refresh
token may be sent again within LOST_ANSWER_S while nobody has used its successor: the response may
have been lost, and is repeated byte for byte.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import sqlalchemy as sa
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import permissions as policy
from gateway.audit.log import Actor
from gateway.auth.bearer.revocations import announcing, end_grant
from gateway.auth.bearer.subjects import find_principal, within_role
from gateway.auth.errors import AuthUnavailable, InvalidToken, RevokedToken
from gateway.auth.oauth import rfc8693_exchange
from gateway.auth.oauth.authority import (
    Authority,
    IssuedTokens,
    check_binding,
    check_grant_type,
    expiry,
    narrowed_scopes,
)
from gateway.auth.oauth.clients.metadata import (
    AUTHORIZATION_CODE,
    CLIENT_CREDENTIALS,
    REFRESH_TOKEN,
    TOKEN_EXCHANGE,
)
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import OAuthError, unavailable
from gateway.auth.oauth.tokens import oidc
from gateway.auth.oauth.tokens.grants import Code, CodeReplayed, Grant, redeem_code
from gateway.auth.oauth.tokens.refresh_tokens import LOST_ANSWER_S, RefreshToken
from gateway.auth.oauth.tokens.rfc9068_access_token import (
    AccessClaims,
    as_audience,
    confirmation,
    sign,
    token_id,
)
from gateway.auth.tables import oauth_clients, oauth_grants
from gateway.db import DATABASE_ERRORS
from gateway.tenancy.errors import ChangeNotAnnounced
from gateway.tenancy.member_tables import service_accounts

log = logging.getLogger(__name__)

VERIFIER = re.compile(r"[A-Za-z0-9\-._~]{43,128}", re.ASCII)
"""A code verifier (RFC 7636, section 4.1)."""
CODE_REPLAYED = "code_replayed"
REFRESH_TOKEN_REUSED = "refresh_token_reused"
IDENTITY = frozenset({"openid", "profile", "email", "offline_access"})
"""Scopes about a user, which a client without one cannot have."""


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    form: Form
    client: Client
    jkt: str | None
    """The thumbprint of the key that a DPoP proof came with (RFC 9449)."""
    actor: Actor
    """For the audit log."""


async def respond(authority: Authority, request: TokenRequest) -> bytes:
    """Return the body of a token response. Raises: OAuthError."""
    grant_type = request.form.require("grant_type")
    if grant_type not in GRANTS:
        raise OAuthError("unsupported_grant_type", "")
    check_grant_type(request.client, grant_type)
    try:
        answer = await GRANTS[grant_type](authority, request)
    except (*DATABASE_ERRORS, AuthUnavailable) as error:
        raise unavailable(type(error).__name__) from error
    return msgspec.json.encode(answer)


async def from_code(authority: Authority, request: TokenRequest) -> IssuedTokens:
    form, client = request.form, request.client
    code, verifier = form.require("code"), form.require("code_verifier")
    redirect_uri = form.get("redirect_uri")
    answer: IssuedTokens | None = None

    async def redeem(conn: AsyncConnection) -> tuple[str, str] | None:
        nonlocal answer
        found = await redeem_code(
            conn, authority.codes, code=code, client_id=client.id, now=authority.now()
        )
        if isinstance(found, CodeReplayed):
            return found.org_id, found.grant_id
        if found is not None:
            grant = await _locked_grant(conn, client, found.grant_id)
            _check_code(found, request, redirect_uri, verifier)
            answer = await _answer_code(conn, authority, request, found, grant)
        return None

    await _run(authority, request, redeem, CODE_REPLAYED)
    if answer is None:
        raise OAuthError("invalid_grant", "unknown, expired or used")
    return answer


def _check_code(code: Code, request: TokenRequest, redirect_uri: str | None, verifier: str) -> None:
    """Check that the request may redeem the code. A refused request does not use the code up: it
    may come from somebody else. OAuth 2.1 has PKCE instead of redirect_uri here; if a client of
    OAuth 2.0 sends one, it is checked.

    Raises: OAuthError.
    """
    if redirect_uri is not None and not hmac.compare_digest(
        code.redirect_uri.encode(), redirect_uri.encode()
    ):
        raise OAuthError("invalid_grant", "another redirect_uri")
    if VERIFIER.fullmatch(verifier) is None:
        raise OAuthError("invalid_grant", "a malformed verifier")
    if not hmac.compare_digest(create_s256_code_challenge(verifier), code.code_challenge):
        raise OAuthError("invalid_grant", "another verifier")
    check_binding(request.client, request.jkt, code.dpop_jkt)


async def _answer_code(
    conn: AsyncConnection, authority: Authority, request: TokenRequest, code: Code, grant: Grant
) -> IssuedTokens:
    client = request.client
    resources = authority.narrowed_resources(
        request.form.all("resource"), code.resources, code.org_id
    )
    scopes = narrowed_scopes(None, policy.common(code.scopes, client.scopes))
    auth_time = int(code.auth_time.timestamp())
    claims = await _checked(
        conn,
        _claims(authority, request, grant, resources, scopes, auth_time=auth_time),
    )
    refresh_token = None
    if REFRESH_TOKEN in client.grant_types:
        refresh_token = await authority.refresh_tokens.first(
            conn,
            authority.now(),
            org_id=code.org_id,
            grant_id=code.grant_id,
            client_id=client.id,
            answer={},
            scopes=code.scopes,
            resources=code.resources,
            dpop_jkt=request.jkt,
        )
    access_token = sign(authority.keys.ring, claims)
    id_token = None
    if "openid" in claims.scopes:
        id_token = oidc.id_token(
            authority.keys.ring,
            claims,
            access_token=access_token,
            nonce=code.nonce,
            auth_time=auth_time,
            amr=code.amr,
        )
    return IssuedTokens.of(claims, access_token, refresh_token=refresh_token, id_token=id_token)


async def from_refresh_token(authority: Authority, request: TokenRequest) -> IssuedTokens:
    token = request.form.require("refresh_token")
    answer: IssuedTokens | None = None

    async def use(conn: AsyncConnection) -> tuple[str, str] | None:
        nonlocal answer
        tokens = authority.refresh_tokens
        known = await tokens.find(conn, token, client_id=request.client.id)
        if known is None:
            return None
        grant = await _locked_grant(conn, request.client, known.grant_id)
        held = await tokens.find(conn, token, client_id=request.client.id)
        if held is None or held.expires_at <= authority.now():
            return None
        check_binding(request.client, request.jkt, held.dpop_jkt)
        if held.used_at is None:
            answer = await _rotate(conn, authority, request, token, held, grant)
            return None
        answer = await _lost_answer(conn, authority, token, held)
        return None if answer is not None else (held.org_id, held.grant_id)

    await _run(authority, request, use, REFRESH_TOKEN_REUSED)
    if answer is None:
        raise OAuthError("invalid_grant", "unknown, expired or used")
    return answer


async def _rotate(
    conn: AsyncConnection,
    authority: Authority,
    request: TokenRequest,
    token: str,
    held: RefreshToken,
    grant: Grant,
) -> IssuedTokens:
    resources = authority.narrowed_resources(
        request.form.all("resource"), held.resources, held.org_id
    )
    allowed = policy.common(held.scopes, request.client.scopes)
    scopes = narrowed_scopes(request.form.get("scope"), allowed)
    claims = await _checked(conn, _claims(authority, request, grant, resources, scopes))
    ring = authority.keys.ring
    fresh = await authority.refresh_tokens.rotate(
        conn,
        token,
        held,
        answer={"claims": msgspec.to_builtins(claims), "kid": ring.active.kid},
        granted_at=grant.created_at,
        now=authority.now(),
    )
    return IssuedTokens.of(claims, sign(ring, claims), refresh_token=fresh)


async def _lost_answer(
    conn: AsyncConnection, authority: Authority, token: str, held: RefreshToken
) -> IssuedTokens | None:
    """Return the response in which `token` was exchanged, if it may be repeated."""
    tokens = authority.refresh_tokens
    assert held.used_at is not None
    child = await tokens.child(conn, held)
    waited_s = (authority.now() - held.used_at).total_seconds()
    if child is None or child.used_at is not None or waited_s > LOST_ANSWER_S:
        return None
    fresh = tokens.successor(token, child.answer["secret_id"])
    if fresh is None:
        return None
    claims = msgspec.convert(child.answer["claims"], AccessClaims)
    try:
        access_token = sign(authority.keys.ring, claims, kid=child.answer["kid"])
    except InvalidToken:
        return None
    return IssuedTokens.of(claims, access_token, refresh_token=fresh)


async def from_client_credentials(authority: Authority, request: TokenRequest) -> IssuedTokens:
    client = request.client
    if not client.confidential or client.org_id is None:
        raise OAuthError("unauthorized_client", "a public client, or one without an org")
    check_binding(client, request.jkt)
    api = authority.narrowed_resources([], [], client.org_id)
    own = f"{authority.issuer}/mcp/{client.org_id}"
    requested = request.form.all("resource")
    resources = api
    if requested:
        resources = authority.narrowed_resources(requested, [*api, own], client.org_id)
    scopes = narrowed_scopes(
        request.form.get("scope"), [each for each in client.scopes if each not in IDENTITY]
    )
    async with authority.db.begin() as conn:
        await _hold_client(conn, client)
        now = authority.clock()
        claims = AccessClaims(
            iss=authority.issuer,
            sub=client.service_account_id or client.id,
            aud=as_audience(resources),
            client_id=client.id,
            jti=token_id(),
            iat=int(now),
            exp=expiry(now),
            scope=" ".join(scopes),
            org_id=client.org_id,
            project_id=await _project_of(conn, client),
            service_account_id=client.service_account_id,
            cnf=confirmation(request.jkt),
        )
        await _checked(conn, claims)
    return IssuedTokens.of(claims, sign(authority.keys.ring, claims))


async def _project_of(conn: AsyncConnection, client: Client) -> str:
    """Return the project that is billed. Raises: OAuthError if there is none."""
    project_id = client.project_id
    if project_id is None and client.service_account_id is not None:
        found = sa.select(service_accounts.c.project_id).where(
            service_accounts.c.id == client.service_account_id,
            service_accounts.c.org_id == client.org_id,
        )
        project_id = await conn.scalar(found)
    if project_id is None:
        raise OAuthError("unauthorized_client", "no project to bill")
    return project_id


async def exchange(authority: Authority, request: TokenRequest) -> IssuedTokens:
    return await rfc8693_exchange.exchange(authority, request.form, request.client, request.jkt)


GRANTS: Mapping[str, Callable[[Authority, TokenRequest], Awaitable[IssuedTokens]]] = {
    AUTHORIZATION_CODE: from_code,
    REFRESH_TOKEN: from_refresh_token,
    CLIENT_CREDENTIALS: from_client_credentials,
    TOKEN_EXCHANGE: exchange,
}


async def _run(
    authority: Authority,
    request: TokenRequest,
    work: Callable[[AsyncConnection], Awaitable[tuple[str, str] | None]],
    because: str,
) -> None:
    """Run `work` in a transaction. If it returns an org and a grant, revoke that grant: the end is
    committed and announced before this returns."""
    try:
        async with announcing(authority.redis, clock=authority.clock) as announcement:
            async with authority.db.begin() as conn:
                revoked = await work(conn)
                if revoked is not None:
                    org_id, grant_id = revoked
                    await end_grant(
                        conn,
                        announcement,
                        org_id=org_id,
                        grant_id=grant_id,
                        because=because,
                        actor=request.actor,
                    )
    except ChangeNotAnnounced:
        # The grant has ended; gateways that Redis does not reach see it in Postgres.
        log.error("the end of a grant (%s) could not be announced", because)


async def _hold_client(conn: AsyncConnection, client: Client) -> None:
    """Lock a client, so that it is not archived before this transaction commits: archiving it must
    revoke what is issued here.

    A client with a metadata document has no row.
    Raises: OAuthError.
    """
    if client.source == "document":
        return
    live = sa.select(oauth_clients.c.id).where(oauth_clients.c.id == client.id)
    live = live.where(oauth_clients.c.archived_at.is_(None)).with_for_update(read=True)
    if await conn.scalar(live) is None:
        raise OAuthError("invalid_grant", "the client is archived")


async def _locked_grant(conn: AsyncConnection, client: Client, grant_id: str) -> Grant:
    """Lock a grant until the transaction ends, so that its requests run one after the other. Its
    client is locked before it, as when a client is archived.

    Raises: OAuthError if the grant is revoked.
    """
    await _hold_client(conn, client)
    found = sa.select(oauth_grants).where(oauth_grants.c.id == grant_id).with_for_update()
    grant = Grant(**(await conn.execute(found)).one()._mapping)
    if grant.revoked_at is not None:
        raise OAuthError("invalid_grant", "revoked")
    return grant


def _claims(
    authority: Authority,
    request: TokenRequest,
    grant: Grant,
    resources: list[str],
    scopes: list[str],
    *,
    auth_time: int | None = None,
) -> AccessClaims:
    now = authority.clock()
    return AccessClaims(
        iss=authority.issuer,
        sub=grant.user_id,
        aud=as_audience(resources),
        client_id=request.client.id,
        jti=token_id(),
        iat=int(now),
        exp=expiry(now),
        scope=" ".join(scopes),
        org_id=grant.org_id,
        project_id=grant.project_id,
        user_id=grant.user_id,
        grant_id=grant.id,
        auth_time=auth_time,
        cnf=confirmation(request.jkt),
    )


async def _checked(conn: AsyncConnection, claims: AccessClaims) -> AccessClaims:
    """Return the claims with the scopes that the subject still has.

    Raises: OAuthError if a user, client, ... that they name is gone, or if no scope is left.
    """
    try:
        checked = within_role(claims, await find_principal(conn, claims))
    except RevokedToken as error:
        raise OAuthError("invalid_grant", "a user, client or project is gone") from error
    narrowed_scopes(None, checked.scopes)
    return checked
