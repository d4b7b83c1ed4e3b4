"""The shipper books the events of a spool in Postgres.

    shipper = Shipper(spool, db, adopt_from=home / "spool"); shipper.start()
    ...
    await shipper.drain(10.0); await shipper.stop(); await spool.shutdown()

The cursor moves only after Postgres has committed, and an event that ships twice is booked once.
During an outage the shipper backs off and the backlog grows; no event is lost and no close waits.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import SpoolLocked
from billing.events import UsageEvent
from billing.ingestion.ingest import MAX_BATCH, ingest
from billing.ingestion.settle_late import settle_late
from billing.spool.directory import is_free
from billing.spool.spool import Spool
from foundation.periodic import Periodic

log = logging.getLogger(__name__)
JITTER = random.Random()
"""Its own generator, so that a seeded global one is not advanced."""

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
ADOPT_INTERVAL_S = 1.0
"""The spool of a dead process is found so late. A process that restarts with its own directory
waits for an adopter (`billing.spool.spool.LOCK_WAIT_S`)."""
DRAIN_POLL_S = 0.02
GATHER_S = 0.5
"""The pause before a batch that is not full: a batch costs about ten times as much as an event."""


class Alarms(msgspec.Struct):
    """Counts of what a person must look at; each one was logged as an error."""

    conflicts: int = 0
    """Events that came again with other content; kept in usage_conflicts."""
    refused: int = 0
    """Events that Postgres refuses, or that were damaged; kept in the spool's quarantine."""


OnRecovered = Callable[[list[UsageEvent]], None]
OnBooked = Callable[[Sequence[UsageEvent]], Awaitable[None]]


async def notify_nobody(_: Sequence[UsageEvent]) -> None:
    """Do nothing."""


