"""Closes what was replaced while it was in use: as soon as nobody holds it any more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress

from foundation.tasks import TaskSet

FIRST_COLLECTION_S, LAST_COLLECTION_S = 1.0, 64.0
"""Garbage may hold a thing: the frame of a request that failed, and its error, hold each other. So
it is collected after the first time, then after twice as long each, while something waits."""


class Retirement:
    """Holds what is to be closed later. Whoever uses a thing holds it, so no use is counted."""

    def __init__(self) -> None:
        self._waiting, self._tasks = TaskSet(), TaskSet()
        self._ends = asyncio.Event()
        self._collecting: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_running

    def add(self, held: object, close: Callable[[], Awaitable[None]]) -> None:
        """Call `close` once the last reference to `held` is gone; `close` must not hold one, and
        neither may the caller for longer than it needs."""
        loop, is_free = asyncio.get_running_loop(), asyncio.Event()

        def free() -> None:
            with suppress(RuntimeError):  # the loop is closed, and all that it held with it
                loop.call_soon_threadsafe(is_free.set)

        weakref.finalize(held, free).atexit = False
        self._waiting.spawn(self._close(is_free, close), name="close what was replaced")
        if self._collecting is not None:
            self._collecting.cancel()
        self._collecting = self._tasks.spawn(self._collect(), name="collect what was replaced")

    async def close(self) -> None:
        """Close everything now."""
        self._ends.set()
        await self._tasks.close()
        await self._waiting.wait()

    async def _close(self, is_free: asyncio.Event, close: Callable[[], Awaitable[None]]) -> None:
        waits = [asyncio.create_task(each.wait()) for each in (is_free, self._ends)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await close()

    async def _collect(self) -> None:
        pause_s = FIRST_COLLECTION_S
        while self.num_waiting:
            await asyncio.sleep(pause_s)
            if self.num_waiting:
                gc.collect()
            pause_s = min(2 * pause_s, LAST_COLLECTION_S)
