"""Resolves an API key to a principal, without asking Postgres each time or trusting a copy for
long.

It knows no HTTP. Nothing here keeps a key: cached answers stand under a keyed hash of it (BLAKE2b:
a quarter of the time that HMAC-SHA256 takes, under which Postgres knows the key).

How a revocation reaches this process within a second, whatever is broken:

- It is announced on Redis, and the announced key is dropped at once.
- A cached answer is trusted as of the moment when it was read or, later, as of the listener's last
  heartbeat: no announcement before that can be missing. What is older than MAX_STALENESS_S is read
  again. So with Redis gone or silent each key in use is read from Postgres about once a second.
- When the listener has subscribed anew it may have missed something: everything is dropped.
- An answer that was on its way while something was announced is not kept, but read again.

With Postgres gone and Redis alive, known keys go on working for MAX_AGE_S after they were read;
others get AuthUnavailable. With both gone nobody is let in.
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
"""After so long a trusted answer is read again in the background: limits that changed without an
announcement."""
REFRESH_RETRY_S = 1.0
MAX_AGE_S = 600.0
MAX_CACHED_KEYS = 16_384
MAX_CACHED_REFUSALS = 4_096
REFUSAL_TTL_S = 5.0
MAX_CONCURRENT_READS = 16
READ_TIMEOUT_S = 5.0
MAX_READS = 3
"""Per request: each is made void only by an announcement, or a slow Postgres, while it ran."""
MAX_KEY_LENGTH = len(ADMIN_PREFIX) + RANDOM_LENGTH

Hashes = tuple[tuple[str, str], ...]
"""(pepper id, the key's hash under that pepper), the current pepper first."""


class CachedKey(msgspec.Struct, frozen=True):
    """A good key, as Postgres had it at `as_of` (monotonic seconds)."""

    principal: Principal
    as_of: float


class CachedRefusal(msgspec.Struct, frozen=True):
    """A bad one, which will not get better."""

    error: type[AuthError]
    detail: str
    as_of: float


class Authenticator:
    """One per process. `older`: (pepper id, pepper) of what was current before; keys made under
    them stay good. `redis` must not decode responses. `tokens` knows what is no API key, `external`
    what of it others have signed. `on_use` is told the id of each good key that was shown, each
    time. `clock`: monotonic seconds; `wall_clock`: Unix seconds."""

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
        self._on_use = on_use
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
        """Start listening; works without Redis too, if slower: it does not fail, it goes on trying
        to reach it."""
        await self._listener.start()

    async def close(self) -> None:
        await self._listener.close()
        await self._reads.close()

    async def authenticate(self, bearer: str, *, jkt: str | None = None) -> Principal:
        """The principal of the key, or access token, `bearer`. jkt: of the key that was proven with
        it (RFC 9449).

        Raises: InvalidKey, ExpiredKey, RevokedKey, InvalidToken (all AuthError); AuthUnavailable.
        """
        if self._tokens is not None and not bearer.startswith(PREFIX):
            if self._external is not None and self._external.is_foreign(bearer):
                return await self._external.authenticate(bearer, jkt=jkt)
            as_of = self._listener.as_of
            return await self._tokens.authenticate(bearer, heard_as_of=as_of, jkt=jkt)
        if jkt is not None:
            raise InvalidKey("an API key is bound to no other")
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
        self._on_use(principal.key_id)
        return principal

    @property
    def pepper(self) -> tuple[str, bytes]:
        """Return (pepper id, pepper) for new keys."""
        return self._peppers[0]

    def hashes(self, key: str) -> Hashes:
        """Return all hashes under which Postgres may know the key."""
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
        raise AuthUnavailable("no answer that is new enough")

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
        """Ask Postgres, and keep the answer if nothing was announced meanwhile.

        Raises: AuthUnavailable.
        """
        try:
            async with asyncio.timeout(READ_TIMEOUT_S), self._read_slots:
                as_of, changes = self._clock(), self._changes
                async with self._db.connect() as conn:
                    answer = await _ask(conn, self.hashes(key), as_of)
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
        if isinstance(answer, CachedRefusal):
            self._known.drop(handle)
            self._refused.put(handle, answer)
        else:
            self._known.put(handle, answer)


async def _ask(conn: AsyncConnection, hashes: Hashes, as_of: float) -> CachedKey | CachedRefusal:
    """One query for a key of the current pepper, one more for each older pepper."""
    for pepper_id, key_hash in hashes:
        record = await find_key(conn, key_hash=key_hash, pepper_id=pepper_id)
        # Postgres found it by index; this comparison takes the same time wherever hashes differ.
        if record is not None and hmac.compare_digest(record.key_hash, key_hash):
            return _answer(record, as_of)
    return CachedRefusal(InvalidKey, "unknown", as_of)


def _answer(record: KeyRecord, as_of: float) -> CachedKey | CachedRefusal:
    if record.archived or record.row.revoked_at is not None or not record.owner_active:
        return CachedRefusal(RevokedKey, record.row.id, as_of)
    return CachedKey(to_principal(record), as_of)


async def principal_of(conn: AsyncConnection, *, org_id: str, key_id: str) -> Principal:
    """Return the principal of a key that asked earlier for what is done now. Raises: InvalidKey,
    RevokedKey, ExpiredKey."""
    record = await read_key(conn, org_id=org_id, key_id=key_id)
    if record is None:
        raise InvalidKey("unknown")
    answer = _answer(record, 0.0)
    if isinstance(answer, CachedRefusal):
        raise answer.error(answer.detail)
    expires_at = answer.principal.expires_at
    if expires_at is not None and expires_at <= time.time():
        raise ExpiredKey(key_id)
    return answer.principal


def concerned(principal: Principal) -> tuple[str | None, ...]:
    """Return the ids whose announced change has this principal read anew: the key, its owner, its
    project."""
    return principal.key_id, principal.user_id, principal.service_account_id, principal.project_id


def to_principal(record: KeyRecord) -> Principal:
    row, project = record.row, record.project_models
    lists = [] if row.models is None else [frozenset(row.models)]
    if project.allowed is not None:
        lists.append(project.allowed)
    return Principal(
        org_id=row.org_id,
        project_id=row.project_id or "",
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
