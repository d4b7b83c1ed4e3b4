"""Since when Redis has known what tenants use: a Redis that comes back empty has forgotten it.

Above: `limiter`. Below: redis-py's pipeline. A bucket of which Redis knows nothing is full, unless
the epoch says otherwise: then it was empty at that moment, and refills since. So after a loss of
data every window of a minute lets pass no more than before it; a day's is asked of the books
(`day_buckets`). Without an epoch nothing is admitted; one that is found missing is made by whoever
finds it first. It is 0, and buckets are full, in a new installation; after a quiet minute it is a
minute ago, and those of a minute are full.

Redis that was only away keeps its epoch, and a new organization takes over that of all.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from gateway.limits.pipeline import Pipeline, QueueFull
from gateway.limits.scripts import LimiterUnavailable
from gateway.limits.verdicts import MINUTE_US

OF_ALL = "tollgate:epoch"
QUIET_S = 90.0
"""Who has used nothing for so long has full buckets; with room for what is not in Postgres yet."""
KEPT_MS = 7 * 86_400_000
"""Of one organization's; then it is taken from that of all anew."""

LastUse = Callable[[], Awaitable[float | None]]
"""Unix seconds of the last use that anybody knows of. Raises where nobody can say."""


async def never() -> float | None:
    """Where nothing was ever used."""
    return None


class Epochs:
    """`clock`: Unix seconds."""

    def __init__(
        self, pipeline: Pipeline, last_use: LastUse, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._pipeline, self._last_use, self._clock = pipeline, last_use, clock

    async def begin(self, org_key: str) -> None:
        """Give an organization its epoch, unless Redis is emptied meanwhile. Raises:
        LimiterUnavailable."""
        try:
            epoch_us = await self._pipeline.call(("GET", OF_ALL))
            if epoch_us is None:
                await self._pipeline.call(("SET", OF_ALL, await self._of_all_us(), "NX"))
                epoch_us = await self._pipeline.call(("GET", OF_ALL))
            if epoch_us is not None:
                await self._pipeline.call(("SET", org_key, epoch_us, "NX", "PX", KEPT_MS))
        except (RedisError, OSError, QueueFull) as error:
            raise LimiterUnavailable(f"epoch: {type(error).__name__}") from error

    async def _of_all_us(self) -> int:
        """In the scripts' time, which is Redis' own."""
        seconds, microseconds = await self._pipeline.call(("TIME",))
        now_us = int(seconds) * 1_000_000 + int(microseconds)
        try:
            last = await self._last_use()
        except Exception:  # whatever keeps it from being known, it may have been just now
            return now_us
        if last is None:
            return 0
        return now_us - MINUTE_US if self._clock() - last > QUIET_S else now_us
