"""Wakes whoever has work when there is some, so that nobody looks every second whether there is:
one listener in each process, on a Postgres connection of its own.

Where a table holds work, a trigger says so (`migrations/versions/0074_work.py`): NOTIFY with a
topic, in the transaction that makes the work. So it is heard when the work can be seen, whoever
made it, a command or a gateway of another host too. No request that is answered by a model does
that: NOTIFY takes a lock of the whole database at its commit. What each batch of booked usage
makes is known in the process that booked it, which wakes its own.

No wake-up is lost. What was committed before the listener heard is found because all are woken
once it does; what comes later is heard. A notification that is lost all the same, and what becomes
due by the clock alone (a retry, the end of a dead gateway's lease), is found by a look: one
statement that asks of each topic when there is something to do next. Looks come once in LOOK_S,
when something is due, and after one who had work goes to rest. Each is made on the connection that
listens, and so proves that it is alive.

While nobody can be heard, since Postgres is away or a pooler of transactions stands before it,
everybody polls for themselves at the interval that they name to `rest_s`.

A connection for each process, not one for a home: workers would hear of a home's listener by a
socket or shared memory of their own, with its own deaths to be noticed, to save each one idle
connection of the fifteen that it may have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.tasks import LogAndContinue, end_tasks
from gateway.db import DATABASE_ERRORS
from gateway.ids import uuid7_hex

log = logging.getLogger(__name__)

CHANNEL = "tollgate_work"
ERASURES = "erasures"
"""The topic of the triggers on projects and organizations that are to keep nothing any more."""
LOOK_S = 30.0
"""Between two looks of an idle process."""
LOOK_APART_S = 1.0
"""Between any two looks."""
BEHIND_S = 0.02
"""A look for what becomes due comes so much later: the clocks' steps and the way there."""
LONG_S = 300.0
"""A task that rests looks by itself after so long, woken or not."""
LISTEN_TIMEOUT_S = 5.0
HEAR_TIMEOUT_S = 2.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
DEAF_S = 60.0
"""Behind a pooler, through which nothing is heard, it is tried again after so long."""
JITTER = random.Random()
"""A generator of its own: it neither follows nor disturbs a seed of the global one."""

Due = Callable[[], str]
"""Returns SQL: the moment at which there is something to do next, or NULL."""


class _Topic(msgspec.Struct, frozen=True):
    wake: Callable[[], None]
    due: Due | None


class _Deaf(Exception):
    """A notification of this connection does not come back to it."""


