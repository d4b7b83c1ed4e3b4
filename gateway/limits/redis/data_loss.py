"""Tells since when Redis has known what tenants use: a Redis that comes back empty has forgotten
it.

A bucket of which Redis knows nothing is full, unless the epoch says otherwise: then it was empty at
that moment, and refills since. Without an epoch nothing is admitted; one that is found missing is
made by whoever finds it first. It is the moment at which it is made, of Redis' own clock: whatever
was admitted before was there to empty a bucket. Only in a new installation, where nobody has ever
used anything, it is 0 and buckets are full. Every gateway looks from its start on (`watch`): those
whom no plan limits ask for no epoch, and their use would make the first plan's buckets empty.

So after a loss a tenant waits for at most what a burst takes to refill (ten seconds: B = r * 10 s),
also after a quiet hour: whether that hour was quiet nobody can say, for a stream that writes on has
booked nothing yet, and what other gateways have booked may lie in their spools. A day's bucket is
asked of the books (`DayBuckets`).

What passes in 60 seconds with a loss in them. Until the loss it is B, what was refilled, and the
debt D that stood at the loss; from then on what is refilled, and what may become debt at any time.
Only D is forgotten: the bound is exceeded by as much, once. D is at most B and MAX_AHEAD_TOKENS for
each stream, or a request that is larger than B; of an upstream's streams what they may write beyond
their reservations. Streams that were open keep their reservations, which were taken before; one
that asks for a step before it is known again (`Limiter.renew`, within WATCH_S) writes on without,
and that is taken when it is settled.

One gateway alone decides, without a lock: SET NX is one write, of a moment at which nothing had
been admitted since the loss, and whoever comes second takes the first one's. Nothing is to be
rebuilt before it, since an empty bucket is the least that any rebuilding could find (but for D).

Redis that was only away keeps its epoch, and a new organization takes over that of all.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from gateway.limits.redis.pipeline import Pipeline, QueueFull
from gateway.limits.redis.scripts import LimiterUnavailable

log = logging.getLogger(__name__)

OF_ALL = "tollgate:epoch"
KEPT_MS = 7 * 86_400_000
"""How long an organization's mark is kept; then it is copied from the global mark again."""
MAX_EMPTIED = 3
"""How often Redis may be emptied while an organization is given its epoch."""

EverUsed = Callable[[], Awaitable[bool]]
"""Whether anybody ever used anything. Raises where nobody can say."""


async def never() -> bool:
    """Return False: nothing was ever used."""
    return False


class DataLossDetector:
    """Finds out that Redis has lost its data. `ever_used`: False in a new installation alone. Where
    it has several gateways, and one of them asks before any of the others' first requests has
    ended, it is a burst too many."""

    def __init__(self, pipeline: Pipeline, ever_used: EverUsed) -> None:
        self._pipeline, self._ever_used = pipeline, ever_used

    async def watch(self) -> None:
        """Make the epoch of all where Redis knows of none. Raises: LimiterUnavailable."""
        try:
            await self._of_all_us()
        except (RedisError, OSError, QueueFull) as error:
            raise LimiterUnavailable(f"epoch: {type(error).__name__}") from error

    async def begin(self, org_key: str) -> None:
        """Give an organization its epoch. Raises: LimiterUnavailable."""
        try:
            for _ in range(MAX_EMPTIED):
                epoch_us = await self._of_all_us()
                await self._pipeline.call(("SET", org_key, epoch_us, "NX", "PX", KEPT_MS))
                if await self._pipeline.call(("GET", OF_ALL)) == epoch_us:
                    return
                # Redis was emptied after that of all was read: it says too much.
                await self._pipeline.call(("DEL", org_key))
        except (RedisError, OSError, QueueFull) as error:
            raise LimiterUnavailable(f"epoch: {type(error).__name__}") from error
        raise LimiterUnavailable("epoch: Redis forgets what it is told")

    async def _of_all_us(self) -> bytes:
        """Raises: LimiterUnavailable."""
        for _ in range(MAX_EMPTIED):
            epoch_us: bytes | None = await self._pipeline.call(("GET", OF_ALL))
            if epoch_us is not None:
                return epoch_us
            await self._pipeline.call(("SET", OF_ALL, await self._beginning_us(), "NX"))
        raise LimiterUnavailable("epoch: Redis forgets what it is told")

    async def _beginning_us(self) -> int:
        """Return when an epoch begins that is made now, in the scripts' time, which is Redis'
        own."""
        try:
            if not await self._ever_used():
                return 0
        except Exception as error:  # whatever keeps it from being known, something may have been
            log.warning("whether anything was ever used is not known: %r", error)
        seconds, microseconds = await self._pipeline.call(("TIME",))
        return int(seconds) * 1_000_000 + int(microseconds)
