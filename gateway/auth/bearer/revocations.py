"""Revokes access tokens before they expire: a denylist in every process.

Revocations are rows with sequence numbers. The numbers are drawn under a lock that lasts until the
commit, so they become visible in order: a reader of one has missed none before it. How a revocation
reaches a process within a second, whatever is broken:

- It is announced on Redis after the commit, with its content. A process takes it if its number
  follows the last one known, and else reads Postgres.
- Before the commit an announcement says that one is coming: if the gateway dies between its commit
  and its announcement, the others poll already.
- An announcement that is lost all the same is missed within the second by its number, whether or
  not Postgres is there.
- Without the feed (`ChangeListener.as_of` says as of when nothing was missed) Postgres is polled
  every POLL_S, from the last number on; and once when the feed is back.
- If only the revoking gateway is cut off from Redis, no other feed shows that something is missing.
  So Postgres notifies of each revocation as it is committed (`WorkListener`), and then it is read.
  The revoking gateway says both again until Redis has it, for REPEAT_FOR_S; and who reads of one
  that the feed does not tell of announces it, for those who have missed the notification.
- A process that does not hear Postgres polls it with the feed too, every HEALTHY_POLL_S; one that
  does looks after a lost notification every `work_listener.LOOK_S`.
- A process that cannot prove to have all revocations as of MAX_STALENESS_S ago accepts no token:
  for example while both Redis and Postgres are gone.

A revocation is kept for as long as a token that it refuses may live. Revoking a grant refuses the
exchanged tokens too, which carry the grant's id; revoking a token or a client refuses all tokens
that were derived from it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.periodic import Periodic
from foundation.tasks import TaskSet
from gateway.audit.log import Actor
from gateway.auth.errors import AuthUnavailable
from gateway.auth.oauth.tokens.grants import revoke_grant
from gateway.auth.oauth.tokens.rfc9068_access_token import MAX_LIFETIME_S, AccessClaims
from gateway.auth.tables import revocations
from gateway.db import DATABASE_ERRORS, delete_some
from gateway.tenancy.changes import EVERYTHING, ChangeListener, publish_change
from gateway.tenancy.errors import ChangeNotAnnounced
from gateway.worker.work_listener import CHANNEL as WORK_CHANNEL
from gateway.worker.work_listener import LONG_S, WorkListener

log = logging.getLogger(__name__)

CHANNEL = "tollgate:revocations"
POLL_S = 0.4
"""Two polls, with the reads themselves, are never more than MAX_STALENESS_S apart."""
HEALTHY_POLL_S = 0.8
"""A poll is one index look-up per process. A revocation is known at most this long after its
commit, plus the read and the delay of the event loop."""
MAX_STALENESS_S = 0.9
OLD_FEED_S = 0.75
"""A feed is doubted that proved nothing for so long: longer than an idle one's heartbeats are
apart, and with time to read before MAX_STALENESS_S."""
INTENT_S = 5.0
"""A process polls for so long after the announcement that a revocation is coming."""
ANNOUNCE_TIMEOUT_S = 0.5
REPEAT_S, REPEAT_FOR_S = 0.2, 2.0
"""So often, and for so long, an announcement that failed is made again, and Postgres notifies."""
LATE_S = 0.2
"""The feed may tell of a revocation so much later than Postgres; then others announce it."""
READ_TIMEOUT_S = 5.0
WORK = "revocations"
"""The topic of the trigger on revocations."""
KEPT_S = MAX_LIFETIME_S + 120
"""A token's lifetime, clock skew, and a transaction that issues one while its grant ends."""
LOCK = 0x7265766F_6B696E67
"""Postgres advisory lock: "revoking" in ASCII."""
SWEEP_S = 60.0
MAX_READ = 10_000
"""The rows of one read."""
MAX_PURGED = 1000
JITTER = random.Random()
"""A generator of its own: it neither follows nor disturbs a seed of the global one."""
INTENT = b"?"

Kind = Literal["grant", "token", "client", "user", "key"]
"""A "key" signed many tokens, whose claims do not name it: `on_revoked` withdraws it."""


