"""Tasks of an application end with it, even if a library loses a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from foundation import tasks as ending
from foundation.tasks import TaskSet


async def test_tasks_of_an_application_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of Redis whose timeout runs out in that very moment raises that instead."""
    monkeypatch.setattr(ending, "CANCEL_AGAIN_S", 0.01)
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

    tasks = TaskSet()
    tasks.spawn(survive_outages())
    await asked.wait()
    async with asyncio.timeout(30):
        await tasks.close()
    assert lost == 2
