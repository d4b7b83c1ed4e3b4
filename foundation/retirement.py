"""Closes what was replaced while it was in use: as soon as nobody holds it any more."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress

from foundation.tasks import TaskSet


class Retirement:
    """Holds what is to be closed later. Whoever uses a thing holds it, so no use is counted."""

    def __init__(self) -> None:
        self._tasks = TaskSet()
        self._ends: asyncio.Event = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return self._tasks.num_running

    def add(self, held: object, close: Callable[[], Awaitable[None]]) -> None:
        """Call `close` once the last reference to `held` is gone; `close` must not hold one, and
        neither may the caller for longer than it needs."""
        loop, is_free = asyncio.get_running_loop(), asyncio.Event()

        def free() -> None:
            with suppress(RuntimeError):  # the loop is closed, and all that it held with it
                loop.call_soon_threadsafe(is_free.set)

        weakref.finalize(held, free).atexit = False
        self._tasks.spawn(self._close(is_free, close), name="close what was replaced")

    async def close(self) -> None:
        """Close everything now."""
        self._ends.set()
        await self._tasks.wait()

    async def _close(self, is_free: asyncio.Event, close: Callable[[], Awaitable[None]]) -> None:
        waits = [asyncio.create_task(each.wait()) for each in (is_free, self._ends)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await close()
