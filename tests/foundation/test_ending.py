"""Tasks that would go on forever end, also where a cancellation is lost on the way."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import redis.asyncio

from foundation import tasks as ending
from foundation.tasks import end_tasks
from mcp_bridge.routing.sessions import Sessions
from mcp_bridge.server import subscribe as module
from tests.mcp_bridge.attacks.hostile import Attacker, answer, attacked, events, note
from tests.mcp_bridge.processes import LegacyClient, ask_modern


async def test_a_task_that_loses_a_cancellation_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "CANCEL_AGAIN_S", 0.01)
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
        await end_tasks(*tasks)
    assert lost == 3 and all(task.done() for task in tasks)
    await end_tasks()


async def test_a_task_that_has_ended_is_left_alone() -> None:
    async def fail() -> None:
        raise ValueError

    task = asyncio.create_task(fail())
    await asyncio.wait((task,))
    await end_tasks(task)
    assert isinstance(task.exception(), ValueError)


class Losing:
    """In the place of what waits for Redis: it loses the first cancellation of each that comes."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def __call__(self, *_: Any, **__: Any) -> None:
        self.begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()


async def test_a_bridge_that_closes_ends_calls_that_lose_a_cancellation(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what was asked of a client by then, and who listens."""
    monkeypatch.setattr(ending, "CANCEL_AGAIN_S", 0.01)
    keeping = Losing()
    monkeypatch.setattr(Sessions, "keep", keeping)

    def noting(server: Any, writer: Any, message: Any) -> bytes:
        return events(note("notifications/progress", progress=1), answer(message["id"]))

    async with asyncio.timeout(60):
        async with attacked(redis, Attacker(noting, modern=False)) as client:
            session = await LegacyClient.open(client, "/mcp")
            params = {"name": "t", "arguments": {}}
            calling = asyncio.create_task(session.ask("/mcp", "tools/call", params))
            await keeping.begun.wait()
            calling.cancel()  # that its client leaves ends no call
            await asyncio.wait((calling,))
        assert not client.bridge.legacy._calls
        assert not [task for task in asyncio.all_tasks() if "Stream._write" in repr(task)]


async def test_who_listens_is_let_go_though_a_server_is_not(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = Losing()
    monkeypatch.setattr(module, "follow", following)
    monkeypatch.setattr(module, "ACKNOWLEDGE_S", 0.01)
    monkeypatch.setattr(module, "SETUP_TIMEOUT_S", 0.01)
    async with asyncio.timeout(60), attacked(redis, Attacker()) as client:
        wanted = {"notifications": {"toolsListChanged": True}}
        listening = asyncio.create_task(
            ask_modern(client, "/mcp", "subscriptions/listen", wanted, id=5)
        )
        await following.begun.wait()
        client.bridge.begin_drain()
        assert (await listening)["result"]["resultType"] == "complete"
