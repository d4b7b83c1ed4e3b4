"""The listener outlives what stalls its process: without it no revocation is heard again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from gateway.tenancy import changes
from gateway.tenancy.changes import EVERYTHING, NUMBER, ChangeListener, Subscription, announce
from tests.pace import within

HEARD_TIMEOUT_S = 60.0
PROMISED_S = 1.0


class Kept:
    """A subscription whose library, told to stop waiting, returns what it has got meanwhile: as
    redis-py does where a stalled loop finds both in one turn."""

    def __init__(self, *, kept: dict[str, Any] | None) -> None:
        self.kept = kept
        self.unread: list[dict[str, Any]] = []

    async def subscribe(self, *channels: str) -> None:
        self.unread += [
            {"type": "subscribe", "channel": channel.encode(), "data": 1} for channel in channels
        ]

    async def ping(self, _text: str) -> None:
        return None

    async def get_message(self, *, timeout: float) -> dict[str, Any] | None:
        if self.unread:
            return self.unread.pop()
        try:
            await asyncio.sleep(HEARD_TIMEOUT_S)
        except asyncio.CancelledError:
            if self.kept is None:
                raise
            kept, self.kept = self.kept, None
            return kept
        return None

    async def aclose(self) -> None:
        return None


class KeptRedis:
    def __init__(self, kept: dict[str, Any] | None) -> None:
        self.kept = [kept]

    async def get(self, _key: str) -> None:
        return None

    def pubsub(self) -> Kept:
        return Kept(kept=self.kept.pop() if self.kept else None)


@pytest.mark.parametrize("kept", [{"type": "pong", "data": b"1.0"}, {"type": "message", "data": 0}])
async def test_an_answer_at_the_end_of_patience_ends_no_listener(
    kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is given up, and the next one subscribes."""
    monkeypatch.setattr(changes, "SILENCE_S", 0.1)
    heard: asyncio.Queue[str] = asyncio.Queue()
    store: Any = KeptRedis(kept)
    listener = ChangeListener(store, heard.put_nowait)
    await listener.start(timeout_s=0.01)
    async with asyncio.timeout(HEARD_TIMEOUT_S):
        assert [await heard.get(), await heard.get()] == [EVERYTHING, EVERYTHING]
    await listener.close()


@pytest.fixture
async def heard(redis: redis.asyncio.Redis) -> AsyncIterator[asyncio.Queue[str]]:
    """All that a listener of identities hears, without what its subscription begins with."""
    queue: asyncio.Queue[str] = asyncio.Queue()
    listener = ChangeListener(redis, queue.put_nowait)
    await listener.start()
    async with asyncio.timeout(HEARD_TIMEOUT_S):
        assert await queue.get() == EVERYTHING
        while Subscription.of(redis)._number is None:
            await asyncio.sleep(0.01)
    yield queue
    await listener.close()


async def test_a_lost_announcement_is_missed_by_its_number(
    redis: redis.asyncio.Redis, heard: asyncio.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection looks healthy: all but PONGs is dropped on purpose."""
    handle = Subscription._handle

    def deaf(self: Subscription, message: dict[str, Any]) -> bool:
        return message["type"] == "pong" and handle(self, message)

    monkeypatch.setattr(Subscription, "_handle", deaf)
    async with within(PROMISED_S):
        await announce(redis, "key_1")
        assert await heard.get() == EVERYTHING


async def test_a_redis_that_lost_its_count_begins_with_everything(
    redis: redis.asyncio.Redis, heard: asyncio.Queue[str]
) -> None:
    await announce(redis, "key_1")
    async with asyncio.timeout(HEARD_TIMEOUT_S):
        assert await heard.get() == "key_1"
    await redis.delete(NUMBER)
    async with asyncio.timeout(HEARD_TIMEOUT_S):
        assert await heard.get() == EVERYTHING


async def test_what_is_heard_is_not_counted_as_lost(
    redis: redis.asyncio.Redis, heard: asyncio.Queue[str]
) -> None:
    for number in range(40):
        await announce(redis, f"key_{number}")
        await asyncio.sleep(0.02)  # over one comparison at least
    async with asyncio.timeout(HEARD_TIMEOUT_S):
        assert [await heard.get() for _ in range(40)] == [f"key_{number}" for number in range(40)]
    assert heard.empty()


async def test_listeners_of_one_client_share_a_connection(redis: redis.asyncio.Redis) -> None:
    redis.connection_pool.connection_kwargs["client_name"] = "tests-sharing"
    await redis.connection_pool.disconnect()
    queues: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in range(3)]
    channels = [changes.CHANNEL, changes.CHANNEL, "tests:other"]
    listeners = [
        ChangeListener(redis, queue.put_nowait, channel=channel)
        for queue, channel in zip(queues, channels, strict=True)
    ]
    for each in listeners:
        await each.start()
    async with asyncio.timeout(HEARD_TIMEOUT_S):
        assert [await queue.get() for queue in queues] == [EVERYTHING] * 3
        await announce(redis, "key_1")
        assert [await queue.get() for queue in queues[:2]] == ["key_1"] * 2
    assert queues[2].empty()
    clients = await redis.client_list(_type="pubsub")
    assert sum(each["name"] == "tests-sharing" for each in clients) == 1
    for each in listeners:
        await each.close()


async def test_a_listener_ends_though_the_library_loses_its_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `wait_for` of Python 3.11 does when a result comes in the same turn; and no silence comes
    to its aid."""
    monkeypatch.setattr(changes, "SILENCE_S", 1000.0)
    heard: asyncio.Queue[str] = asyncio.Queue()
    store: Any = KeptRedis({"type": "message", "data": 0})
    listener = ChangeListener(store, heard.put_nowait)
    await listener.start(timeout_s=0.01)
    async with asyncio.timeout(HEARD_TIMEOUT_S):
        assert await heard.get() == EVERYTHING
        listening = Subscription.of(store)._task
        assert listening is not None
        await asyncio.sleep(0)  # it waits for the next message
        listening.cancel()
        await asyncio.wait([listening])
    await listener.close()
