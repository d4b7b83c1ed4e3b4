"""Refresh tokens: rotated at each use, each derived from the one before it.

A token's successor is its HMAC under a key that Postgres never sees. So a lost response can be
repeated byte for byte, although neither token is stored: the successor is derived again, and the
access token is signed again from its claims, which are stored with the successor's hash.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from joserfc.util import urlsafe_b64encode
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.auth.tables import oauth_refresh_tokens
from gateway.ids import uuid7
from gateway.secret import Peppers, Secret, random_secret

PREFIX = "tg-refresh-"
PEPPER_PURPOSE = "oauth-refresh-token"
CHAIN_PURPOSE = "oauth-refresh-chain"
LIFETIME_S = 30 * 86_400
"""A token expires after so long without use."""
GRANT_LIFETIME_S = 180 * 86_400
"""All tokens of a grant expire after it: the user must consent again."""
LOST_ANSWER_S = 10
"""A used token may be sent again within this time, if the response to it was lost."""
MAX_LENGTH = 256


class RefreshToken(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    grant_id: str
    client_id: str
    answer: dict[str, Any]
    """The response in which it was issued, without the tokens."""
    scopes: list[str]
    resources: list[str]
    dpop_jkt: str | None
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None


COLUMNS = [oauth_refresh_tokens.c[name] for name in RefreshToken.__struct_fields__]


class RefreshTokens:
    def __init__(self, secret: Secret) -> None:
        self._peppers = Peppers(secret, PEPPER_PURPOSE)
        self._chain = {key.id: key.derive(CHAIN_PURPOSE) for key in secret.keys}
        self.current = secret.current.id

    def successor(self, token: str, secret_id: str) -> str | None:
        """Return the token that follows; None if that secret is gone."""
        key = self._chain.get(secret_id)
        if key is None:
            return None
        derived = hmac.digest(key, token.encode(), hashlib.sha256)
        return PREFIX + urlsafe_b64encode(derived).decode()

    async def find(
        self, conn: AsyncConnection, token: str, *, client_id: str | None
    ) -> RefreshToken | None:
        """Find a token, used, expired or not; client_id None: of any client."""
        if len(token) > MAX_LENGTH or not token.startswith(PREFIX):
            return None
        known = oauth_refresh_tokens.c.token_hash.in_(self._peppers.hashes(token))
        found = sa.select(*COLUMNS).where(known)
        if client_id is not None:
            found = found.where(oauth_refresh_tokens.c.client_id == client_id)
        row = (await conn.execute(found)).one_or_none()
        return None if row is None else RefreshToken(**row._mapping)

    async def child(self, conn: AsyncConnection, parent: RefreshToken) -> RefreshToken | None:
        found = sa.select(*COLUMNS).where(oauth_refresh_tokens.c.parent_id == parent.id)
        row = (await conn.execute(found)).one_or_none()
        return None if row is None else RefreshToken(**row._mapping)

    async def first(self, conn: AsyncConnection, now: datetime, **values: Any) -> str:
        token = random_secret(PREFIX)
        expires_at = now + timedelta(seconds=LIFETIME_S)
        await self._insert(conn, token, created_at=now, expires_at=expires_at, **values)
        return token

    async def rotate(
        self,
        conn: AsyncConnection,
        token: str,
        parent: RefreshToken,
        *,
        answer: dict[str, Any],
        granted_at: datetime,
        now: datetime,
    ) -> str:
        """Mark `parent` as used, and return its successor. The caller holds the grant's lock."""
        fresh = self.successor(token, self.current)
        assert fresh is not None
        c = oauth_refresh_tokens.c
        used = sa.update(oauth_refresh_tokens).where(c.id == parent.id).values(used_at=now)
        await conn.execute(used)
        await conn.execute(
            sa.delete(oauth_refresh_tokens).where(c.grant_id == parent.grant_id, c.expires_at < now)
        )
        last = granted_at + timedelta(seconds=GRANT_LIFETIME_S)
        copied = ("org_id", "grant_id", "client_id", "scopes", "resources", "dpop_jkt")
        await self._insert(
            conn,
            fresh,
            **{name: getattr(parent, name) for name in copied},
            parent_id=parent.id,
            answer=answer | {"secret_id": self.current},
            created_at=now,
            expires_at=min(now + timedelta(seconds=LIFETIME_S), last),
        )
        return fresh

    async def _insert(self, conn: AsyncConnection, token: str, **values: Any) -> None:
        row = {"id": f"refresh_{uuid7().hex}", "token_hash": self._peppers.hash(token), **values}
        await conn.execute(sa.insert(oauth_refresh_tokens).values(**row))
