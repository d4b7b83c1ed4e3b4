"""Keeps one child process running: starts it again when it dies, and replaces it without a gap.

Knows neither what the child serves nor when it is ready: its `start` says so by returning.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from foundation.tasks import end_tasks
from gateway.processes.child_processes import Child

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
CLEAN_UP_S = 5.0
"""Beyond the time that a child has to leave: for a start that was cancelled to end its own."""
HEALTHY_AFTER_S = 30.0
"""A child that lived so long starts the backoff anew."""


class StartError(Exception):
    """An error of something the gateway needs that did not start; one line that names it."""


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return the results in order.

    The first failure cancels the others, and is raised once they have ended: a start that is
    cancelled cleans up after itself.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class Restarter:
    """One place in the process tree, and whoever fills it at the moment."""

    def __init__(self, name: str, start: Callable[[], Awaitable[Child]]) -> None:
        self.name = name
        self.exits = 0
        """How often it has left without being asked."""
        self.last_exit: Child | None = None
        """The child that left last without being asked."""
        self.on_exit: Callable[[Child], None] | None = None
        self.is_final: Callable[[int], bool] = lambda status: False
        """Whether one that left with this status is not started again."""
        self._start = start
        self._child: Child | None = None
        self._leaving: set[Child] = set()
        self._task: asyncio.Task[None] | None = None
        self._replacing = asyncio.Lock()

    @property
    def child(self) -> Child | None:
        """Return the running child; None while the next one is awaited."""
        return self._child

    async def begin(self) -> None:
        """Start the first child, whose errors are the caller's; from then on it is kept running."""
        self._child = await self._start()
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def begin_or_retry(self) -> None:
        """Start the first child, or log why it does not start and try again as when it dies."""
        await self._start_again()
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def replace(self, timeout_s: float) -> None:
        """Start a new child first; then the old one has `timeout_s` to leave.

        If the new one does not start, its error is raised and the old one stays.
        """
        async with self._replacing:
            fresh = await self._start()
            old, self._child = self._child, fresh
            if old is not None:
                await self._dismiss(old, timeout_s)

    async def stop(self, timeout_s: float) -> None:
        """Ends the child, and does not start it again."""
        if self._task is not None:
            # Cancelled again any sooner, a start that is under way would leave its child running.
            await end_tasks(self._task, again_s=timeout_s + CLEAN_UP_S)
            self._task = None
        if self._child is not None:
            self._leaving.add(self._child)
            self._child = None
        await asyncio.gather(*(self._dismiss(child, timeout_s) for child in list(self._leaving)))

    def kill(self) -> None:
        """Kill the child at once and do not start it again; `stop` then has nothing to wait for."""
        if self._task is not None:
            self._task.cancel()
        for child in (self._child, *self._leaving):
            if child is not None:
                child.send_signal(signal.SIGKILL)

    async def _dismiss(self, child: Child, timeout_s: float) -> None:
        """Stop a child; if this is cancelled, `stop` takes it up again."""
        self._leaving.add(child)
        await child.stop(timeout_s)
        self._leaving.discard(child)
        if self.on_exit is not None:
            self.on_exit(child)

    async def _keep(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            child = self._child
            if child is not None:
                status = await child.wait()
                async with self._replacing:
                    if child is not self._child:
                        continue  # replaced: it left because it was asked to
                    self._child = None
                self.exits += 1
                self.last_exit = child
                if self.on_exit is not None:
                    self.on_exit(child)
                if self.is_final(status):
                    return
                log.warning("%s left with status %d, starting it again", self.name, status)
                if time.monotonic() - child.started_s > HEALTHY_AFTER_S:
                    backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            await self._start_again()

    async def _start_again(self) -> None:
        async with self._replacing:
            if self._child is not None:
                return
            try:
                self._child = await self._start()
            except Exception as error:
                log.error("%s does not start: %s", self.name, error)
