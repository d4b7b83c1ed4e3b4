"""Tasks end when they are asked to, even by libraries that lose a cancellation."""

from __future__ import annotations

import asyncio

from gateway.tasks import end


async def test_a_cancellation_that_is_lost_is_repeated() -> None:
    """A client of Redis whose timeout runs out in that very moment raises that instead."""
    asked = asyncio.Event()
    lost = 0

    async def survive_outages() -> None:
        nonlocal lost
        while True:
            asked.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost > 1:
                    raise

    task = asyncio.create_task(survive_outages())
    await asked.wait()
    async with asyncio.timeout(30):
        await end(task)
    assert task.cancelled() and lost == 2


async def test_a_task_that_has_ended_is_left_alone() -> None:
    async def fail() -> None:
        raise ValueError

    task = asyncio.create_task(fail())
    await asyncio.wait((task,))
    await end(task)
    assert isinstance(task.exception(), ValueError)
