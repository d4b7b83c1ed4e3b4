"""Who got a result of a server that taints is asked before what has side effects."""

from __future__ import annotations

import msgspec
import pytest
from redis.asyncio import Redis

from mcp_bridge.caller import Caller
from mcp_bridge.trust import APPROVAL_NEEDED
from tests.mcp_bridge.test_trust import ALICE, World, bridge_of, code_of


async def test_after_a_tainted_result_side_effects_ask(redis: Redis) -> None:
    world = World()
    async with bridge_of(world, redis, taints=True):
        await world.approve()
        assert "result" in await world.call()
        assert code_of(await world.call()) == APPROVAL_NEEDED
        world.caller = msgspec.structs.replace(ALICE, subject="bob")
        assert "result" in await world.call()


async def test_where_no_server_taints_nobody_is_looked_up(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    asked: list[Caller] = []

    async def tainted_by(caller: Caller) -> tuple[str, ...]:
        asked.append(caller)
        return ()

    monkeypatch.setattr(world.memory, "tainted_by", tainted_by)
    async with bridge_of(world, redis):
        await world.approve()
        assert "result" in await world.call() and asked == [ALICE]
        monkeypatch.setattr(world.memory, "taints", False)
        assert "result" in await world.call() and asked == [ALICE]
