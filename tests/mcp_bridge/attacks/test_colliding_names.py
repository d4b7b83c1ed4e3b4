"""Two tools of one server whose shortened names are the same: neither is shown, and a call reaches
neither, in whatever order the server lists them."""

from __future__ import annotations

import pytest
import redis.asyncio

from mcp_bridge import names
from mcp_bridge.server.bridge import Bridge
from mcp_bridge.upstream.upstream import ServerConfig
from tests.mcp_bridge.counting import LOOK, counting
from tests.mcp_bridge.processes import ask_modern
from tests.mcp_bridge.test_hostile import KEYS
from tests.mcp_bridge.upstream.transports.test_channel_owners import Worker

HARMLESS, HARMFUL, ALONE = ("n" * 60 + end for end in (" reads only", " deletes", "!"))


async def test_neither_of_two_names_that_are_one_is_called(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest of 60 bits can be met: here by one of which the last letter alone is left."""
    monkeypatch.setattr(names, "digest_of", lambda name: ("b" if name == ALONE else "a") * 12)
    collides, alone = (names.alias_of("s", each) for each in (HARMLESS, ALONE))
    assert collides == names.alias_of("s", HARMFUL) != alone
    for order in ((HARMLESS, HARMFUL, ALONE), (ALONE, HARMFUL, HARMLESS)):
        with counting() as server:
            server.tools = [{**LOOK, "name": each} for each in order]
            config = ServerConfig(name="s", url=server.url)
            bridge = Bridge([config], redis, KEYS, info={"name": "t", "version": "1"})
            await bridge.start()
            try:
                async with Worker(bridge) as client:
                    for _ in range(2):
                        listed = await ask_modern(client, "/mcp", "tools/list")
                        tools = [each["name"] for each in listed["result"]["tools"]]
                        assert tools == [alone]
                        refused = await client.tool(collides)
                        assert refused["error"]["message"] == f"Unknown tool: {collides}"
                    done = await client.tool(alone)
                    assert "result" in done, done
            finally:
                await bridge.close()
            assert server.called == [ALONE]
