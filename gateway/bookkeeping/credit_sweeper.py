"""Credits are settled while nobody tops them up: usage is paid, leases that have ended are free
again, what expired goes back.

Each gateway looks; of two that find the same org one settles it.
"""

from __future__ import annotations

import asyncio
import logging

from sqlalchemy.ext.asyncio import AsyncEngine

from billing.credits.lines import Turn, sweep
from foundation.periodic import Flusher
from gateway.db import DATABASE_ERRORS

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 2.0
SWEEP_TIMEOUT_S = 10.0


class CreditSweeper(Flusher):
    """One per process. `db`: of a role that sees every org's rows."""

    def __init__(self, db: AsyncEngine, *, interval_s: float = SWEEP_INTERVAL_S) -> None:
        super().__init__("settle credits", interval_s)
        self._db, self._turn = db, Turn()

    async def flush(self) -> None:
        try:
            async with asyncio.timeout(SWEEP_TIMEOUT_S):
                await sweep(self._db, self._turn)
        except DATABASE_ERRORS as error:
            log.warning("credits are settled later (%s)", type(error).__name__)
