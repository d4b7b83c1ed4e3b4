"""A rule is about a tool by whatever name a client calls it, and unlisted names call nothing."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from mcp_bridge.names import IDENTITY, alias_of
from mcp_bridge.protocol.rpc import APPROVAL_NEEDED, DENIED, INVALID_PARAMS
from mcp_bridge.trust.policy import ToolRule
from tests.mcp_bridge.memory import MemoryRules
from tests.mcp_bridge.processes import LegacyClient
from tests.mcp_bridge.trust.test_trust import URL, WEATHER, World, bridge_of, code_of

NAMES = ("weather", "a.b", "long" * 30)
NAMESPACES = ("identity", None)


def spelled() -> set[str]:
    """However somebody may think that they are called."""
    aliases = {alias_of(label, name) for name in NAMES for label in ("s", IDENTITY)}
    return {*NAMES, *aliases, *(f"s__{each}" for each in (*NAMES, *aliases))}


async def call(world: World, name: str, is_modern: bool) -> dict[str, Any]:
    params = {"name": name, "arguments": {"city": "Rome"}}
    if is_modern:
        return await world.ask("tools/call", params)
    client = await LegacyClient.open(world.client, URL)
    return await client.ask(URL, "tools/call", params)


@pytest.mark.parametrize("is_modern", [True, False])
@pytest.mark.parametrize("namespace", NAMESPACES)
async def test_a_rule_is_about_a_tool_by_every_name(
    redis: Redis, namespace: str | None, is_modern: bool
) -> None:
    world = World()
    world.tools = [{**WEATHER, "name": name} for name in NAMES]
    async with bridge_of(world, redis, namespace=namespace):
        await world.approve()
        listed = await world.names()
        assert len(listed) == len(NAMES)
        spellings = {*listed, *spelled()}
        for effect, code in (("deny", DENIED), ("ask", APPROVAL_NEEDED)):
            for globs in (("s__*",), tuple(alias_of("s", name) for name in NAMES)):
                rules = [ToolRule(id="all", effect="allow")]
                rules.append(ToolRule(id="not", effect=effect, tools=globs))
                world.rules.now = MemoryRules(*rules).now
                for name in spellings:
                    answer = await call(world, name, is_modern)
                    assert code_of(answer) == (code if name in listed else INVALID_PARAMS), name
        assert not world.went_out and not world.records.calls


@pytest.mark.parametrize("namespace", NAMESPACES)
async def test_a_name_that_no_list_shows_calls_nothing(redis: Redis, namespace: str | None) -> None:
    """Nor does it get a prompt, or its completions; what is listed does."""
    world = World()
    world.tools = [{**WEATHER, "name": name} for name in NAMES]
    world.prompts = [{"name": name} for name in NAMES]
    async with bridge_of(world, redis, namespace=namespace):
        await world.approve()
        listed = await world.names()
        for name in spelled() - {*listed}:
            assert code_of(await call(world, name, True)) == INVALID_PARAMS
            assert code_of(await world.ask("prompts/get", {"name": name})) == INVALID_PARAMS
            given = {"name": "city", "value": "R"}
            params = {"ref": {"type": "ref/prompt", "name": name}, "argument": given}
            assert code_of(await world.ask("completion/complete", params)) == INVALID_PARAMS
        asked = {each["method"] for each in world.server.calls}
        assert asked.isdisjoint({"tools/call", "prompts/get", "completion/complete"})
        for name in listed:
            assert "result" in await call(world, name, True)
        assert [each.alias for each in world.records.calls] == [
            alias_of("s", each["params"]["name"]) for each in world.went_out
        ]
