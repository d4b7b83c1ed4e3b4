"""Takes back what superseded requests were billed, wherever their usage turns up.

Each gateway looks; of two that find the same event one takes it back.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections.superseded_requests import take_back
from foundation.periodic import Flusher
from gateway.db import DATABASE_ERRORS
from gateway.limits.recounts import recounting

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 2.0
SWEEP_TIMEOUT_S = 10.0


class SupersededSettler(Flusher):
    """Takes back what superseded requests were billed; one per process. `db`: of a role that sees
    every org's rows."""

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
