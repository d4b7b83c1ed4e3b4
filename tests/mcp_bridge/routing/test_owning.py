"""The one connection to a server is one worker's: not two workers', and not in doubt for a
moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import redis.asyncio

from mcp_bridge.protocol.rpc import Message
from mcp_bridge.upstream.credentials import NO_CREDENTIAL, UpstreamOwner
from mcp_bridge.upstream.transport import TransportFailed
from mcp_bridge.upstream.transports import channel_owners as hosts
from mcp_bridge.upstream.transports.channel import ChannelRequest
from mcp_bridge.upstream.transports.channel_owners import ConnectionKey, ConnectionOwners
from mcp_bridge.upstream.upstream import ServerConfig
from mcp_bridge.worker_relay import Relay
from tests.mcp_bridge.upstream.test_starting import Slow

CONFIG = ServerConfig(name="s", url="http://x/", transport="sse")
HELLO = ChannelRequest(
    asker="a",
    method="POST",
    message={"jsonrpc": "2.0", "id": 1, "method": "initialize"},
    session=None,
)


def place_of(org_id: str) -> ConnectionKey:
    return ConnectionKey(server="s", org_id=org_id, credential=NO_CREDENTIAL.name)


async def unheard(_: Message) -> None:
    """Nobody listens."""


class Worker:
    """`refuses`: its lines do not open. `may_end`: those that are open end after it."""

    def __init__(self, store: redis.asyncio.Redis) -> None:
        self.refuses, self.may_end = False, asyncio.Event()
        self.relay = Relay(store)
        may_start = asyncio.Event()
        may_start.set()

        @asynccontextmanager
        async def open_stream(*_: Any) -> AsyncIterator[Any]:
            if self.refuses:
                raise TransportFailed("refused")
            try:
                yield Slow(may_start)
            finally:
                await self.may_end.wait()

        self.hosts = ConnectionOwners(
            info={}, open_stream=open_stream, credentials=None, shared=(store, self.relay)
        )
        self.hosts.add_config(CONFIG)

    async def ask(self, org_id: str) -> int:
        told = await self.hosts.ask(CONFIG, UpstreamOwner(org_id), NO_CREDENTIAL, HELLO, unheard)
        return told.status


@pytest.fixture
async def worker(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    monkeypatch.setattr(hosts, "OWNED_HEARTBEAT_S", 0.02)
    async with AsyncExitStack() as stack:
        store = redis.asyncio.from_url(redis_url)
        stack.push_async_callback(store.aclose)
        made = Worker(store)
        await made.relay.start()
        stack.push_async_callback(made.relay.close)
        yield made
        made.may_end.set()
        await made.hosts.close()


async def test_who_comes_as_it_is_let_go_has_it_anew(
    worker: Worker, redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was nobody's for a moment while one worker used it, and so another one's, too."""
    monkeypatch.setattr(hosts, "IDLE_S", 0.0)
    letting_go, may_go_on = asyncio.Event(), asyncio.Event()
    ownership = worker.hosts._ownership
    assert ownership is not None
    release = ownership.release

    async def slowly(key: str) -> None:
        letting_go.set()
        await may_go_on.wait()
        await release(key)

    monkeypatch.setattr(ownership, "release", slowly)
    worker.refuses = True
    with pytest.raises(TransportFailed):
        await worker.ask("org_a")
    async with asyncio.timeout(60):
        await letting_go.wait()
        worker.refuses = False
        coming = asyncio.create_task(worker.ask("org_a"))
        await asyncio.sleep(0.1)
        may_go_on.set()
        assert await coming == 200
    assert await redis.get(place_of("org_a").redis_key) == worker.relay.worker.encode()


async def test_one_that_is_long_in_ending_costs_no_other_its_sign_of_life(
    worker: Worker, redis: redis.asyncio.Redis
) -> None:
    for org_id in ("org_a", "org_b"):
        assert await worker.ask(org_id) == 200
    await redis.set(place_of("org_a").redis_key, "another")
    async with asyncio.timeout(60):
        while worker.hosts._connections.keys() != {place_of("org_b")}:
            await asyncio.sleep(0.01)
        key = place_of("org_b").redis_key
        await redis.expire(key, 5)
        while (left_s := await redis.ttl(key)) <= 5:
            assert left_s >= 0, "nobody's"
            await asyncio.sleep(0.01)
    assert await redis.get(key) == worker.relay.worker.encode()
    assert await redis.get(place_of("org_a").redis_key) == b"another"
