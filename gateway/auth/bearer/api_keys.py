"""Resolves an API key to a principal, without a query for each request and without trusting a
cached one for long.

No key is kept: the cache is indexed by a keyed hash (BLAKE2b, which takes a quarter of the time of
HMAC-SHA256, under which Postgres stores the key).

How a revocation reaches this process within a second, whatever is broken:

- It is announced on Redis, and the announced key is dropped at once.
- A cached key is trusted as of the moment when it was read or, later, as of the listener's last
  heartbeat: no announcement before that can be missing. What is older than MAX_STALENESS_S is read
  again. So with Redis gone or silent each key in use is read from Postgres about once a second.
- When the listener has subscribed again it may have missed something: everything is dropped.
- If a change is announced while a key is read, the result is not cached but read again.

With Postgres gone and Redis alive, cached keys go on working for MAX_AGE_S after they were read;
others get AuthUnavailable. With both gone every key gets it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.tasks import SharedTasks
from gateway.auth.bearer.access_tokens import AccessTokens
from gateway.auth.errors import AuthError, AuthUnavailable, ExpiredKey, InvalidKey, RevokedKey
from gateway.auth.federation.external_issuers import ExternalIssuers
from gateway.db import DATABASE_ERRORS
from gateway.lru import Lru
from gateway.networks import Networks
from gateway.principal import Principal
from gateway.tenancy import changes
from gateway.tenancy.changes import EVERYTHING, ChangeListener
from gateway.tenancy.keys.keys import (
    ADMIN_PREFIX,
    KEY_FORM,
    PREFIX,
    RANDOM_LENGTH,
    hash_key,
)
from gateway.tenancy.keys.records import KeyRecord, find_key, read_key

log = logging.getLogger(__name__)

REFRESH_S = 30.0
"""A trusted key is read again in the background after it: limits may change without an
announcement."""
REFRESH_RETRY_S = 1.0
MAX_AGE_S = 600.0
MAX_CACHED_KEYS = 16_384
MAX_CACHED_REFUSALS = 4_096
REFUSAL_TTL_S = 5.0
MAX_CONCURRENT_READS = 16
READ_TIMEOUT_S = 5.0
MAX_READS = 3
"""The maximum per request; a read is repeated only if a change was announced during it, or it was
slow."""
MAX_KEY_LENGTH = len(ADMIN_PREFIX) + RANDOM_LENGTH

Hashes = tuple[tuple[str, str], ...]
"""(pepper id, the key's hash under that pepper), the current pepper first."""


class CachedKey(msgspec.Struct, frozen=True):
    """A valid key, as read at `as_of` (monotonic seconds)."""

    principal: Principal
    as_of: float


class CachedRefusal(msgspec.Struct, frozen=True):
    """A key that was refused."""

    error: type[AuthError]
    detail: str
    as_of: float


class Authenticator:
    """Resolves bearer credentials in one process.

    `older`: (pepper id, pepper) of former peppers; keys that were hashed with them stay valid.
    `redis` must not decode responses. A credential without the prefix of API keys goes to `tokens`,
    or to `external` if another issuer signed it. `on_use` is called with a key's id at each use.
    `clock`: monotonic seconds; `wall_clock`: Unix seconds.
    """

    def __init__(
        self,
        *,
        db: AsyncEngine,
        redis: Redis,
        pepper: bytes,
        pepper_id: str,
        older: Sequence[tuple[str, bytes]] = (),
        tokens: AccessTokens | None = None,
        external: ExternalIssuers | None = None,
        on_use: Callable[[str], None] = lambda key_id: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._pepper = pepper
        self._peppers = ((pepper_id, pepper), *older)
        self._tokens = tokens
        self._external = external
        self.on_use = on_use
        self._clock = clock
        self._wall_clock = wall_clock
        self._listener = ChangeListener(redis, self._changed, clock=clock)
        self._known: Lru[bytes, CachedKey] = Lru(MAX_CACHED_KEYS)
        self._refused: Lru[bytes, CachedRefusal] = Lru(MAX_CACHED_REFUSALS)
        self._changes = 0
        self._failing = False
        self._refresh_at = -math.inf
        self._reads: SharedTasks[bytes, None] = SharedTasks("read api key")
        self._read_slots = asyncio.Semaphore(MAX_CONCURRENT_READS)

    async def start(self) -> None:
        """Start to listen for changes. Without Redis it starts too, and goes on trying."""
        await self._listener.start()

    async def close(self) -> None:
        await self._listener.close()
        await self._reads.close()

    async def authenticate(self, bearer: str, *, jkt: str | None = None) -> Principal:
        """Return the principal of an API key or access token. `jkt`: the thumbprint of the key that
        a DPoP proof came with (RFC 9449).

        Raises: InvalidKey, ExpiredKey, RevokedKey, InvalidToken (all AuthError); AuthUnavailable.
        """
        if self._tokens is not None and not bearer.startswith(PREFIX):
            if self._external is not None and self._external.is_foreign(bearer):
                return await self._external.authenticate(bearer, jkt=jkt)
            as_of = self._listener.as_of
            return await self._tokens.authenticate(bearer, feed_as_of=as_of, jkt=jkt)
        if jkt is not None:
            raise InvalidKey("an API key cannot be used with DPoP")
        if len(bearer) > MAX_KEY_LENGTH:
            raise InvalidKey("malformed")
        handle = self._handle(bearer)
        known = self._known.get(handle)
        if known is None or not self._is_trusted(known):
            if KEY_FORM.fullmatch(bearer) is None:
                raise InvalidKey("malformed")
            known = await self._lookup(bearer, handle)
        elif self._clock() > max(known.as_of + REFRESH_S, self._refresh_at):
            self._reads.start(handle, partial(self._read, bearer, handle))
        principal = known.principal
        if principal.expires_at is not None and principal.expires_at <= self._wall_clock():
            raise ExpiredKey(principal.key_id)
        self.on_use(principal.key_id)
        return principal

    @property
    def pepper(self) -> tuple[str, bytes]:
        """Return (pepper id, pepper) for new keys."""
        return self._peppers[0]

    def hashes(self, key: str) -> Hashes:
        """Return the key's hash under each pepper."""
        return tuple((each, hash_key(pepper, key)) for each, pepper in self._peppers)

    def _handle(self, key: str) -> bytes:
        return blake2b(key.encode(), key=self._pepper, digest_size=32).digest()

    async def _lookup(self, key: str, handle: bytes) -> CachedKey:
        for _ in range(MAX_READS):
            refused = self._refused.get(handle)
            if refused is not None and self._clock() - refused.as_of <= REFUSAL_TTL_S:
                raise refused.error(refused.detail)
            known = self._known.get(handle)
            if known is not None and self._is_trusted(known):
                return known
            await self._reads.run(handle, partial(self._read, key, handle))
        raise AuthUnavailable("no read that is new enough")

    def _is_trusted(self, known: CachedKey) -> bool:
        now = self._clock()
        as_of = max(known.as_of, self._listener.as_of)
        return now - as_of <= changes.MAX_STALENESS_S and now - known.as_of <= MAX_AGE_S

    def _changed(self, subject: str) -> None:
        self._changes += 1
        if self._tokens is not None:
            self._tokens.changed(subject)
        if subject == EVERYTHING:
            self._known.clear()
            self._refused.clear()
        else:
            self._known.drop_where(lambda known: subject in concerned(known.principal))

    async def _read(self, key: str, handle: bytes) -> None:
        """Read a key from Postgres, and cache it unless a change was announced meanwhile.

        Raises: AuthUnavailable.
        """
        try:
            async with asyncio.timeout(READ_TIMEOUT_S), self._read_slots:
                as_of, changes = self._clock(), self._changes
                async with self._db.connect() as conn:
                    found = await _find(conn, self.hashes(key), as_of)
        except Exception as error:
            self._refresh_at = self._clock() + REFRESH_RETRY_S
            if not self._failing:
                # The error's own text may hold the statement's parameters.
                log.error("API keys cannot be read from Postgres (%s)", type(error).__name__)
            self._failing = True
            if isinstance(error, DATABASE_ERRORS):
                raise AuthUnavailable(type(error).__name__) from error
            raise
        self._failing = False
        if changes != self._changes:
            return
        if isinstance(found, CachedRefusal):
            self._known.drop(handle)
            self._refused.put(handle, found)
        else:
            self._known.put(handle, found)


async def _find(conn: AsyncConnection, hashes: Hashes, as_of: float) -> CachedKey | CachedRefusal:
    """Look the key up under each pepper, the current one first."""
    for pepper_id, key_hash in hashes:
        record = await find_key(conn, key_hash=key_hash, pepper_id=pepper_id)
        # The look-up by index is not constant-time; this comparison is.
        if record is not None and hmac.compare_digest(record.key_hash, key_hash):
            return _to_cached(record, as_of)
    return CachedRefusal(InvalidKey, "unknown", as_of)


def _to_cached(record: KeyRecord, as_of: float) -> CachedKey | CachedRefusal:
    if record.archived or record.row.revoked_at is not None or not record.owner_active:
        return CachedRefusal(RevokedKey, record.row.id, as_of)
    return CachedKey(to_principal(record), as_of)


async def principal_of(conn: AsyncConnection, *, org_id: str, key_id: str) -> Principal:
    """Return the principal of a key by its id, for work that the key requested earlier.

    Raises: InvalidKey, RevokedKey, ExpiredKey.
    """
    record = await read_key(conn, org_id=org_id, key_id=key_id)
    if record is None:
        raise InvalidKey("unknown")
    found = _to_cached(record, 0.0)
    if isinstance(found, CachedRefusal):
        raise found.error(found.detail)
    expires_at = found.principal.expires_at
    if expires_at is not None and expires_at <= time.time():
        raise ExpiredKey(key_id)
    return found.principal


def concerned(principal: Principal) -> tuple[str | None, ...]:
    """Return the ids whose change makes this principal stale: the key, its owner, its project."""
    return principal.key_id, principal.user_id, principal.service_account_id, principal.project_id


def to_principal(record: KeyRecord) -> Principal:
    row, project = record.row, record.project_models
    lists = [] if row.models is None else [frozenset(row.models)]
    if project.allowed is not None:
        lists.append(project.allowed)
    return Principal(
        org_id=row.org_id,
        org_name=record.org_name,
        project_id=row.project_id or "",
        project_name=record.project_name or "",
        key_id=row.id,
        key_hint=record.hint,
        scopes=frozenset(row.scopes),
        key_lane=row.lane,
        key_plan=record.key_plan,
        project_plan=record.project_plan,
        org_plan=record.org_plan,
        model_plans=record.model_plans,
        spend_caps=record.spend_caps,
        shows_cost=record.shows_cost,
        zero_retention=record.zero_retention,
        store_content=record.store_content,
        key_model_plans=record.key_model_plans,
        role=record.role,
        owned_projects=record.owned_projects,
        user_id=row.user_id,
        service_account_id=row.service_account_id,
        expires_at=None if record.expires_at is None else record.expires_at.timestamp(),
        is_operator=record.is_operator,
        suspended_by=record.suspended_by,
        allowed_models=frozenset.intersection(*lists) if lists else None,
        denied_models=project.denied,
        key_models=None if row.models is None else frozenset(row.models),
        allowed_networks=None if row.ip_ranges is None else Networks.of(row.ip_ranges),
    )
