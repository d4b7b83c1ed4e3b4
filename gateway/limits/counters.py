"""Builds the counters of spending, and counts each request into each of them once.

A counter of which Redis knows nothing (a new cap, a new period, a loss of data) is not zero: while
it stands missing nothing is admitted, and one gateway under a lock builds it from what the books
say was spent up to a watermark and from what open leases hold.

Why nothing is counted twice or left out. Each request is known by its lease's id, and its record
says which counter has it, by that counter's watermark. When its event has been booked in Postgres
its gateway says so (`book`), with the moment: of a counter whose watermark is later, the books had
it in the sum, and it is taken out if its lease had been settled into it; into one whose watermark
is earlier it is put, unless its lease was. So in whatever order a loss, a build, a settle and a
booking come, a moment after its booking each request is in each counter once. Until then it may be
in none: what was closed and is not booked at the watermark, and whose settle was lost with Redis,
is missing for as long as the shipper takes. And what requests of other gateways hold that has been
lost is back when they renew their leases.

Both take less than GRACE_S: each gateway looks for a loss every WATCH_S, and then renews at once. A
counter is built no sooner than that after a loss, so admitted money exceeds a cap by no more than
what a gateway has that cannot reach Redis or Postgres meanwhile. Without the wait it is at most
what was running and what was not yet shipped at that moment.

A day's bucket of batches is built from the books, too (`DayBuckets`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from billing.events import UsageEvent
from foundation.tasks import SharedTasks
from gateway.ids import uuid7
from gateway.limits.redis.data_loss import EverUsed
from gateway.limits.redis.keys import org_keys
from gateway.limits.redis.pipeline import Pipeline, QueueFull
from gateway.limits.redis.scope_limits import BucketLimit, ScopeLimits, ScopeName
from gateway.limits.redis.scripts import LimiterUnavailable, ScriptFailed, Scripts
from gateway.limits.spending import Counter, counters_of, to_nano
from gateway.principal import DAY_US, PLAN_LIMITS, PlanLimit

log = logging.getLogger(__name__)

SINCE = "tollgate:since"
"""When this Redis began to know anything, by its own clock in microseconds; 0: before anything was
ever used."""
WATCH_S = 0.5
IDLE_WATCH_S = 1.0
"""While no lease of this process is open, of which a Redis that lost its data should hear."""
GRACE_S = 2.0
LOCK_MS = 10_000
POLL_S = 0.05
MAX_ASKED = 3
"""How often it may be emptied between two commands."""
BUILD_TIMEOUT_S = 8.0
"""Beyond it nobody can say what was spent, and nothing is admitted."""
BOOK_BATCH = 100
ORGS_AT_ONCE = 64
"""Orgs of which Redis is asked at once whether they have counters."""
MAX_UNBOOKED = 100_000
"""Events that Redis could not be told of; beyond it the oldest are left out of their counters."""


class SpentUnknown(Exception):
    """Says that nobody can say what was spent, so a hard cap lets nothing pass."""


class BookedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the books have it. Moments are Unix seconds; `ingested_at` and the watermark are
    of one clock."""

    request_id: str
    org: str
    project: str
    key: str
    admitted_at: float
    occurred_at: float
    ingested_at: float
    amount_pico: int


class Books(Protocol):
    """The sums that Postgres knows. All raise OSError where it does not answer."""

    async def spent(self, org_id: str, counters: Sequence[Counter]) -> tuple[float, list[int]]:
        """A watermark (Unix seconds), and of each counter pico-USD."""
        ...

    async def booked(self, event_ids: Sequence[str]) -> Sequence[BookedRequest]:
        """Return those of them that a tenant is billed for."""
        ...

    async def used_by_hour(
        self, org_id: str, scope: ScopeName, owner_id: str, limit: PlanLimit, since: float
    ) -> Sequence[tuple[float, int]]:
        """Return (hour, units) of what `limit` counts, in order; both moments in Unix seconds."""
        ...


class NoBooks:
    """The books where nothing was ever spent."""

    async def spent(self, org_id: str, counters: Sequence[Counter]) -> tuple[float, list[int]]:
        return 0.0, [0] * len(counters)

    async def booked(self, event_ids: Sequence[str]) -> Sequence[BookedRequest]:
        return ()

    async def used_by_hour(
        self, org_id: str, scope: ScopeName, owner_id: str, limit: PlanLimit, since: float
    ) -> Sequence[tuple[float, int]]:
        return ()


