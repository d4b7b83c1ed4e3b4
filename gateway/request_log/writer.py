"""Writes the rows of answered requests to Postgres, a batch a second, behind everybody's back.

A request knows nothing of it. The thread of the access log makes a row and leaves it here; a task
writes what waits, in one statement a batch. Postgres that is away costs rows, never a request and
no memory: a bounded number waits for it, and what comes beyond that is dropped and counted in
`tollgate_request_rows_dropped`. What waits in a process that is killed is lost.

A request costs 13 microseconds of its worker's CPU here: 8 to make the row, 2 to encode it, 3 for
its part of a full batch (nine where a batch has a hundred), and Postgres 40. It awaits nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Sized
from datetime import UTC, date, datetime, timedelta
from typing import ClassVar, Generic, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.periodic import Flusher
from gateway.db import DATABASE_ERRORS
from gateway.request_log import rows
from gateway.request_log.rows import RequestRow

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
FLUSH_TIMEOUT_S = 10.0
MAX_BATCH = 1000
"""Rows a statement."""
MAX_BATCH_BYTES = 4 * 1024 * 1024
"""A statement has one row more than that holds."""
MAX_WAITING = 20_000
"""Rows of some 500 bytes, beside a batch that is on its way."""
TIDY_INTERVAL_S = 3600.0
TIDY_AFTER_S = 60.0
"""After the start: a worker that is replaced at once need not."""
NO_PARTITION = "23514"
"""Postgres: check_violation, which an insert says too whose partition is gone."""
REFUSED = ("22", "23")
"""Classes of errors for content that no table takes: to send it again changes nothing."""
DAY_MS = 86_400_000
EPOCH = date(1970, 1, 1)

R = TypeVar("R", bound=Sized)


class DailyLog(Flusher, Generic[R]):
    """The rows of one worker that are on their way to a table with a partition for each day. A
    row's length is its size in bytes. `db`: of a role that sees every org's rows. `keep_days`: how
    many days before today rows are kept. `on_dropped`: hears how many were lost. `wall_clock`: Unix
    seconds."""

    noted: ClassVar[str]
    """Names its rows in the plural, for its log."""
    tidy_interval_s: ClassVar[float] = TIDY_INTERVAL_S

    def __init__(
        self,
        db: AsyncEngine,
        *,
        keep_days: int,
        on_dropped: Callable[[int], object],
        interval_s: float = FLUSH_INTERVAL_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(f"log of {self.noted}", interval_s)
        self._db, self._keep_days = db, keep_days
        self._on_dropped, self._wall_clock = on_dropped, wall_clock
        self._waiting: deque[tuple[int, R]] = deque()
        """The number of each row's day, and the row."""
        self._num_refused = 0  # counted by who puts, told by who writes
        self._num_told = 0
        self._days: set[int] = set()
        """Those whose partitions are there."""
        self._tidy_at = wall_clock() + TIDY_AFTER_S

    @abstractmethod
    async def _insert(self, conn: AsyncConnection, batch: Sequence[R]) -> None:
        """Insert rows whose days have partitions; what comes again changes nothing."""

    @abstractmethod
    async def _keep_day(self, conn: AsyncConnection, day: date) -> None:
        """Make the partition of a day, unless it is there."""

    @abstractmethod
    async def _drop_days(self, conn: AsyncConnection, *, keep: int, today: date) -> int:
        """Drop the partitions of all days but today and the `keep` before it."""

    @abstractmethod
    async def _forget(self) -> None:
        """Delete what else is not to be kept any longer."""

    def _put(self, day: int, row: R) -> None:
        """Leave a row to be written; called by one thread, which may be another one."""
        if self._has_room(row):
            self._waiting.append((day, row))
        else:
            self._refuse()

    def _has_room(self, row: R) -> bool:
        return len(self._waiting) < MAX_WAITING

    def _refuse(self) -> None:
        """Count a row that is lost; called by who puts."""
        self._num_refused += 1

    async def flush(self) -> None:
        num_refused = self._num_refused
        if num_refused > self._num_told:
            self._on_dropped(num_refused - self._num_told)
            self._num_told = num_refused
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                left = len(self._waiting)  # not those that come meanwhile
                while left > 0:
                    left -= await self._write_batch()
                await self._tidy()
        except DATABASE_ERRORS as error:
            log.warning("%d %s wait to be noted: %r", len(self._waiting), self.noted, error)

    async def close(self) -> None:
        await super().close()
        if self._waiting:
            self._on_dropped(len(self._waiting))

    async def _write_batch(self) -> int:
        """Write what has waited longest, and return how many rows; what Postgres does not take now
        goes on waiting."""
        batch = self._take()
        try:
            await self._write(batch)
        except DBAPIError as error:
            state = str(getattr(error.orig, "sqlstate", ""))
            if state == NO_PARTITION:
                self._days.clear()
            elif state[:2] in REFUSED:
                log.error("%d %s are not noted: %s", len(batch), self.noted, state)
                self._on_dropped(len(batch))
                return len(batch)
            self._take_back(batch)
            raise
        except BaseException:
            self._take_back(batch)
            raise
        return len(batch)

    def _take(self) -> list[tuple[int, R]]:
        batch: list[tuple[int, R]] = []
        num_bytes = 0
        while self._waiting and len(batch) < MAX_BATCH and num_bytes < MAX_BATCH_BYTES:
            batch.append(self._waiting.popleft())
            num_bytes += len(batch[-1][1])
        return batch

    def _take_back(self, batch: Sequence[tuple[int, R]]) -> None:
        self._waiting.extendleft(reversed(batch))

    async def _write(self, batch: Sequence[tuple[int, R]]) -> None:
        if self._keep_days > 0 and (new := {day for day, _ in batch} - self._days):
            await self._keep_days_of(new)
        async with self._db.begin() as conn:
            await self._insert(conn, [row for _, row in batch])

    async def _keep_days_of(self, days: set[int]) -> None:
        for day in sorted(days):
            async with self._db.begin() as conn:  # others wait for its lock: not for two
                await self._keep_day(conn, EPOCH + timedelta(days=day))
            self._days.add(day)

    async def _tidy(self) -> None:
        """Make the partition of tomorrow before its first row comes, and drop what is old."""
        if self._wall_clock() < self._tidy_at:
            return
        today = datetime.fromtimestamp(self._wall_clock(), UTC).date()
        if self._keep_days > 0:
            number = (today - EPOCH).days
            await self._keep_days_of({number, number + 1} - self._days)
        async with self._db.begin() as conn:
            await self._drop_days(conn, keep=self._keep_days or -1, today=today)
        await self._forget()
        self._tidy_at = self._wall_clock() + self.tidy_interval_s


