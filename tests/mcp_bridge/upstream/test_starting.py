"""A process that takes its time to start, and clients that do not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import redis.asyncio

from mcp_bridge.protocol.eras import SESSION_HEADER
from mcp_bridge.protocol.rpc import Message
from mcp_bridge.upstream.circuit_breaker import FAILURES_TO_REST
from mcp_bridge.upstream.credentials import NO_CREDENTIAL, CredentialSet, Refusal, UpstreamOwner
from mcp_bridge.upstream.transport import TransportAnswer, TransportRequest
from mcp_bridge.upstream.transports.channel import ChannelRequest
from mcp_bridge.upstream.transports.channel_owners import ConnectionOwner, ConnectionOwners
from mcp_bridge.upstream.transports.channel_transport import ChannelTransport
from mcp_bridge.upstream.upstream import ServerConfig
from mcp_bridge.worker_relay import Relay

SAID = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "s"}}


class Slow:
    """A line to a server of the older era, which says what it is once it may."""

    legacy_only, left = True, False

    def __init__(self, may_start: asyncio.Event) -> None:
        self._may_start = may_start
        self._asked: asyncio.Queue[Message] = asyncio.Queue()

    async def send(self, message: Message) -> None:
        if "id" in message:
            self._asked.put_nowait(message)

    async def messages(self) -> AsyncIterator[Message]:
        while True:
            message = await self._asked.get()
            await self._may_start.wait()
            yield {"jsonrpc": "2.0", "id": message["id"], "result": SAID}


async def test_who_leaves_during_a_start_leaves_it_to_who_comes_next() -> None:
    may_start, opened = asyncio.Event(), asyncio.Event()
    num_opened = 0

    @asynccontextmanager
    async def open_stream(*_: Any) -> AsyncIterator[Any]:
        nonlocal num_opened
        num_opened += 1
        opened.set()
        yield Slow(may_start)

    config = ServerConfig(name="s", url="http://x/")
    info = {"name": "t", "version": "1"}
    host = ConnectionOwner(config, UpstreamOwner("org_a"), NO_CREDENTIAL, info, open_stream)
    message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    ask = ChannelRequest(asker="a", method="POST", message=message, session=None)

    async def emit(_: Message) -> None:
        """Nothing is said."""

    for _ in range(FAILURES_TO_REST + 1):
        leaving = asyncio.create_task(host.ask(ask, emit))
        await opened.wait()
        leaving.cancel()
        await asyncio.wait({leaving})
        assert leaving.cancelled()
    staying = asyncio.create_task(host.ask(ask, emit))
    may_start.set()
    told = await asyncio.wait_for(staying, 60)
    assert told is not None and num_opened == 1
    await host.close()


async def nothing(refused: Refusal | None) -> CredentialSet:
    return NO_CREDENTIAL


class Worker:
    """One that asks its own process, or another's, as a bridge does."""

    def __init__(self, store: redis.asyncio.Redis, may_start: asyncio.Event) -> None:
        @asynccontextmanager
        async def open_stream(*_: Any) -> AsyncIterator[Any]:
            self.opened.set()
            yield Slow(may_start)

        self.opened, self.is_out = asyncio.Event(), False
        self.relay = Relay(store)
        self.hosts = ConnectionOwners(
            info={}, open_stream=open_stream, credentials=None, shared=(store, self.relay)
        )
        config = ServerConfig(name="s", url="http://x/", transport="sse")
        self._transport = ChannelTransport(config, UpstreamOwner("org_a"), self.hosts, nothing)

    def _sent(self) -> None:
        self.is_out = True

    async def ask(self, method: str, **headers: str) -> TransportAnswer:
        message = {"jsonrpc": "2.0", "id": 1, "method": method}
        request = TransportRequest("POST", message, headers, on_sent=self._sent)
        async with self._transport.ask(request) as answer:
            return answer


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_call_is_out_once_the_process_may_have_it(redis_url: str, elsewhere: bool) -> None:
    """A caller that leaves while the process starts has asked it nothing."""
    may_start = asyncio.Event()
    async with AsyncExitStack() as stack:
        workers = []
        for _ in range(2):
            store = redis.asyncio.from_url(redis_url)
            stack.push_async_callback(store.aclose)
            worker = Worker(store, may_start)
            await worker.relay.start()
            stack.push_async_callback(worker.relay.close)
            stack.push_async_callback(worker.hosts.close)
            workers.append(worker)
        owner, asker = workers[0], workers[1 if elsewhere else 0]
        opening = asyncio.create_task(owner.ask("initialize"))
        await owner.opened.wait()
        leaving = asyncio.create_task(asker.ask("initialize"))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert not owner.is_out and not asker.is_out
        may_start.set()
        session = (await opening).headers[SESSION_HEADER]
        assert not owner.is_out, "the connection answers this itself"
        async with asyncio.timeout(60):
            await asker.ask("ping", **{SESSION_HEADER: session})
        assert asker.is_out and not workers[1 - workers.index(asker)].is_out