class Counters:
    """The counters of spending in Redis; one per limiter. `ever_used`: False where nothing was."""

    def __init__(
        self,
        scripts: Scripts,
        books: Books,
        ever_used: EverUsed,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self._scripts, self._books, self._ever_used = scripts, books, ever_used
        self._grace_s = grace_s
        self._building: SharedTasks[str, None] = SharedTasks("build counters")
        """By org; the counters that are missing are those of whoever came first, others ask
        again."""
        self._unbooked: OrderedDict[str, str] = OrderedDict()
        """Event id -> org."""
        self._since: int | None = None

    async def close(self) -> None:
        await self._building.close()

    # ---- how they begin

    async def build(
        self, org_id: str, counters: Sequence[Counter], renew: Callable[[], Awaitable[int]]
    ) -> None:
        """Build the counters, or wait until somebody has made those that are missing. `renew`: lets
        this gateway's open leases stand in Redis. Raises: SpentUnknown."""
        await self._building.run(org_id, lambda: self._build(org_id, counters, renew))

    async def _build(
        self, org_id: str, counters: Sequence[Counter], renew: Callable[[], Awaitable[int]]
    ) -> None:
        try:
            async with asyncio.timeout(BUILD_TIMEOUT_S):
                keys = [counter.key(org_id) for counter in counters]
                lock, token = f"tollgate:{{{org_id}}}:build", uuid7().hex
                while await self._are_missing(keys):
                    await self._wait_for_others()
                    await renew()
                    if await self._call("SET", lock, token, "NX", "PX", LOCK_MS) is not None:
                        await self._from_books(org_id, counters, keys, lock, token)
                    else:
                        await asyncio.sleep(POLL_S)
        except (LimiterUnavailable, OSError) as error:  # TimeoutError is an OSError
            log.warning("what %s has spent is not known: %r", org_id, error)
            raise SpentUnknown(org_id) from error

    async def _wait_for_others(self) -> None:
        """Wait, after a loss of data, until all have seen it."""
        since_us = await self.since_us()
        if since_us:
            age_s = (await self._now_us() - since_us) / 1_000_000
            await asyncio.sleep(max(0.0, self._grace_s - age_s))

    async def _are_missing(self, keys: Iterable[str]) -> bool:
        found = [await self._call("EXISTS", key) for key in keys]
        return not all(found)

    async def ages_s(self, org_id: str, counters: Sequence[Counter]) -> dict[Counter, float]:
        """Return how long ago each was built that there is. Raises: LimiterUnavailable."""
        now_us, found = await self._now_us(), dict[Counter, float]()
        for each in counters:
            built_us = await self._call("HGET", each.key(org_id), "b")
            if built_us is not None:
                found[each] = (now_us - int(built_us)) / 1_000_000
        return found

    async def build_anew(self, org_id: str, counters: Sequence[Counter]) -> None:
        """Build counters that there are from the books as they are now. Raises:
        LimiterUnavailable, OSError."""
        lock, token = f"tollgate:{{{org_id}}}:build", uuid7().hex
        while await self._call("SET", lock, token, "NX", "PX", LOCK_MS) is None:
            await asyncio.sleep(POLL_S)
        keys = [each.key(org_id) for each in counters]
        await self._from_books(org_id, counters, keys, lock, token, anew=True)

    async def _from_books(
        self,
        org_id: str,
        counters: Sequence[Counter],
        keys: list[str],
        lock: str,
        token: str,
        *,
        anew: bool = False,
    ) -> None:
        watermark, made = 0.0, list[tuple[str, int, int]]()
        try:
            watermark, amounts = await self._books.spent(org_id, counters)
            made += [
                (key, to_nano(amount), counter.kept_until_ms)
                for key, amount, counter in zip(keys, amounts, counters, strict=True)
            ]
        finally:  # the lock goes, whether or not there is anything to build with
            asked = (token, round(watermark * 1_000_000), made, int(anew))
            await self._scripts.call("build", [*org_keys(org_id), lock, index_key(org_id)], asked)
        level = logging.DEBUG if anew else logging.INFO
        log.log(
            level, "counters of %s begin with %s nano-USD", org_id, [nano for _, nano, _ in made]
        )

    # ---- how each request comes into each once

    async def book(self, events: Sequence[UsageEvent]) -> None:
        """Count events that Postgres has. Never raises: what Redis cannot be told now
        it is told by `book_the_rest`."""
        for event in events:
            if event.kind == "usage":
                self._unbooked[event.id] = event.attempt.org
        while len(self._unbooked) > MAX_UNBOOKED:
            dropped, org_id = self._unbooked.popitem(last=False)
            log.error("the event %s of %s may be missing in its counters", dropped, org_id)
        try:
            await self.book_the_rest()
        except (LimiterUnavailable, OSError) as error:
            log.debug("counters hear of %d events later: %r", len(self._unbooked), error)

    async def book_the_rest(self) -> None:
        """Raises: LimiterUnavailable, OSError."""
        by_org: dict[str, list[str]] = {}
        for event_id, org_id in self._unbooked.items():
            by_org.setdefault(org_id, []).append(event_id)
        orgs = iter(by_org)
        while some := list(islice(orgs, ORGS_AT_ONCE)):
            if self._scripts.is_away:
                raise LimiterUnavailable("Redis is away")
            for org_id, known in zip(some, await self._known(some), strict=True):
                if known is None:
                    continue  # it was logged; they wait until its keys are mended, and nobody else
                try:
                    await self._book_all(org_id, by_org[org_id], known)
                except ScriptFailed:
                    continue  # the same
                for event_id in by_org[org_id]:
                    self._unbooked.pop(event_id, None)

    async def _known(self, orgs: Sequence[str]) -> list[set[str] | None]:
        """Return the counters that each org has, which most have none of; None where its keys are
        broken. Raises: LimiterUnavailable."""
        keys = [index_key(org_id) for org_id in orgs]
        try:
            found = await self._scripts.pipeline.call_all([("SMEMBERS", key) for key in keys])
        except (RedisError, OSError, QueueFull) as error:
            raise self._scripts.failed("SMEMBERS", "", error) from error
        known: list[set[str] | None] = []
        for key, answer in zip(keys, found, strict=True):
            if not isinstance(answer, ResponseError):
                known.append({each.decode() for each in answer})
                continue
            failed = self._scripts.failed("SMEMBERS", key, answer)
            if not isinstance(failed, ScriptFailed):
                raise failed
            known.append(None)
        return known

    async def _book_all(self, org_id: str, event_ids: Sequence[str], known: set[str]) -> None:
        """Raises: LimiterUnavailable, OSError."""
        if known:
            for position in range(0, len(event_ids), BOOK_BATCH):
                await self._book(org_id, event_ids[position : position + BOOK_BATCH], known)

    async def _book(self, org_id: str, event_ids: Sequence[str], known: set[str]) -> None:
        asked = []
        for each in await self._books.booked(event_ids):
            counters = counters_of(
                org_id=org_id,
                project_id=each.project,
                key_id=each.key,
                admitted_at=each.admitted_at,
            )
            keys = [key for counter in counters if (key := counter.key(org_id)) in known]
            moments = (round(each.ingested_at * 1_000_000), round(each.occurred_at * 1_000_000))
            if keys:
                asked.append((each.request_id, to_nano(each.amount_pico), *moments, keys))
        if asked:
            await self._scripts.call("book", org_keys(org_id), asked)

    # ---- a loss of data

    async def has_changed(self) -> bool:
        """Tell whether Redis has lost what it knew since this was asked last. Raises:
        LimiterUnavailable."""
        before, self._since = self._since, await self.since_us()
        return before is not None and before != self._since

    async def since_us(self) -> int:
        """Raises: LimiterUnavailable."""
        for _ in range(MAX_ASKED):
            found = await self._call("GET", SINCE)
            if found is not None:
                return int(found)
            await self._call("SET", SINCE, await self._beginning_us(), "NX")
        raise LimiterUnavailable("Redis forgets what it is told")

    async def _beginning_us(self) -> int:
        try:
            if not await self._ever_used():
                return 0
        except Exception as error:  # whatever keeps it from being known, something may have been
            log.warning("whether anything was ever used is not known: %r", error)
        return await self._now_us()

    async def _now_us(self) -> int:
        seconds, microseconds = await self._call("TIME")
        return int(seconds) * 1_000_000 + int(microseconds)

    async def _call(self, *command: str | int) -> Any:
        """Raises: LimiterUnavailable."""
        try:
            return await self._scripts.pipeline.call(command)
        except (RedisError, OSError, QueueFull) as error:
            key = str(command[1]) if len(command) > 1 else ""
            raise self._scripts.failed(str(command[0]), key, error) from error


async def spent_now(redis: Redis, org_id: str, counters: Sequence[Counter]) -> dict[Counter, int]:
    """Return what counters stand at, in nano-USD: what was spent, and what running requests hold.
    One that is not built yet is left out. Raises: redis.exceptions.RedisError."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    for each in counters:
        pipeline.hmget(each.key(org_id), "n", "h")
    (seconds, microseconds), *found = await pipeline.execute()
    now_us = int(seconds) * 1_000_000 + int(microseconds)
    return {
        each: int(nano) - free_nano(slices, now_us)
        for each, (nano, slices) in zip(counters, found, strict=True)
        if nano is not None
    }


def free_nano(slices: bytes | None, now_us: int) -> int:
    """Return what workers hold of a counter for no request yet. `slices`: its `h` in Redis."""
    found: dict[str, dict[str, int]] = msgspec.msgpack.decode(slices) if slices else {}
    return sum(each["f"] for each in found.values() if each["x"] > now_us)


async def begin_anew(redis: Redis, org_id: str) -> None:
    """The books have changed what was spent: its counters are forgotten, and built from them by who
    asks next. Raises: RedisError, OSError."""
    keys = await cast(Awaitable[set[bytes]], redis.smembers(index_key(org_id)))
    if keys:
        await redis.delete(*keys)


def index_key(org_id: str) -> str:
    """The set of its counters."""
    return f"tollgate:{{{org_id}}}:counters"


DAY_LOOK_BACK_S = 2 * 86_400
"""A full bucket lasts for a day; what was in debt before is paid for by then."""
DAY_KEPT_MS = 2 * 86_400_000
HOUR_US = 3_600_000_000


class DayBuckets:
    """Refills a day's buckets from the books after Redis has lost its data.

    A bucket of a minute can begin empty, it is full again soon; one of a day that did would let
    nothing pass for hours, and one that began full would pass its limit twice. So for a day after a
    loss the scripts ask for it (see `fresh` in `ledger.lua`), and whoever is asked replays the
    hours that the books have.

    Each hour's units count as used at its end, so that the bucket is never fuller than it was.
    What was used and is not booked at that moment is left out: as much as ships within a second or
    two.
    """

    def __init__(self, pipeline: Pipeline, books: Books) -> None:
        self._pipeline, self._books = pipeline, books

    async def note(self, org_id: str, scope: ScopeLimits, key: str, letter: str) -> None:
        """Write beside the scope, whose name in Redis is `key`, when this bucket of it is full
        again.

        Raises: LimiterUnavailable.
        """
        (bucket,) = (each for each in scope.buckets if each.letter == letter)
        (limit,) = (each for each in PLAN_LIMITS if each.letter == letter)
        try:
            seconds, microseconds = await self._pipeline.call(("TIME",))
            now_us = int(seconds) * 1_000_000 + int(microseconds)
            since = now_us / 1_000_000 - DAY_LOOK_BACK_S
            used = await self._books.used_by_hour(org_id, scope.scope, scope.owner_id, limit, since)
            full_at = full_at_us(bucket, used, now_us)
            noted = f"{key}:day:{letter}"
            await self._pipeline.call(("SET", noted, full_at, "NX", "PX", DAY_KEPT_MS))
        except (RedisError, OSError, QueueFull) as error:
            raise LimiterUnavailable(f"a day's bucket: {type(error).__name__}") from error


def full_at_us(limit: BucketLimit, used: Iterable[tuple[float, int]], now_us: int) -> int:
    """Return when the bucket is full again: `used` are (hour, units), in order."""
    assert limit.window_us == DAY_US
    full_at = 0
    for hour, units in used:
        at_us = min(now_us, round(hour * 1_000_000) + HOUR_US)
        full_at = max(full_at, at_us) + -(-units * limit.window_us // limit.limit)
    return full_at
