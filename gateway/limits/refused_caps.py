"""Tracks the hard caps that have refused: noted in memory where the limiter refuses, told to
Postgres a moment later, which raises the alerts.

A hard cap holds the most that a request may cost, so it refuses before all of it is spent, and what
is booked alone would tell nobody. Noting is one look into bounded mappings. What is noted and not
yet written is lost by a kill -9; the next refusal notes it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import CapRefusal, raise_for_refusals
from foundation.periodic import Flusher
from gateway.db import DATABASE_ERRORS
from gateway.limits.spending import PICO_PER_NANO, Cap
from gateway.lru import Lru

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 2.0
FLUSH_TIMEOUT_S = 5.0
MAX_NOTED = 16_384
"""Caps between two flushes; of more, the ones that came last wait for their next refusal."""
FLUSH_BATCH = 1_000
REPEAT_S = 60.0
"""A refusal by the same cap is announced again no sooner: a cap that replaced an archived one of
the same amount looks the same here."""

Key = tuple[str, Cap]
"""Org, and the cap with the period in which it refused."""


class RefusedCaps(Flusher):
    """The hard caps that have refused, as this process noted them; one per process. `db`: of a role
    that sees every org's rows. `clock`: monotonic seconds."""

    def __init__(
        self,
        db: AsyncEngine,
        *,
        interval_s: float = FLUSH_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("refused caps", interval_s)
        self._db = db
        self._clock = clock
        self._noted: dict[Key, None] = {}
        self._told: Lru[Key, float] = Lru(MAX_NOTED)

    def note(self, org_id: str, caps: Sequence[Cap]) -> None:
        for cap in caps:
            key = (org_id, cap)
            told_at = self._told.get(key)
            is_told = told_at is not None and self._clock() - told_at < REPEAT_S
            if not is_told and len(self._noted) < MAX_NOTED:
                self._noted[key] = None

    async def flush(self) -> None:
        waiting = list(self._noted)
        for start in range(0, len(waiting), FLUSH_BATCH):
            batch = waiting[start : start + FLUSH_BATCH]
            try:
                async with asyncio.timeout(FLUSH_TIMEOUT_S):
                    await raise_for_refusals(self._db, [_to_refusal(*key) for key in batch])
            except DATABASE_ERRORS as error:
                log.warning("refusals of caps not written (%s)", type(error).__name__)
                return
            now = self._clock()
            for key in batch:
                self._told.put(key, now)
                del self._noted[key]


def _to_refusal(org_id: str, cap: Cap) -> CapRefusal:
    counter = cap.counter
    return CapRefusal(
        org_id=org_id,
        scope=counter.scope,
        scope_id=counter.owner_id,
        period=counter.period,
        period_start=counter.start,
        amount_pico=cap.amount_nano * PICO_PER_NANO,
    )
