"""ID tokens and userinfo (OpenID Connect Core 1.0).

An ID token tells a client who logged in; its `typ` keeps it from being used as an access token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from joserfc.util import urlsafe_b64encode
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.auth.oauth.tokens.rfc9068_access_token import AccessClaims, encode
from gateway.auth.oauth.tokens.signing_keys import Ring
from gateway.tenancy.member_tables import users

TYPE = "JWT"


def id_token(
    ring: Ring,
    claims: AccessClaims,
    *,
    access_token: str,
    nonce: str | None,
    auth_time: int,
    amr: Sequence[str],
) -> str:
    """Sign an ID token (section 2); it expires with its access token."""
    claims_set: dict[str, Any] = {
        "iss": claims.iss,
        "sub": claims.sub,
        "aud": claims.client_id,
        "exp": claims.exp,
        "iat": claims.iat,
        "auth_time": auth_time,
        "amr": list(amr),
        "at_hash": at_hash(access_token),
    }
    if nonce is not None:
        claims_set["nonce"] = nonce
    return encode(ring.active, claims_set, TYPE)


def at_hash(access_token: str) -> str:
    """Return the left half of the token's SHA-256 (section 3.1.3.6)."""
    return urlsafe_b64encode(hashlib.sha256(access_token.encode()).digest()[:16]).decode()


async def userinfo(
    conn: AsyncConnection, *, org_id: str, user_id: str, scopes: Collection[str]
) -> dict[str, str]:
    """Return the claims about a user that a token's scopes allow (section 5.3.2)."""
    found = sa.select(users.c.name, users.c.email).where(
        users.c.id == user_id, users.c.org_id == org_id
    )
    row = (await conn.execute(found)).one()
    claims = {"sub": user_id}
    if "profile" in scopes:
        claims["name"] = row.name
    if "email" in scopes:
        claims["email"] = row.email
    return claims
