"""Tasks the application owns: kept referenced, their failures logged, all ended at shutdown."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

from billing.loops import Unforeseen
from mcp_bridge.task_ending import end

log = logging.getLogger(__name__)


class TaskSet:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str | None = None) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task %s failed", task.get_name(), exc_info=error)

    async def close(self) -> None:
        await end(*self._tasks)


class Flusher(ABC):
    """Holds what was noted in memory, and writes it every `interval_s` by a task of its own."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._name, self._interval_s = name, interval_s
        self._flushing: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._flushing = asyncio.create_task(self._flush_forever(), name=self._name)

    async def close(self) -> None:
        """Writes what is left, if Postgres takes it in time."""
        await self.stop()
        await self.flush()

    async def stop(self) -> None:
        """What is left is left."""
        if self._flushing is not None:
            await end(self._flushing)
            self._flushing = None

    @abstractmethod
    async def flush(self) -> None:
        """Never raises what Postgres does; what that does not take is kept for the next time."""

    async def _flush_forever(self) -> None:
        unforeseen = Unforeseen(log, f"{self._name}: not done")
        while True:
            await asyncio.sleep(self._interval_s)
            with unforeseen:
                await self.flush()
