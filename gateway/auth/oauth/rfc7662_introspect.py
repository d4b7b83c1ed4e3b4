"""Token introspection (RFC 7662): confidential clients may introspect tokens of their own org.

For a token that is unknown, expired, revoked, or another org's the response is `active: false` and
nothing more (section 2.2).
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.auth.bearer.subjects import find_principal, within_role
from gateway.auth.errors import AuthUnavailable, InvalidToken
from gateway.auth.oauth.authority import Authority, token_type
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import invalid_client, unavailable
from gateway.auth.oauth.tokens.grants import Grant, find_grant
from gateway.auth.oauth.tokens.refresh_tokens import PREFIX, RefreshToken
from gateway.auth.oauth.tokens.rfc9068_access_token import AccessClaims
from gateway.db import DATABASE_ERRORS

INACTIVE: dict[str, Any] = {"active": False}


async def introspect(authority: Authority, form: Form, client: Client) -> dict[str, Any]:
    """Raises: OAuthError."""
    if not client.confidential or client.org_id is None:
        raise invalid_client("a public client, or one without an org")
    token = form.require("token")
    try:
        if token.startswith(PREFIX):
            return await _refresh_token(authority, token, client)
        claims = await authority.access_tokens.verify(token)
    except InvalidToken:
        return INACTIVE
    except (*DATABASE_ERRORS, AuthUnavailable) as error:
        raise unavailable(type(error).__name__) from error
    return INACTIVE if claims.org_id != client.org_id else _describe(claims)


def _describe(claims: AccessClaims) -> dict[str, Any]:
    names = ("scope", "client_id", "sub", "aud", "iss", "jti", "iat", "exp", "act", "cnf")
    fields = msgspec.to_builtins(claims)
    return {
        "active": True,
        "token_type": token_type(claims),
        **{name: fields[name] for name in names if name in fields},
    }


async def _refresh_token(authority: Authority, token: str, client: Client) -> dict[str, Any]:
    """Describe a refresh token of the client itself; those of others are inactive."""
    async with authority.db.connect() as conn:
        held = await authority.refresh_tokens.find(conn, token, client_id=client.id)
        if held is None or held.used_at is not None or held.expires_at <= authority.now():
            return INACTIVE
        grant = await find_grant(conn, org_id=held.org_id, grant_id=held.grant_id)
        claims = _access_claims(authority, held, grant)
        checked = within_role(claims, await find_principal(conn, claims))
    return {
        "active": True,
        "scope": checked.scope,
        "client_id": held.client_id,
        "sub": grant.user_id,
        "iss": authority.issuer,
        "iat": int(held.created_at.timestamp()),
        "exp": int(held.expires_at.timestamp()),
    }


def _access_claims(authority: Authority, held: RefreshToken, grant: Grant) -> AccessClaims:
    """Return the claims of the access token that a refresh token would give now, to look its
    subject up by."""
    return AccessClaims(
        iss=authority.issuer,
        sub=grant.user_id,
        aud=held.resources,
        client_id=held.client_id,
        jti=held.id,
        iat=int(held.created_at.timestamp()),
        exp=int(held.expires_at.timestamp()),
        scope=" ".join(held.scopes),
        org_id=grant.org_id,
        project_id=grant.project_id,
        user_id=grant.user_id,
        grant_id=grant.id,
    )