class Revocation(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    kind: Kind
    subject: str
    issued_until: int | None
    """Unix seconds: tokens with a later `iat` stay valid. None: no token does."""
    expires_at: float
    """Unix seconds: by then every token that it refuses has expired."""


ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(list[Revocation])


class Announcement:
    """The revocations of one transaction; `announcing` publishes them."""

    def __init__(self, redis: Redis, clock: Callable[[], float]) -> None:
        self.redis = redis
        self._clock = clock
        self.revoked: list[Revocation] = []
        self.db: AsyncEngine | None = None
        """The pool of the transaction."""
        self.warned = False
        """True if it was announced that a revocation is coming, so that other processes poll."""

    async def revoke(self, conn: AsyncConnection, *, org_id: str, kind: Kind, subject: str) -> None:
        """Revoke in the caller's transaction. Its lock is the last one to take, after that of the
        audit log.

        A grant, token, client or key is revoked for good; for a user, the tokens that were issued
        until now are refused (hold the lock of the user's row, so that none is issued meanwhile).
        """
        if not self.revoked:
            self.warned = await publish(self.redis, INTENT)
        now = self._clock()
        issued_until = math.floor(now) if kind == "user" else None
        row = {
            "org_id": org_id,
            "kind": kind,
            "subject": subject,
            "issued_until": issued_until,
            "expires_at": datetime.fromtimestamp(now + KEPT_S, UTC),
        }
        await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
        self.db = conn.engine
        added = sa.insert(revocations).values(**row).returning(revocations.c.seq)
        seq = (await conn.execute(added)).scalar_one()
        self.revoked.append(Revocation(seq, kind, subject, issued_until, now + KEPT_S))


async def end_grant(
    conn: AsyncConnection,
    announcement: Announcement,
    *,
    org_id: str,
    grant_id: str,
    because: str,
    actor: Actor,
) -> bool:
    """Revoke a grant and the tokens that it gave. False if it was revoked before.

    Raises: NotFound.
    """
    is_new = await revoke_grant(
        conn, org_id=org_id, grant_id=grant_id, because=because, actor=actor
    )
    await announcement.revoke(conn, org_id=org_id, kind="grant", subject=grant_id)
    return is_new


@asynccontextmanager
async def announcing(
    redis: Redis, *, clock: Callable[[], float] = time.time
) -> AsyncIterator[Announcement]:
    """Announce the revocations of a transaction after its commit.

    Raises: ChangeNotAnnounced if Redis could not be reached for REPEAT_FOR_S. The change is
    committed and Postgres notifies all processes of it; one that reaches Redis but not Postgres
    hears of it from those who do. If all who do are cut off from Redis, the call must be repeated.
    """
    announcement = Announcement(redis, clock)
    yield announcement
    if not announcement.revoked:
        return
    message = ENCODER.encode(announcement.revoked)
    was_announced = await publish(redis, message)
    if not was_announced:
        was_announced = await announce_again(announcement, message)
    if not was_announced and not announcement.warned:
        raise ChangeNotAnnounced("redis", "the revocation is saved but was not announced")


async def announce_again(announcement: Announcement, message: bytes) -> bool:
    """Announce what could not be announced until Redis takes it, and let Postgres notify of it as
    often: a notification may be lost, too. False: Redis did not take it within REPEAT_FOR_S."""
    assert announcement.db is not None, "something was revoked"
    with suppress(TimeoutError):
        async with asyncio.timeout(REPEAT_FOR_S):
            while True:
                await asyncio.sleep(REPEAT_S)
                with suppress(*DATABASE_ERRORS):
                    async with announcement.db.begin() as conn:
                        await conn.execute(sa.select(sa.func.pg_notify(WORK_CHANNEL, WORK)))
                if await publish(announcement.redis, message):
                    return True
    return False


async def publish(redis: Redis, message: bytes) -> bool:
    try:
        async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
            await publish_change(redis, CHANNEL, message)
    except (RedisError, OSError) as error:  # TimeoutError is an OSError
        log.warning("a revocation could not be announced (%s)", type(error).__name__)
        return False
    return True


async def purge(conn: AsyncConnection, now: datetime) -> None:
    """Delete some of the revocations that expired more than an hour ago."""
    expired = revocations.c.expires_at < now - timedelta(hours=1)
    await delete_some(conn, revocations.c.seq, expired, limit=MAX_PURGED)


class Denylist:
    """One per process. `db`: the system pool. `on_revoked` hears of each revocation that is new.
    `listener` hears of commits; None: nobody does. `clock`: monotonic seconds; `wall_clock`: Unix
    seconds."""

    def __init__(
        self,
        db: AsyncEngine,
        redis: Redis,
        on_revoked: Callable[[Revocation], None],
        *,
        listener: WorkListener | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._on_revoked = on_revoked
        self._clock = clock
        self._wall_clock = wall_clock
        self._work_listener = listener
        self._listener = ChangeListener(
            redis, self._receive, channel=CHANNEL, clock=clock, on_lost=self._wake
        )
        self._redis = redis
        self._denied: dict[tuple[Kind, str], Revocation] = {}
        self._last_seq = 0
        self._announced_seq = 0
        """The last one that the feed told of."""
        self._tasks = TaskSet()
        self._read_as_of = -math.inf
        self._behind = self._missed_again = True
        """`_behind`: something was missed or is coming, so the feed proves nothing until the end of
        a read that began later. `_missed_again`: so it is since the last read began."""
        self._polled_at = -math.inf
        self._poll_until = -math.inf
        self._fresh = asyncio.Condition()
        self._failing = False
        self._swept_at = clock()
        if listener is not None:
            listener.watch(WORK, self._read_soon, self._due)
        self._rounds = Periodic(
            "revocations",
            self._pause_s,
            self._poll_and_sweep,
            log=log,
            failure="revocations cannot be read",
        )

    async def start(self) -> None:
        """Start to follow revocations. Without Redis or Postgres it starts too, and goes on
        trying."""
        await self._listener.start()
        self._rounds.start()

    async def close(self) -> None:
        await self._listener.close()
        await self._rounds.close()
        await self._tasks.close()

    @property
    def as_of(self) -> float:
        """The moment before which every announced revocation is known; if it is the moment of a
        read, every committed one too."""
        return self._read_as_of if self._behind else max(self._read_as_of, self._listener.as_of)

    @property
    def is_current(self) -> bool:
        return self._clock() - self.as_of <= MAX_STALENESS_S

    async def current(self) -> None:
        """Wait until no revocation older than MAX_STALENESS_S can be missing.

        Raises: AuthUnavailable.
        """
        if self.is_current:
            return
        self._rounds.wake()
        try:
            async with asyncio.timeout(MAX_STALENESS_S), self._fresh:
                await self._fresh.wait_for(lambda: self.is_current)
        except TimeoutError:
            raise AuthUnavailable("revocations cannot be read") from None

    def _wake(self) -> None:
        self._rounds.wake()

    def _read_soon(self) -> None:
        """Read what Postgres has: it was committed, or the clock says so."""
        self._polled_at = -math.inf
        self._rounds.wake()

    def _due(self) -> str:
        return f"SELECT now() WHERE (SELECT max(seq) FROM revocations) > {self._last_seq:d}"

    def denies(self, claims: AccessClaims) -> bool:
        subjects: list[tuple[Kind, str]] = [("token", claims.jti), ("client", claims.client_id)]
        subjects += [("token", each) for each in claims.derived_from]
        subjects += [("client", each) for each in claims.passed_through]
        if claims.grant_id is not None:
            subjects.append(("grant", claims.grant_id))
        if claims.user_id is not None:
            subjects.append(("user", claims.user_id))
        return any(
            found is not None and (found.issued_until is None or claims.iat <= found.issued_until)
            for found in map(self._denied.get, subjects)
        )

    def _receive(self, message: str) -> None:
        """Apply a message of the feed."""
        if message == EVERYTHING:
            self._fall_behind()
        elif message.encode() == INTENT:
            self._poll_until = self._clock() + INTENT_S
            self._rounds.wake()
        else:
            try:
                announced = DECODER.decode(message)
            except msgspec.DecodeError:
                log.error("an announcement of revocations cannot be decoded")
                self._fall_behind()
                return
            for each in announced:
                self._announced_seq = max(self._announced_seq, each.seq)
            new = [each for each in announced if each.seq > self._last_seq]
            has_no_gap = all(
                each.seq == self._last_seq + number for number, each in enumerate(new, 1)
            )
            self._learn(new, advance=has_no_gap)
            if not has_no_gap:
                self._fall_behind()

    def _fall_behind(self) -> None:
        self._behind = self._missed_again = True
        self._rounds.wake()

    def _learn(self, found: Iterable[Revocation], *, advance: bool) -> None:
        for each in found:
            known = self._denied.get((each.kind, each.subject))
            if known is None or (each.issued_until or 0) >= (known.issued_until or 0):
                self._denied[each.kind, each.subject] = each
            if advance:
                self._last_seq = max(self._last_seq, each.seq)
            self._on_revoked(each)

    @property
    def _is_watchful(self) -> bool:
        """True while the feed proves nothing, or not for long, or something is coming."""
        feed_is_old = self._clock() - self._listener.heard_at > OLD_FEED_S
        return self._behind or feed_is_old or self._clock() < self._poll_until

    @property
    def _must_poll(self) -> bool:
        return self._is_watchful or self._next_poll_s <= 0

    @property
    def _next_poll_s(self) -> float:
        """Return the seconds until the next read, if the feed stays healthy."""
        healthy_s = LONG_S if self._hears_commits else HEALTHY_POLL_S
        return self._polled_at + healthy_s - self._clock()

    @property
    def _hears_commits(self) -> bool:
        return self._work_listener is not None and self._work_listener.is_hearing

    def _pause_s(self) -> float:
        """Return the seconds to the next round: whoever loses the feed, or hears of a commit, wakes
        it earlier."""
        next_s = max(0.0, self._next_poll_s)
        return next_s if self._hears_commits and not self._is_watchful else min(POLL_S, next_s)

    async def _poll_and_sweep(self) -> None:
        if self._must_poll:
            await self._poll()
        if self._sweep():
            await self._purge()

    async def _poll(self) -> None:
        started = self._polled_at = self._clock()
        self._missed_again = False
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                while len(found := await self._read()) == MAX_READ:
                    self._learn(found, advance=True)
        except DATABASE_ERRORS as error:
            if not self._failing:
                log.error("revocations cannot be read from Postgres (%s)", type(error).__name__)
            self._failing = True
            return
        self._failing = False
        if found and self._read_as_of > -math.inf:
            self._tasks.spawn(self._announce_late(found), name="announce revocations")
        self._learn(found, advance=True)
        self._behind = self._missed_again
        self._read_as_of = started
        async with self._fresh:
            self._fresh.notify_all()

    async def _announce_late(self, found: Sequence[Revocation]) -> None:
        """Announce what Postgres has told of and the feed does not: who revoked it may be cut off
        from Redis, and others may have missed the notification."""
        await asyncio.sleep(LATE_S * JITTER.uniform(1.0, 2.0))
        late = [each for each in found if each.seq > self._announced_seq]
        if late:
            await publish(self._redis, ENCODER.encode(late))

    async def _read(self) -> list[Revocation]:
        now = datetime.fromtimestamp(self._wall_clock(), UTC)
        newer = sa.select(revocations).where(revocations.c.seq > self._last_seq)
        newer = newer.where(revocations.c.expires_at > now).order_by(revocations.c.seq)
        async with self._db.connect() as conn:
            rows = await conn.execute(newer.limit(MAX_READ))
            return [
                Revocation(
                    row.seq, row.kind, row.subject, row.issued_until, row.expires_at.timestamp()
                )
                for row in rows
            ]

    def _sweep(self) -> bool:
        """Forget expired revocations every SWEEP_S; True if it did."""
        if self._clock() - self._swept_at < SWEEP_S:
            return False
        self._swept_at, now = self._clock(), self._wall_clock()
        for key in [key for key, each in self._denied.items() if each.expires_at <= now]:
            del self._denied[key]
        return True

    async def _purge(self) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S), self._db.begin() as conn:
                await purge(conn, datetime.fromtimestamp(self._wall_clock(), UTC))
        except DATABASE_ERRORS as error:
            log.warning("old revocations stay in Postgres (%s)", type(error).__name__)