class Shipper:
    """Ships the spool of one process, and the spools of dead processes in `adopt_from`."""

    def __init__(
        self,
        spool: Spool,
        db: AsyncEngine,
        *,
        adopt_from: Path | None = None,
        on_recovered: OnRecovered = lambda events: None,
        on_left: OnRecovered = lambda events: None,
        on_booked: OnBooked = notify_nobody,
    ) -> None:
        """`on_recovered` gets the attempts that an adoption closed at their last checkpoint, once
        and as soon as they are on disk: Postgres may be down for long. `on_left` gets the events
        that a dead process had closed and not shipped; it may not have done what follows a close.
        `on_booked` gets booked events, at least once: if it raises, they come again."""
        self._spool, self._db, self._adopt_from = spool, db, adopt_from
        self._on_recovered, self._on_left = on_recovered, on_left
        self._on_booked = on_booked
        self._num_left = spool.backlog
        """The number of unshipped events of the previous process."""
        self._tasks: list[asyncio.Task[None]] = []
        self._hurried = asyncio.Event()
        self.alarms = Alarms()
        self.failure: Exception | None = None
        """Why the latest batch was not booked; None: it was."""

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._ship_forever(), name="shipper"))
        if self._adopt_from is not None:
            adopter = Periodic(
                "spool adopter",
                lambda: ADOPT_INTERVAL_S,
                partial(self._adopt_all, self._adopt_from),
                log=log,
                failure="no spool is adopted",
            )
            self._tasks.append(asyncio.create_task(adopter.run(), name="spool adopter"))

    async def drain(self, timeout_s: float) -> bool:
        """Wait until everything closed so far is in Postgres; False when time is up."""
        deadline = time.monotonic() + timeout_s
        self._hurried.set()
        try:
            while self._spool.backlog:
                if time.monotonic() >= deadline:
                    return False
                await asyncio.sleep(DRAIN_POLL_S)
            return True
        finally:
            self._hurried.clear()

    async def stop(self) -> None:
        """Stop shipping. Events that have not shipped stay in the spool for the next start, or for
        an adopter."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _ship_forever(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            await self._spool.wait_readable()
            try:
                events = await ship_batch(self._db, self._spool, self.alarms, self._on_booked)
                if self._num_left:
                    self._on_left(events[: self._num_left])
                    self._num_left = max(0, self._num_left - len(events))
                backoff_s, self.failure = FIRST_BACKOFF_S, None
                if self._spool.backlog < MAX_BATCH:
                    await self._gather()
            except Exception as error:
                # The events stay on disk until they are shipped.
                self.failure = error
                log.warning("shipping failed, %d events wait: %r", self._spool.backlog, error)
                await asyncio.sleep(backoff_s * JITTER.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _gather(self) -> None:
        """Wait for more events, unless `drain` waits."""
        try:
            async with asyncio.timeout(GATHER_S):
                await self._hurried.wait()
        except TimeoutError:
            return

    async def _adopt_all(self, parent: Path) -> None:
        left = [lock for lock in sorted(parent.glob("*/lock")) if is_free(lock)]
        if not left:
            return
        try:
            async with self._db.connect() as conn:
                await conn.execute(sa.text("SELECT 1"))
        except Exception as error:
            # Opening a spool adds a segment to it, so none is opened in vain.
            log.warning("adopting waits for Postgres: %r", error)
            return
        callbacks = (self._on_recovered, self._on_booked, self._on_left)
        for lock in left:
            try:
                await adopt(self._db, lock.parent, self.alarms, *callbacks)
            except SpoolLocked:
                continue  # somebody else was faster
            except Exception as error:
                log.warning("adopting %s failed, it is tried again: %r", lock.parent, error)


async def adopt(
    db: AsyncEngine,
    directory: Path,
    alarms: Alarms,
    on_recovered: OnRecovered,
    on_booked: OnBooked = notify_nobody,
    on_left: OnRecovered = lambda events: None,
) -> None:
    """Recover, ship and delete the directory of a dead process.

    Raises: SpoolLocked when the process is alive; what `ingest` raises, and then the directory is
    adopted again. Recovered attempts are closed on disk by then and not found open again, so
    `on_recovered` is called before anything ships.
    """
    spool = await Spool.open(directory, lock_wait_s=0)
    log.info("adopted spool %s with %d events", directory, spool.backlog)
    try:
        if spool.recovered:
            on_recovered(spool.recovered)
        while spool.backlog:
            on_left(await ship_batch(db, spool, alarms, on_booked))
    except BaseException:
        await spool.shutdown()
        raise
    await spool.remove()


async def ship_batch(
    db: AsyncEngine, spool: Spool, alarms: Alarms, on_booked: OnBooked = notify_nobody
) -> list[UsageEvent]:
    """Book the oldest unshipped events, then move the cursor behind them."""
    batch = await spool.read_closed(MAX_BATCH)
    await _book(db, spool, batch.events, alarms)
    await settle_late(db, batch.events)
    await on_booked(batch.events)
    await spool.commit(batch)
    alarms.refused += batch.lost
    return batch.events


async def _book(
    db: AsyncEngine, spool: Spool, events: Sequence[UsageEvent], alarms: Alarms
) -> None:
    """Ingest events. One that Postgres refuses for its content is found by bisection and moved to
    the quarantine, so that it does not block the others."""
    try:
        alarms.conflicts += len((await ingest(db, events)).conflicts)
    except (DBAPIError, ValueError, OverflowError) as error:
        if not is_refusal(error):
            raise
        if len(events) > 1:
            middle = len(events) // 2
            await _book(db, spool, events[:middle], alarms)
            await _book(db, spool, events[middle:], alarms)
        else:
            log.error("Postgres refuses event %s: %r", events[0].id, error)
            alarms.refused += 1
            await spool.quarantine(events[0])


def is_refusal(error: Exception) -> bool:
    """True if an error is about the content, so that a retry is useless: a value that Python or
    asyncpg cannot convert, or SQLSTATE class 22 (data exception) or 23 (integrity violation)."""
    if not isinstance(error, DBAPIError):
        return True
    state: str | None = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return state[:2] in ("22", "23")
    return isinstance(error.orig.__cause__, ValueError) if error.orig else False