class RequestLog(DailyLog[bytes]):
    """The rows of requests. Where no days are kept, they are in sums alone."""

    noted = "requests"

    def put(self, row: RequestRow) -> None:
        """Leave a row to be written; called by one thread, which may be another one."""
        if self._has_room(b""):
            self._put(day_of(row), rows.encode(row))
        else:
            self._refuse()

    async def keep_days_of(self, made: Iterable[RequestRow]) -> None:
        """Make the partitions that rows belong in, unless they are there. Raises nothing: where
        that fails the rows will be dropped."""
        if self._keep_days > 0 and (new := {day_of(row) for row in made} - self._days):
            try:
                await self._keep_days_of(new)
            except DATABASE_ERRORS as error:
                log.warning("the days of %d requests cannot be made: %r", len(new), error)

    async def write_within(self, conn: AsyncConnection, made: Sequence[RequestRow]) -> None:
        """Write rows in a transaction that is open, whose days `keep_days_of` has seen to: they are
        there if and only if the rest of it is. Those that Postgres does not take are dropped, and
        the rest goes on."""
        try:
            async with conn.begin_nested():
                keeps = self._keep_days > 0
                await rows.write(conn, [rows.encode(row) for row in made], keeps=keeps)
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            self._days.clear()  # one of them may be gone
            log.error("%d requests are not noted: %r", len(made), error)
            self._on_dropped(len(made))

    async def _insert(self, conn: AsyncConnection, batch: Sequence[bytes]) -> None:
        await rows.write(conn, batch, keeps=self._keep_days > 0)

    async def _keep_day(self, conn: AsyncConnection, day: date) -> None:
        await rows.keep_day(conn, day)

    async def _drop_days(self, conn: AsyncConnection, *, keep: int, today: date) -> int:
        return await rows.drop_days(conn, keep=keep, today=today)

    async def _forget(self) -> None:
        async with self._db.begin() as conn:
            await rows.forget_hours(conn)


def day_of(row: RequestRow) -> int:
    """Return the number of a row's day, since 1970."""
    return row.at_ms // DAY_MS
