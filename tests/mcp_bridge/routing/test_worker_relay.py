"""Workers that ask each other: an answer that is lost on its way is asked for again, never made
again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisGone

from mcp_bridge import worker_relay as relay
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, Message, RpcError
from mcp_bridge.worker_relay import OwnerGone, Relay, RelayAnswers


class Two:
    """Workers; `ran`: what the second one did for the first."""

    def __init__(self, url: str) -> None:
        self.redis, self.other = redis.asyncio.from_url(url), redis.asyncio.from_url(url)
        self.asks, self.does = Relay(self.redis), Relay(self.other)
        self.ran: list[dict[str, Any]] = []
        self.notes: list[Message] = []

    async def deafen(self) -> None:
        """Nobody hears what is published now."""
        await self.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    async def ask(self, **payload: Any) -> dict[str, Any]:
        async def note(message: Message) -> None:
            self.notes.append(message)

        return await asyncio.wait_for(self.asks.ask(self.does.worker, "do", note, **payload), 60)


@asynccontextmanager
async def two(url: str, serve: Any) -> AsyncIterator[Two]:
    made = Two(url)

    async def serving(payload: dict[str, Any], emit: Any) -> dict[str, Any]:
        made.ran.append(payload)
        found: dict[str, Any] = await serve(made, payload, emit)
        return found

    made.does.servers["do"] = serving
    await made.asks.start()
    await made.does.start()
    try:
        yield made
    finally:
        await made.asks.close()
        await made.does.close()
        await made.redis.aclose()
        await made.other.aclose()


@pytest.fixture(autouse=True)
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "LOOK_S", 0.1)
    monkeypatch.setattr(relay, "RECONNECT_S", 0.01)


async def test_an_answer_that_nobody_heard_is_told_again(bridge_redis_url: str) -> None:
    async def deaf(made: Two, payload: dict[str, Any], emit: Any) -> dict[str, Any]:
        await made.deafen()
        return {"sum": payload["a"] + 1}

    async with two(bridge_redis_url, deaf) as made:
        assert await made.ask(a=1) == {"sum": 2}
        assert len(made.ran) == 1, "it was done once"


async def test_an_answer_that_is_kept_by_nobody_is_said_to_be_lost(
    bridge_redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(made: Two, payload: dict[str, Any], emit: Any) -> dict[str, Any]:
        await made.deafen()
        return {}

    monkeypatch.setattr(relay, "MAX_ANSWER_BYTES", 1)
    async with two(bridge_redis_url, deaf) as made:
        with pytest.raises(OwnerGone):
            await made.ask()
        assert len(made.ran) == 1


async def test_who_asks_hears_of_whatever_fails(bridge_redis_url: str) -> None:
    async def fails(made: Two, payload: dict[str, Any], emit: Any) -> dict[str, Any]:
        raise RedisGone("once")

    async with two(bridge_redis_url, fails) as made:
        with pytest.raises(RpcError) as failed:
            await made.ask()
        assert failed.value.code == INTERNAL_ERROR and "once" not in str(failed.value)


async def test_who_waits_long_is_not_answered_before_it_is_done(bridge_redis_url: str) -> None:
    """However often it asks again."""
    done = asyncio.Event()

    async def slow(made: Two, payload: dict[str, Any], emit: Any) -> dict[str, Any]:
        await emit({"n": 1})
        await done.wait()
        return {"ok": True}

    async with two(bridge_redis_url, slow) as made:
        asking = asyncio.create_task(made.ask())
        while not made.notes:
            await asyncio.sleep(0.01)
        looked = asyncio.create_task(asyncio.sleep(5 * relay.LOOK_S))
        await asyncio.wait({asking, looked}, return_when=asyncio.FIRST_COMPLETED)
        assert not asking.done()
        done.set()
        assert await asking == {"ok": True}


def test_answers_are_bounded_in_bytes_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_ANSWER_BYTES", 10)
    now = 0.0
    monkeypatch.setattr(relay.time, "monotonic", lambda: now)
    answers = RelayAnswers()
    for number in range(4):
        answers.put(str(number), b"four")
    assert [answers.get(str(number)) for number in range(4)] == [None, None, b"four", b"four"]
    now = relay.ANSWER_S + 1
    answers.put("later", b"")
    assert (answers.get("3"), answers.get("later")) == (None, b"")
