"""A client waits, when it comes, for what several servers say of themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio

from mcp_bridge.upstream.upstream import ServerConfig
from tests.mcp_bridge.processes import LegacyClient
from tests.mcp_bridge.test_hostile import Server, bridged


class AfterTheOther(Server):
    """Says what it is once the other one was asked what it is."""

    def __init__(self) -> None:
        super().__init__(None)
        self.was_asked = asyncio.Event()
        self.other: AfterTheOther | None = None

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if message.get("method") == "server/discover" and self.other is not None:
            self.was_asked.set()
            await self.other.was_asked.wait()
        await super().reply(writer, message, head)


async def test_servers_are_asked_what_they_are_beside_each_other(
    redis: redis.asyncio.Redis,
) -> None:
    """One after the other neither would ever answer."""
    first, second = AfterTheOther(), AfterTheOther()
    first.other, second.other = second, first
    listening = await asyncio.start_server(first.handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    others = [ServerConfig(name="first", url=f"http://127.0.0.1:{port}/mcp")]
    async with listening, bridged(redis, second, others=others) as client:
        await LegacyClient.open(client, "/mcp")
        failures = {it.upstream: it.failures_in_a_row for it in second.bridge.health()}
    assert failures == {"first": 0, "s": 0}
