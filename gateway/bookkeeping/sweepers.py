"""Settles in the background what no request waits for: credits, and what superseded requests were
billed.

Each gateway looks; of two that find the same org or event one does the work.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections import superseded_requests
from billing.corrections.superseded_requests import take_back
from billing.credits import lines
from billing.credits.lines import SweepCursor, sweep
from billing.events import UsageEvent
from foundation.periodic import BEAT_S, Flusher
from gateway.db import DATABASE_ERRORS
from gateway.limits.recounts import recount, recounting
from gateway.worker.resources import Resources
from gateway.worker.work_listener import WorkListener

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 2.0
SWEEP_TIMEOUT_S = 10.0
BOOKED = "usage booked"
"""The topic of what this process books: nobody is notified of each batch of usage."""
Rest = Callable[[float], float]
"""Returns how long to rest where nothing was found, given how long otherwise."""


def no_longer(interval_s: float) -> float:
    """Return the interval itself: nobody wakes who rests."""
    return interval_s


class CreditSweeper(Flusher):
    """Settles credits while nobody tops them up: usage is paid, leases that have ended are free
    again, what expired goes back.

    One per process. `db`: of a role that sees every org's rows.
    """

    def __init__(
        self, db: AsyncEngine, *, interval_s: float = SWEEP_INTERVAL_S, rest_s: Rest = no_longer
    ) -> None:
        super().__init__(
            "settle credits",
            lambda: interval_s if self._has_found else rest_s(interval_s),
            apart_s=interval_s,
        )
        self._db, self._cursor = db, SweepCursor()
        self._has_found = False

    async def flush(self) -> None:
        try:
            async with asyncio.timeout(SWEEP_TIMEOUT_S):
                self._has_found = bool(await sweep(self._db, self._cursor))
        except DATABASE_ERRORS as error:
            log.warning("credits are settled later (%s)", type(error).__name__)


class SupersededSettler(Flusher):
    """Takes back what superseded requests were billed, wherever their usage turns up, and recounts
    for who died before it had.

    One per process. `db`: of a role that sees every org's rows.
    """

    def __init__(self, db: AsyncEngine, redis: Redis, *, rest_s: Rest = no_longer) -> None:
        super().__init__("take back superseded usage", SWEEP_INTERVAL_S, apart_s=SWEEP_INTERVAL_S)
        self._db, self._redis, self._rest_s = db, redis, rest_s
        self._look_at = -math.inf

    def wake(self) -> None:
        self._look_at = -math.inf
        super().wake()

    async def flush(self) -> None:
        try:
            async with asyncio.timeout(SWEEP_TIMEOUT_S):
                if time.monotonic() < self._look_at:
                    await recount(self._db, self._redis)
                    return
                self._look_at = math.inf  # unless somebody wakes it meanwhile, or this fails
                async with recounting(self._db, self._redis) as announce:
                    await take_back(self._db, announce)
                rest_s = self._rest_s(SWEEP_INTERVAL_S)
                self._look_at = min(self._look_at, time.monotonic() + rest_s - BEAT_S / 2)
        except (*DATABASE_ERRORS, RedisError) as error:
            self._look_at = -math.inf
            log.warning("superseded usage is taken back later (%s)", type(error).__name__)


def start_superseded(resources: Resources) -> None:
    listener = resources.listener
    settler = SupersededSettler(resources.system_db, resources.redis, rest_s=listener.rest_s)
    listener.watch("superseded", settler.wake, superseded_requests.NEXT_DUE)
    listener.watch(BOOKED, settler.wake)
    settler.start()
    resources.stack.push_async_callback(settler.close)


def start_credits(resources: Resources) -> None:
    listener = resources.listener
    sweeper = CreditSweeper(resources.system_db, rest_s=listener.rest_s)
    listener.watch("credits", sweeper.wake, lines.NEXT_DUE)
    listener.watch(BOOKED, sweeper.wake)
    sweeper.start()
    resources.stack.push_async_callback(sweeper.close)


async def tell_of_booked(listener: WorkListener, _: Sequence[UsageEvent]) -> None:
    """Wake who settles what follows from usage, in this process, which booked it."""
    listener.wake(BOOKED)
