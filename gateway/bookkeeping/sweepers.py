"""Settles in the background what no request waits for: credits, and what superseded requests were
billed.

Each gateway looks; of two that find the same org or event one does the work.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections.superseded_requests import take_back
from billing.credits.lines import SweepCursor, sweep
from foundation.periodic import Flusher
from gateway.db import DATABASE_ERRORS
from gateway.limits.recounts import recounting

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 2.0
SWEEP_TIMEOUT_S = 10.0


class CreditSweeper(Flusher):
    """Settles credits while nobody tops them up: usage is paid, leases that have ended are free
    again, what expired goes back.

    One per process. `db`: of a role that sees every org's rows.
    """

    def __init__(self, db: AsyncEngine, *, interval_s: float = SWEEP_INTERVAL_S) -> None:
        super().__init__("settle credits", interval_s)
        self._db, self._cursor = db, SweepCursor()

    async def flush(self) -> None:
        try:
            async with asyncio.timeout(SWEEP_TIMEOUT_S):
                await sweep(self._db, self._cursor)
        except DATABASE_ERRORS as error:
            log.warning("credits are settled later (%s)", type(error).__name__)


class SupersededSettler(Flusher):
    """Takes back what superseded requests were billed, wherever their usage turns up.

    One per process. `db`: of a role that sees every org's rows.
    """

    def __init__(self, db: AsyncEngine, redis: Redis) -> None:
        super().__init__("take back superseded usage", SWEEP_INTERVAL_S)
        self._db, self._redis = db, redis

    async def flush(self) -> None:
        try:
            async with asyncio.timeout(SWEEP_TIMEOUT_S):
                async with recounting(self._db, self._redis) as announce:
                    await take_back(self._db, announce)
        except (*DATABASE_ERRORS, RedisError) as error:
            log.warning("superseded usage is taken back later (%s)", type(error).__name__)


def start_superseded(stack: AsyncExitStack, db: AsyncEngine, redis: Redis) -> None:
    superseded = SupersededSettler(db, redis)
    superseded.start()
    stack.push_async_callback(superseded.close)