class WorkListener:
    """The listener of one process. `db`: a pool for it alone, of a role that sees every org's
    rows."""

    def __init__(
        self, db: AsyncEngine, *, look_s: float = LOOK_S, apart_s: float = LOOK_APART_S
    ) -> None:
        self._db, self._look_s, self._apart_s = db, look_s, apart_s
        self._topics: dict[str, list[_Topic]] = {}
        self._is_hearing = False
        self._answered_at = -math.inf
        self._asked = asyncio.Event()
        """A look is wanted, or the connection is lost."""
        self._own_word = ""
        self._has_heard_itself = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_hearing(self) -> bool:
        """True if whatever is committed is heard of, as far as this process knows."""
        return self._is_hearing

    @property
    def silent_s(self) -> float:
        """Return how long ago Postgres has last answered here."""
        return asyncio.get_running_loop().time() - self._answered_at

    def watch(self, topic: str, wake: Callable[[], None], due: str | Due | None = None) -> None:
        """Call `wake` when there is something to do: when it is notified of, when it becomes due,
        and whenever something may have been missed. `due`: SQL, see `Due`."""
        asked = due if due is None or callable(due) else lambda: due
        self._topics.setdefault(topic, []).append(_Topic(wake, asked))

    def rest_s(self, poll_s: float) -> float:
        """Return how long who has nothing to do may rest unless it is woken: `poll_s` while nothing
        is heard. What it left for later is asked for soon."""
        if not self._is_hearing:
            return poll_s
        self._asked.set()
        return LONG_S

    def start(self) -> None:
        """Start to listen. Without Postgres it starts too, and goes on trying."""
        self._task = asyncio.create_task(self._run(), name="listen for work")

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None
        self._is_hearing = False

    async def _run(self) -> None:
        log_and_continue = LogAndContinue(log, "nobody listens for work")
        backoff_s = FIRST_BACKOFF_S
        while True:
            with log_and_continue:
                try:
                    async with self._listening() as connection:
                        backoff_s = FIRST_BACKOFF_S
                        self._hear(True)
                        while not connection.is_closed():
                            self._asked.clear()  # before the look, which is to see what was left
                            await self._wait(await self._look(connection))
                    log.warning("work is looked for by polling: the listening connection is lost")
                except _Deaf:
                    log.warning("work is looked for by polling: nothing is heard from Postgres")
                    backoff_s = DEAF_S
                except DATABASE_ERRORS as error:
                    name = type(error).__name__
                    log.warning("work is looked for by polling: nobody listens (%s)", name)
                finally:
                    self._hear(False)
            await asyncio.sleep(backoff_s * JITTER.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _hear(self, is_hearing: bool) -> None:
        if self._is_hearing == is_hearing:
            return
        self._is_hearing = is_hearing
        if not is_hearing:
            self._answered_at = -math.inf
        for topic in self._topics:
            self.wake(topic)

    def wake(self, topic: str) -> None:
        """Wake those of this process who watch a topic: what they have to do was made here, and
        nobody else is told."""
        for each in self._topics.get(topic, ()):
            each.wake()

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        """Raises: DATABASE_ERRORS, _Deaf."""
        async with asyncio.timeout(LISTEN_TIMEOUT_S):
            connection = await self._db.connect()
        try:
            async with asyncio.timeout(LISTEN_TIMEOUT_S):
                driver = (await connection.get_raw_connection()).driver_connection
                assert driver is not None
                driver.add_termination_listener(lambda _: self._asked.set())
                await driver.add_listener(CHANNEL, self._heard)
                await self._hear_itself(driver)
            yield driver
        finally:
            # Closed, so that the next one is new: this one may be half dead.
            await connection.invalidate()
            await connection.close()

    async def _hear_itself(self, driver: asyncpg.Connection[Any]) -> None:
        """Wait for a notification of its own: a pooler of transactions takes LISTEN and delivers
        nothing. Raises: _Deaf."""
        self._has_heard_itself.clear()
        self._own_word = uuid7_hex()
        await driver.execute("SELECT pg_notify($1, $2)", CHANNEL, self._own_word)
        try:
            async with asyncio.timeout(HEAR_TIMEOUT_S):
                await self._has_heard_itself.wait()
        except TimeoutError:
            raise _Deaf from None

    def _heard(self, _connection: Any, _pid: int, _channel: str, topic: Any) -> None:
        if topic in self._topics:
            self.wake(topic)
        elif topic == self._own_word:
            self._has_heard_itself.set()

    async def _look(self, connection: asyncpg.Connection[Any]) -> float:
        """Wake who has something to do now; return the seconds to the next look. Raises:
        DATABASE_ERRORS."""
        next_s = self._look_s * JITTER.uniform(0.8, 1.2)
        asked = [
            (name, each.due())
            for name, topics in self._topics.items()
            for each in topics
            if each.due is not None
        ]
        moments = ", ".join(f"extract(epoch FROM ({due}) - now())::float8" for _, due in asked)
        found = await connection.fetchrow(f"SELECT {moments or '1'}")
        self._answered_at = asyncio.get_running_loop().time()
        if not asked or found is None:
            return next_s
        for (name, _), due_in_s in zip(asked, found, strict=True):
            if due_in_s is None:
                continue
            if due_in_s <= 0:
                self.wake(name)
            else:
                next_s = min(next_s, due_in_s + BEHIND_S)
        return next_s

    async def _wait(self, next_s: float) -> None:
        """Wait until the next look, or until somebody asks for one."""
        looked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(next_s):
                await self._asked.wait()
        except TimeoutError:
            pass
        left_s = looked_at + self._apart_s - asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, left_s))
