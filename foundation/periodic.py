"""Work that is repeated at an interval for as long as its process runs."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from foundation.request_context import outside_requests
from foundation.tasks import LogAndContinue, end_tasks

BEAT_S = 1.0
OFFSET_S = random.Random().random() * BEAT_S
"""Keeps processes of one machine, which have one clock, from waking up all at once."""
SLACK_S = 0.05
"""A timer may fire a little early; who asks then means the beat after this one."""


class Periodic:
    """Repeats `work` in a task of its own, whatever happens in one round.

    `interval_s`: seconds between the end of a round and the begin of the next, or a function that
    returns them (for jitter, or a shorter wait after a failure). `failure`: what did not happen
    when a round fails, for the log. `expected`: exceptions that are logged as one warning; any
    other is logged with its traceback (`LogAndContinue`), and the next round comes all the same.
    `at_once`: the first round begins when the task starts, else after one interval. `timeout_s`:
    after which a round is cancelled, and counted as failed; None: never. `apart_s`: the least time
    from the end of a round to the next, however often it is woken meanwhile.

    All that waits for a second or longer in one process wakes up at the same moments, a second
    apart and never later than it asked for: an idle process wakes once for all of it.
    """

    def __init__(
        self,
        name: str,
        interval_s: float | Callable[[], float],
        work: Callable[[], Awaitable[object]],
        *,
        log: logging.Logger,
        failure: str,
        expected: tuple[type[Exception], ...] = (),
        at_once: bool = True,
        timeout_s: float | None = None,
        apart_s: float = 0.0,
    ) -> None:
        self._name, self._interval_s, self._work = name, interval_s, work
        self._log, self._failure, self._expected = log, failure, expected
        self._at_once, self._timeout_s, self._apart_s = at_once, timeout_s, apart_s
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Start the task. Some are started by a request that comes by and are none of its work."""
        context = outside_requests()
        self._task = asyncio.create_task(self.run(), name=self._name, context=context)

    async def close(self) -> None:
        """End the task, in the middle of a round if need be."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None

    def wake(self) -> None:
        """Let the next round begin now instead of at the end of the interval."""
        self._woken.set()

    async def run(self) -> None:
        """Repeat the work until cancelled, in the caller's own task."""
        log_and_continue = LogAndContinue(self._log, self._failure)
        if not self._at_once:
            await self._wait()
        while True:
            self._woken.clear()
            with log_and_continue:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._work()
                except self._expected as error:
                    self._log.warning("%s (%s)", self._failure, type(error).__name__)
            await self._wait()

    async def _wait(self) -> None:
        interval_s = self._interval_s() if callable(self._interval_s) else self._interval_s
        ended_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(next_beat(ended_at, interval_s)):
                await self._woken.wait()
                if self._apart_s:
                    await asyncio.sleep(
                        ended_at + self._apart_s - asyncio.get_running_loop().time()
                    )
        except TimeoutError:
            return


def next_beat(now: float, interval_s: float) -> float:
    """Return when to wake up that comes `interval_s` after `now`, on this process' beat if it is a
    second or longer."""
    at = now + interval_s
    if interval_s < BEAT_S:
        return at
    return math.floor((at - OFFSET_S + SLACK_S) / BEAT_S) * BEAT_S + OFFSET_S


class Flusher(ABC):
    """Keeps what was noted in memory and writes it every `interval_s`, in a task of its own.
    `interval_s`, `apart_s`: as of `Periodic`."""

    def __init__(
        self, name: str, interval_s: float | Callable[[], float], *, apart_s: float = 0.0
    ) -> None:
        self._periodic = Periodic(
            name,
            interval_s,
            self.flush,
            log=logging.getLogger(type(self).__module__),
            failure=f"{name}: not done",
            at_once=False,
            apart_s=apart_s,
        )

    def wake(self) -> None:
        """Let it be written now instead of at the end of the interval."""
        self._periodic.wake()

    def start(self) -> None:
        self._periodic.start()

    async def close(self) -> None:
        """Stop, and write what is left if Postgres takes it in time."""
        await self.stop()
        await self.flush()

    async def stop(self) -> None:
        """Stop without writing what is left."""
        await self._periodic.close()

    @abstractmethod
    async def flush(self) -> None:
        """Write what was noted, never raising what Postgres raises; what fails stays for later."""
