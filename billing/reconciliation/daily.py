"""Once a day, on each host, whether all agree (`agreement`): kept as a row, and an error in the log
that begins with the first request that differs.

Any gateway of a host may do it; the row of the day says that one does, and is taken over when its
gateway did not live to end it. A day on which Postgres was away too long has no row.
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
        # Whatever fails: the row says that today nobody has ended it.
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
        """Compare the books. None: somebody has done it today, or does. Raises: as `agree`."""
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
