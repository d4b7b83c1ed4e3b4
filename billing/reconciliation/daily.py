"""Once a day, on each host, whether all agree (`agreement`): kept as a row, and an error in the log
that begins with the first request that differs.

Any gateway of a host may do it; the row of the day says that one does, and is taken over when its
gateway did not live to end it. A day on which Postgres was away too long has no row.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.reconciliation.agreement import Agreement, EngineCount, agree
from foundation.tasks import LogAndContinue

log = logging.getLogger(__name__)
JITTER = random.Random()
"""Of its own: nobody's seed is drawn from."""

LOOK_INTERVAL_S = 600.0
"""Between looks at whether the day was done, and about so long after a start."""
TAKE_OVER_AFTER_S = 2 * 3600
MAX_KEPT_PROBLEMS = 100

_CLAIM = sa.text(f"""
    INSERT INTO reconciliations AS r (host, day, started_at)
    VALUES (:host, CAST(now() AT TIME ZONE 'UTC' AS date), now())
    ON CONFLICT (host, day) DO UPDATE SET started_at = now()
    WHERE r.ended_at IS NULL AND r.started_at < now() - interval '{TAKE_OVER_AFTER_S} seconds'
    RETURNING day
""")
_END = sa.text("""
    UPDATE reconciliations SET ended_at = now(), problems = CAST(:problems AS text[]),
        unknown = CAST(:unknown AS text[]), num_waiting = :num_waiting
    WHERE host = :host AND day = :day
""")


class DailyAgreement:
    """One gateway's part in it."""

    def __init__(
        self,
        db: AsyncEngine,
        spools: Path,
        engines: Callable[[], Sequence[EngineCount]],
        *,
        host: str,
    ) -> None:
        self._db, self._spools, self._engines, self._host = db, spools, engines, host
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_forever(), name="daily agreement")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> Agreement | None:
        """None: somebody has done it today, or does. Raises: as `agree`."""
        async with self._db.begin() as connection:
            day = await connection.scalar(_CLAIM, {"host": self._host})
        if day is None:
            return None
        found = await agree(self._db, self._spools, self._engines)
        kept = {
            "problems": found.problems[:MAX_KEPT_PROBLEMS],
            "unknown": found.unknown[:MAX_KEPT_PROBLEMS],
            "num_waiting": found.num_waiting,
        }
        async with self._db.begin() as connection:
            await connection.execute(_END, {"host": self._host, "day": day, **kept})
        if found.problems:
            count = len(found.problems)
            log.error("the books do not agree (%d problems): %s", count, found.first)
        return found

    async def _look_forever(self) -> None:
        # Whatever it is: the row says that today nobody has ended it.
        unforeseen = LogAndContinue(log, "the books could not be compared")
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S * JITTER.uniform(0.5, 1.5))
            with unforeseen:
                await self.look()
