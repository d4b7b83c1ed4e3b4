"""Time in tests: how long something took, of the time in which this machine let the test run, and
time that passes without anybody waiting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

TICK_S = 0.005
LONGEST_S = 30.0
"""By the clock: then it hangs."""
T = TypeVar("T")


@asynccontextmanager
async def pace() -> AsyncIterator[Callable[[], float]]:
    """Seconds since then, less those in which nothing on this loop could run because another
    process, or something else on the loop, had the processor: a tick counts twice at most."""
    had_s = 0.0

    async def tick() -> None:
        nonlocal had_s
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            had_s += min(time.monotonic() - began, 2 * TICK_S)

    ticking = asyncio.create_task(tick())
    try:
        yield lambda: had_s
    finally:
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking


def skip(seconds: float) -> None:
    """Let all that waits on this loop have waited so much longer; timers fire in its next turn."""
    loop: Any = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


@asynccontextmanager
async def within(promised_s: float) -> AsyncIterator[None]:
    """Its body takes less than that of `pace`'s seconds."""
    async with asyncio.timeout(LONGEST_S), pace() as seconds:
        yield
        assert seconds() < promised_s


async def eventually(look: Callable[[], Awaitable[T]]) -> T:
    """Return what `look` finds, as soon as it finds something."""
    async with asyncio.timeout(LONGEST_S):
        while not (found := await look()):
            await asyncio.sleep(0.02)
    return found
