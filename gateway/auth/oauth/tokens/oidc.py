"""ID tokens and userinfo (OpenID Connect Core 1.0).

An ID token tells a client who logged in; it opens nothing here, which its `typ` makes sure of.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
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
    """Sign an ID token (section 2); it expires with the access token that it came with."""
    stated: dict[str, Any] = {
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
        stated["nonce"] = nonce
    return encode(ring.active, stated, TYPE)


def at_hash(access_token: str) -> str:
    """Return the left half of the token's SHA-256 (section 3.1.3.6)."""
    left = hashlib.sha256(access_token.encode()).digest()[:16]
    return base64.urlsafe_b64encode(left).rstrip(b"=").decode()


async def userinfo(
    conn: AsyncConnection, *, org_id: str, user_id: str, scopes: Collection[str]
) -> dict[str, str]:
    """Return what the scopes allow, of the user that a good token speaks for (section 5.3.2)."""
    found = sa.select(users.c.name, users.c.email).where(
        users.c.id == user_id, users.c.org_id == org_id
    )
    row = (await conn.execute(found)).one()
    said = {"sub": user_id}
    if "profile" in scopes:
        said["name"] = row.name
    if "email" in scopes:
        said["email"] = row.email
    return said
