"""Resolves one of our access tokens to a principal: the JWT branch of the `Authenticator`.

A verified token is cached by its digest until it expires, is revoked, or a subject of it changes;
so a request costs a hash and a few comparisons. A cache entry is trusted as one of an API key is:
as of its read or of the feed's last heartbeat, whichever is later, and only while the denylist is
current. If a change is announced while a token is read, the result is not cached but read again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.tasks import SharedTasks
from gateway.auth.bearer.revocations import Denylist, Revocation
from gateway.auth.bearer.subjects import find_principal, within_role
from gateway.auth.errors import AuthUnavailable, ExpiredToken, InvalidToken, RevokedToken
from gateway.auth.oauth.tokens import rfc9068_access_token
from gateway.auth.oauth.tokens.rfc9068_access_token import MAX_TOKEN_BYTES, AccessClaims
from gateway.auth.oauth.tokens.signing_keys import KeyRing
from gateway.db import DATABASE_ERRORS
from gateway.lru import Lru
from gateway.principal import Principal
from gateway.tenancy import changes
from gateway.tenancy.changes import EVERYTHING
from gateway.worker.work_listener import WorkListener

MAX_CACHED_TOKENS = 16_384
MAX_CONCURRENT_READS = 16
READ_TIMEOUT_S = 5.0
MAX_READS = 3
"""The maximum per request; a read is repeated only if a change was announced during it."""


class CachedToken(msgspec.Struct, frozen=True):
    """A valid token and its principal, as read at `as_of` (monotonic seconds)."""

    claims: AccessClaims
    principal: Principal
    as_of: float


class AccessTokens:
    """The access tokens that one process knows. `db`: the system pool. `listener` hears of
    revocations as they are committed. `clock`: monotonic seconds; `wall_clock`: Unix seconds."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        redis: Redis,
        keys: KeyRing,
        issuer: str,
        listener: WorkListener | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._keys = keys
        self._issuer = issuer
        self._clock = clock
        self._wall_clock = wall_clock
        self.denylist = Denylist(
            db, redis, self._revoked, listener=listener, clock=clock, wall_clock=wall_clock
        )
        self._known: Lru[bytes, CachedToken] = Lru(MAX_CACHED_TOKENS)
        keys.on_withdrawn = self._forget
        self._changes = 0
        self._reads: SharedTasks[bytes, None] = SharedTasks("read access token")
        self._read_slots = asyncio.Semaphore(MAX_CONCURRENT_READS)

    async def start(self) -> None:
        await self.denylist.start()

    async def close(self) -> None:
        await self.denylist.close()
        await self._reads.close()

    async def authenticate(
        self, token: str, *, feed_as_of: float, jkt: str | None = None
    ) -> Principal:
        """Return the principal of an access token of ours.

        `feed_as_of`: every change of identity that was announced before it is known here. `jkt`:
        the thumbprint of the key that a DPoP proof came with (RFC 9449).
        Raises: InvalidToken, ExpiredToken, RevokedToken (all AuthError); AuthUnavailable.
        """
        if len(token) > MAX_TOKEN_BYTES:
            raise InvalidToken("too long")
        digest = blake2b(token.encode(), digest_size=32).digest()
        known = self._known.get(digest)
        if known is None or not self._is_trusted(known, feed_as_of):
            known = await self._lookup(token, digest)
        claims = known.claims
        if claims.exp <= self._wall_clock():
            self._known.drop(digest)
            raise ExpiredToken(claims.jti)
        if claims.jkt != jkt:
            raise InvalidToken("sent without a proof of the key that it is bound to")
        return known.principal

    async def verify(self, token: str) -> AccessClaims:
        """Return the claims of a valid token, with the scopes that its subject still has.

        The endpoints of the authorization server call it.
        Raises: InvalidToken, ExpiredToken, RevokedToken, AuthUnavailable.
        """
        await self.denylist.current()
        claims = await rfc9068_access_token.read(
            self._keys, token, issuer=self._issuer, now=self._wall_clock()
        )
        if self.denylist.denies(claims):
            raise RevokedToken(claims.jti)
        try:
            async with self._db.connect() as conn:
                return within_role(claims, await find_principal(conn, claims))
        except DATABASE_ERRORS as error:
            raise AuthUnavailable(type(error).__name__) from error

    def changed(self, subject: str) -> None:
        """Drop the tokens that a change concerns. `subject`: an id, or EVERYTHING."""
        self._changes += 1
        if subject == EVERYTHING:
            self._forget()
        else:
            self._known.drop_where(lambda known: subject in concerned(known.principal))

    def _revoked(self, revocation: Revocation) -> None:
        self._changes += 1
        if revocation.kind == "key":
            self._keys.withdraw(revocation.subject)
        self._known.drop_where(lambda known: self.denylist.denies(known.claims))

    def _forget(self) -> None:
        self._changes += 1
        self._known.clear()

    def _is_trusted(self, known: CachedToken, feed_as_of: float) -> bool:
        as_of = max(known.as_of, feed_as_of)
        return self._clock() - as_of <= changes.MAX_STALENESS_S and self.denylist.is_current

    async def _lookup(self, token: str, digest: bytes) -> CachedToken:
        for _ in range(MAX_READS):
            await self.denylist.current()
            started = self._clock()
            await self._reads.run(digest, partial(self._read, token, digest))
            known = self._known.get(digest)
            is_new = known is not None and known.as_of >= started - changes.MAX_STALENESS_S
            if known is not None and is_new and self.denylist.is_current:
                return known
        raise AuthUnavailable("no read that is new enough")

    async def _read(self, token: str, digest: bytes) -> None:
        """Verify a token, look up its principal, and cache them unless a change was announced
        meanwhile."""
        claims = await rfc9068_access_token.read(
            self._keys, token, issuer=self._issuer, now=self._wall_clock()
        )
        try:
            async with asyncio.timeout(READ_TIMEOUT_S), self._read_slots:
                as_of, changes = self._clock(), self._changes
                if self.denylist.denies(claims):
                    raise RevokedToken(claims.jti)
                async with self._db.connect() as conn:
                    principal = await find_principal(conn, claims)
        except DATABASE_ERRORS as error:
            raise AuthUnavailable(type(error).__name__) from error
        if changes == self._changes:
            self._known.put(digest, CachedToken(claims, principal, as_of))


def concerned(principal: Principal) -> tuple[str | None, ...]:
    """Return the ids whose change makes this principal stale."""
    return (
        principal.org_id,
        principal.project_id,
        principal.client_id,
        principal.user_id,
        principal.service_account_id,
        principal.grant_id,
        *principal.agent_ids,
    )
