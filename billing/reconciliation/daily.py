"""Reconcile once a day on each host (`agreement`), store the result as a row, and log an error with
the first request that differs.

Any gateway of a host may do it: the row of the day is its claim, which another gateway takes over
if it dies. A day on which Postgres was away for too long has no row.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.reconciliation.agreement import Agreement, EngineCount, agree
from foundation.periodic import Periodic

log = logging.getLogger(__name__)
JITTER = random.Random()
"""Its own generator, so that a seeded global one is not advanced."""

LOOK_INTERVAL_S = 600.0
"""A gateway checks so often whether the day is done, and first so long after its start."""
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
    """A gateway's share of the daily comparison."""

    def __init__(
        self,
        db: AsyncEngine,
        spools: Path,
        engines: Callable[[], Sequence[EngineCount]],
        *,
        host: str,
    ) -> None:
        self._db, self._spools, self._engines, self._host = db, spools, engines, host
        # After a failure the row of the day has no end, so another gateway takes over.
        self._looking = Periodic(
            "daily agreement",
            lambda: LOOK_INTERVAL_S * JITTER.uniform(0.5, 1.5),
            lambda: self.look(),
            log=log,
            failure="the books could not be compared",
            at_once=False,
        )

    def start(self) -> None:
        self._looking.start()

    async def stop(self) -> None:
        await self._looking.close()

    async def look(self) -> Agreement | None:
        """Reconcile, and return the result. None: today's reconciliation is done or running.

        Raises: as `agree`.
        """
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
