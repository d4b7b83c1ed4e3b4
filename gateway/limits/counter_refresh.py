"""Keeps the counters of a cell no older than the books of all cells.

A cell's counter has what the books of all cells had when it was built, k, and what its own requests
spend and hold since. Of what was left of a cap A then, this cell may use its share s, an equal part
(`of_cell` in `ledger.lua`). So what it uses since is at most s (A - k), and where all have the same
k, all of them together use no more than A - k. A counter is built anew before it admits anything
REFRESHED_S after it was built: so a cap is exceeded by no more than what all cells spend in that
time, what runs or is on its way to the books when a counter is built anew, and, of a cell that
cannot reach Postgres, its share of what was left when it could.

The other way round a cell may refuse what another could still admit: what it holds back is there
for others when the next counters are built. After a refusal that may be AFTER_REFUSAL_S later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from foundation.tasks import SharedTasks
from gateway.limits.counters import Counters
from gateway.limits.redis.scripts import LimiterUnavailable
from gateway.limits.spending import Counter
from gateway.lru import Lru

log = logging.getLogger(__name__)

REFRESHED_S = 10.0
AFTER_REFUSAL_S = 2.0
TIMEOUT_S = 1.0
"""After which requests go on by what the counters have."""
MAX_COUNTERS = 65_536

Renew = Callable[[], Awaitable[int]]


class CounterRefresh:
    """Builds counters anew that are too old; one per limiter of a cell. `clock`: monotonic
    seconds."""

    def __init__(self, counters: Counters, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._clock = counters, clock
        self._until: Lru[str, float] = Lru(MAX_COUNTERS)
        """By key until when a counter is not too old."""
        self._refused: set[str] = set()
        """Those that have refused since they were looked at last."""
        self._refreshing: SharedTasks[str, None] = SharedTasks("build counters of a cell anew")

    async def close(self) -> None:
        await self._refreshing.close()

    def are_fresh(self, org_id: str, counters: Sequence[Counter]) -> bool:
        now = self._clock()
        return all((self._until.get(each.key(org_id)) or 0.0) > now for each in counters)

    async def refresh(self, org_id: str, counters: Sequence[Counter], renew: Renew) -> None:
        """Build those anew that are too old. Where Postgres cannot be asked they stay, and what
        they admit is bounded as before."""
        for _ in range(2):  # who came first may have asked for others
            if self.are_fresh(org_id, counters):
                return
            await self._refreshing.run(org_id, lambda: self._refresh(org_id, counters, renew))

    async def _refresh(self, org_id: str, counters: Sequence[Counter], renew: Renew) -> None:
        now, ages = self._clock(), dict[Counter, float]()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                ages = await self._counters.ages_s(org_id, counters)
                old = [each for each, age_s in ages.items() if age_s >= self._most_s(org_id, each)]
                if old:
                    await renew()
                    await self._counters.build_anew(org_id, old)
                    ages.update(dict.fromkeys(old, 0.0))
        except (LimiterUnavailable, OSError) as error:  # TimeoutError is an OSError
            log.warning("what other cells have spent for %s is not known: %r", org_id, error)
            ages = dict.fromkeys(counters, 0.0)
        for each in counters:  # one that there is not is built by who admits
            key = each.key(org_id)
            self._refused.discard(key)
            self._until.put(key, now + REFRESHED_S - ages.get(each, 0.0))

    def _most_s(self, org_id: str, counter: Counter) -> float:
        return AFTER_REFUSAL_S if counter.key(org_id) in self._refused else REFRESHED_S

    def refused(self, org_id: str, counters: Sequence[Counter]) -> None:
        """Let counters be built anew soon: others may have left something."""
        for each in counters:
            key = each.key(org_id)
            until = self._until.get(key)
            if until is not None:
                self._refused.add(key)
                self._until.put(key, min(until, self._clock() + AFTER_REFUSAL_S))
