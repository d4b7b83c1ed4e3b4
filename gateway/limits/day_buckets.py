"""Refills a day's bucket of batches after Redis has lost its data: with what the books say was
used.

A bucket of a minute can begin empty, it is full again soon; one of a day that did would let nothing
pass for hours, and one that began full would pass its limit twice. So for a day after a loss the
scripts ask for it (see `fresh` in `ledger.lua`), and whoever is asked replays the hours that the
books have.

Each hour's tokens count as used at its end, so that the bucket is never fuller than it was. What
was used and is not booked at that moment is left out: as much as ships within a second or two.
"""

from __future__ import annotations

from collections.abc import Iterable

from redis.exceptions import RedisError

from gateway.limits.counters import Books
from gateway.limits.outcomes import DAY_US
from gateway.limits.redis.pipeline import Pipeline, QueueFull
from gateway.limits.redis.scope_limits import BucketLimit, ScopeLimits
from gateway.limits.redis.scripts import LimiterUnavailable

LOOK_BACK_S = 2 * 86_400
"""A full bucket lasts for a day; what was in debt before is paid for by then."""
KEPT_MS = 2 * 86_400_000
HOUR_US = 3_600_000_000


class DayBuckets:
    def __init__(self, pipeline: Pipeline, books: Books) -> None:
        self._pipeline, self._books = pipeline, books

    async def note(self, org_id: str, scope: ScopeLimits, key: str) -> None:
        """Note the use beside the scope, whose name in Redis is `key`. Raises:
        LimiterUnavailable."""
        (limit,) = (each for each in scope.buckets if each.kind == "d")
        try:
            seconds, microseconds = await self._pipeline.call(("TIME",))
            now_us = int(seconds) * 1_000_000 + int(microseconds)
            since = now_us / 1_000_000 - LOOK_BACK_S
            used = await self._books.batch_tokens(org_id, scope.scope, scope.owner_id, since)
            full_at = full_at_us(limit, used, now_us)
            await self._pipeline.call(("SET", f"{key}:day", full_at, "NX", "PX", KEPT_MS))
        except (RedisError, OSError, QueueFull) as error:
            raise LimiterUnavailable(f"a day's bucket: {type(error).__name__}") from error


def full_at_us(limit: BucketLimit, used: Iterable[tuple[float, int]], now_us: int) -> int:
    """Return when the bucket is full again: `used` are (hour, tokens), in order."""
    assert limit.window_us == DAY_US
    full_at = 0
    for hour, tokens in used:
        at_us = min(now_us, round(hour * 1_000_000) + HOUR_US)
        full_at = max(full_at, at_us) + -(-tokens * limit.window_us // limit.limit)
    return full_at
