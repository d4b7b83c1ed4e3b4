"""Tasks that would go on forever end, also where a cancellation is lost on the way."""

from __future__ import annotations

import asyncio

import pytest

from mcp_bridge import ending
from mcp_bridge.ending import end


async def test_a_task_that_loses_a_cancellation_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AGAIN_S", 0.01)
    lost = 0

    async def forever() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost > 2:
                    raise

    async def fails() -> None:
        raise ValueError

    tasks = [asyncio.create_task(forever()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await end(*tasks)
    assert lost == 3 and all(task.done() for task in tasks)
    await end()
