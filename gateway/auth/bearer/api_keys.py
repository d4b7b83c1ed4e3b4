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

Keys that are looked up while others are being read share one query (`key_reader`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Hashable, Sequence, Sized
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TypeVar

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.tasks import SharedTasks
from gateway.auth.bearer import key_reader
from gateway.auth.bearer.access_tokens import AccessTokens
from gateway.auth.bearer.key_reader import Hashes, KeyReader
from gateway.auth.errors import AuthError, AuthUnavailable, ExpiredKey, InvalidKey, RevokedKey
from gateway.auth.federation.external_issuers import ExternalIssuers
from gateway.db import DATABASE_ERRORS
from gateway.lru import Lru, WeighedLru
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
from gateway.tenancy.keys.records import KeyRecord, read_key
from gateway.tenancy.keys.restrictions import MAX_IP_RANGES

T = TypeVar("T", bound=Hashable)
log = logging.getLogger(__name__)

REFRESH_S = 30.0
"""A trusted key is read again in the background after it: limits may change without an
announcement."""
MAX_REFRESHED = 64
"""The most keys of a round. With more in use than rounds get through in REFRESH_S, each is read
less often: what a request costs does not depend on how many keys there are."""
REFRESH_INTERVAL_S = 1.0
"""Between two rounds, also after one that failed."""
MAX_AGE_S = 600.0
MAX_CACHED_BYTES = 64 << 20
"""The keys of a cache, as `size_of` estimates them: about 40,000 without limits by model."""
KEY_BYTES, ITEM_BYTES = 1_400, 250
MAX_SHARED = 4_096
"""Different plans and sets of scopes that keys share."""
MAX_CACHED_REFUSALS = 4_096
REFUSAL_TTL_S = 5.0
MAX_READS = 3
"""The maximum per request; a read is repeated only if a change was announced during it, or it was
slow."""
MAX_KEY_LENGTH = len(ADMIN_PREFIX) + RANDOM_LENGTH


class CachedKey(msgspec.Struct, frozen=True, gc=False):
    """A valid key, as read at `as_of` (monotonic seconds)."""

    principal: Principal
    as_of: float


class CachedRefusal(msgspec.Struct, frozen=True, gc=False):
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
        self._pepper = pepper
        self._peppers = ((pepper_id, pepper), *older)
        self._tokens = tokens
        self._external = external
        self.on_use = on_use
        self._clock = clock
        self._wall_clock = wall_clock
        self._listener = ChangeListener(redis, self._changed, clock=clock)
        self._known: WeighedLru[bytes, CachedKey] = WeighedLru(MAX_CACHED_BYTES, size_of)
        self._refused: Lru[bytes, CachedRefusal] = Lru(MAX_CACHED_REFUSALS)
        self._changes = 0
        self._failing = False
        self._reader = KeyReader(db)
        self._reads: SharedTasks[bytes, None] = SharedTasks("read api key")
        self._stale: dict[bytes, str] = {}
        """Keys in use that the next round reads again."""
        self._refreshing: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start to listen for changes. Without Redis it starts too, and goes on trying."""
        await self._listener.start()

    async def close(self) -> None:
        await self._listener.close()
        if self._refreshing is not None:
            self._refreshing.cancel()
        await self._reads.close()
        await self._reader.close()

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
        elif self._clock() > known.as_of + self._refresh_s:
            self._refresh(bearer, handle)
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

    @property
    def _refresh_s(self) -> float:
        """The age at which a key in use is read again."""
        return max(REFRESH_S, len(self._known) / MAX_REFRESHED * REFRESH_INTERVAL_S)

    def _refresh(self, key: str, handle: bytes) -> None:
        """Read a key again soon, with others."""
        if len(self._stale) < MAX_REFRESHED:
            self._stale[handle] = key
        if self._refreshing is None:
            loop = asyncio.get_running_loop()
            self._refreshing = loop.call_later(REFRESH_INTERVAL_S, self._read_stale)

    def _read_stale(self) -> None:
        self._refreshing = None
        stale, self._stale = self._stale, {}
        for handle, key in stale.items():
            self._reads.start(handle, partial(self._read, key, handle))

    async def _read(self, key: str, handle: bytes) -> None:
        """Read a key from Postgres, and cache it unless a change was announced meanwhile.

        Raises: AuthUnavailable.
        """
        as_of, changes = self._clock(), self._changes
        try:
            async with asyncio.timeout(key_reader.READ_TIMEOUT_S):
                record = await self._reader.find(self.hashes(key))
            if record is None:
                found: CachedKey | CachedRefusal = CachedRefusal(InvalidKey, "unknown", as_of)
            else:
                found = _to_cached(record, as_of)
        except Exception as error:
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
    """Return the ids whose change makes this principal stale: the key, its owner, its project, its
    org."""
    return (
        *(principal.key_id, principal.user_id, principal.service_account_id),
        *(principal.project_id, principal.org_id),
    )


@lru_cache(MAX_SHARED)
def shared(value: T) -> T:
    """Return one object for all that are equal: thousands of keys have the same few plans."""
    return value


def size_of(known: CachedKey) -> int:
    """Estimate the bytes that a cached key takes: KEY_BYTES, and ITEM_BYTES for each part of a
    list."""
    principal = known.principal
    lists: tuple[Sized | None, ...] = (
        *(principal.model_plans, principal.key_model_plans, principal.spend_caps),
        *(principal.owned_projects, principal.allowed_models, principal.denied_models),
    )
    networks = principal.allowed_networks
    num_items = sum(len(each) for each in lists if each) + (MAX_IP_RANGES if networks else 0)
    return KEY_BYTES + ITEM_BYTES * num_items


def to_principal(record: KeyRecord) -> Principal:
    row, project = record.row, record.project_models
    lists = [] if row.models is None else [frozenset(row.models)]
    if project.allowed is not None:
        lists.append(project.allowed)
    return Principal(
        org_id=sys.intern(row.org_id),
        org_name=sys.intern(record.org_name),
        project_id=sys.intern(row.project_id or ""),
        project_name=sys.intern(record.project_name or ""),
        key_id=row.id,
        key_hint=record.hint,
        scopes=shared(frozenset(row.scopes)),
        key_lane=row.lane,
        key_plan=shared(record.key_plan),
        project_plan=shared(record.project_plan),
        org_plan=shared(record.org_plan),
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
