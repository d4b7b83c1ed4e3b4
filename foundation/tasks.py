"""Tasks that a process owns: kept referenced, their failures logged, ended when it stops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Hashable
from types import TracebackType
from typing import Any, Generic, TypeVar

from foundation.request_context import outside_requests

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

log = logging.getLogger(__name__)

LOG_AGAIN_S = 60.0
"""The least time between two tracebacks of one loop."""
CANCEL_AGAIN_S = 1.0
"""How long a task may take to end before it is cancelled once more: longer than any cleanup."""


async def end_tasks(*tasks: asyncio.Task[Any], again_s: float | None = None) -> None:
    """Cancel tasks until they have ended; what they raise is dropped.

    again_s: the seconds after which what still runs is cancelled again; None: CANCEL_AGAIN_S. Once
    is not enough: up to Python 3.11 `asyncio.wait_for`, with which redis-py sends, loses a
    cancellation that comes as its work is done
    (https://github.com/python/cpython/issues/86296), and a loop around it goes on.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s or CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()


class TaskSet:
    """Holds tasks until they end, logs those that fail, and ends them all on `close`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task %s failed", task.get_name(), exc_info=error)

    async def wait(self) -> None:
        """Wait for all tasks, without cancelling any."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        await end_tasks(*self._tasks)


class SharedTasks(Generic[K, T]):
    """Runs at most one task for each key; whoever asks for a key meanwhile waits for that task.

    A caller that is cancelled, or leaves, does not end what others wait for. A task is nobody's
    alone: it logs for no request.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: dict[K, asyncio.Task[T]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: K) -> bool:
        return key in self._tasks

    def start(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Return the running task of the key, or start `work` as one."""
        if key not in self._tasks:
            context = outside_requests()
            task = asyncio.create_task(work(), name=self._name, context=context)
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return self._tasks[key]

    async def run(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what the key's task returns, or raise what it raises."""
        return await asyncio.shield(self.start(key, work))

    async def wait(self) -> None:
        """Wait for all tasks, without cancelling any."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """Cancel what still runs, and wait for its end."""
        await end_tasks(*self._tasks.values())

    def _ended(self, key: K, task: asyncio.Task[T]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # retrieved: those who waited have it, or have left


class LogAndContinue:
    """A context around each round of a loop, so that no unforeseen error ends the loop.

    An `Exception` that reaches it is logged with its traceback, at most one traceback every
    LOG_AGAIN_S, and the round is over. Cancellation and what ends a process pass through.
    `failure`: what did not happen, for the log. `clock`: monotonic seconds.
    """

    def __init__(
        self, log: logging.Logger, failure: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._failure, self._clock = log, failure, clock
        self._log_from = clock()
        self._num_unlogged = 0

    def __enter__(self) -> None:
        """Begin a round."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        now = self._clock()
        if now < self._log_from:
            self._num_unlogged += 1
            return True
        more = f" ({self._num_unlogged} more since the last)" if self._num_unlogged else ""
        self._log.error("%s%s: %r", self._failure, more, error, exc_info=error)
        self._log_from, self._num_unlogged = now + LOG_AGAIN_S, 0
        return True
