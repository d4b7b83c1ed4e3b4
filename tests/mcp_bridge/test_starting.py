"""A process that takes its time to start, and clients that do not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp_bridge.breaker import FAILURES_TO_REST
from mcp_bridge.channel import Ask
from mcp_bridge.credentials import NO_CREDENTIAL, Whose
from mcp_bridge.hosts import Host
from mcp_bridge.protocol.rpc import Message
from mcp_bridge.upstream import ServerConfig

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
    async def open_line(*_: Any) -> AsyncIterator[Any]:
        nonlocal num_opened
        num_opened += 1
        opened.set()
        yield Slow(may_start)

    config = ServerConfig(name="s", url="http://x/")
    info = {"name": "t", "version": "1"}
    host = Host(config, Whose("org_a"), NO_CREDENTIAL, info, open_line)
    message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    ask = Ask(asker="a", method="POST", message=message, session=None)

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
