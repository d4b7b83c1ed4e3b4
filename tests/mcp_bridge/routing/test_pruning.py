"""A catalogue that costs too much is searched, and what is found is called like any other tool."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from mcp_bridge.protocol.rpc import DENIED
from mcp_bridge.routing.pruning import COST_META, MAX_INDICES, Pruner
from mcp_bridge.routing.search import CALL, SEARCH
from mcp_bridge.server.bridge import Bridge
from mcp_bridge.trust.policy import ToolRule
from tests.mcp_bridge.trust import test_trust
from tests.mcp_bridge.trust.test_trust import ALICE, WEATHER, World, bridge_of, code_of

MAX_TOKENS = 1_000
MANY = [
    {**WEATHER, "name": "weather"},
    *(
        {
            "name": f"ledger_{number:03}",
            "description": f"Books the entry of account {number}.",
            "inputSchema": {"type": "object"},
        }
        for number in range(100)
    ),
]


@pytest.fixture
async def world(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    def pruning(*args: Any, **options: Any) -> Bridge:
        return Bridge(*args, pruner=Pruner(MAX_TOKENS), **options)

    monkeypatch.setattr(test_trust, "Bridge", pruning)
    made = World()
    async with bridge_of(made, redis, namespace="n"):
        yield made


async def call(world: World, name: str, arguments: Any) -> dict[str, Any]:
    return await world.ask("tools/call", {"name": name, "arguments": arguments})


async def found_by(world: World, **arguments: Any) -> list[str]:
    result = (await call(world, SEARCH, arguments))["result"]
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    return [tool["name"] for tool in result["structuredContent"]["tools"]]


async def test_what_costs_little_is_listed_with_what_it_costs(world: World) -> None:
    await world.approve()
    page = (await world.ask("tools/list"))["result"]
    assert [tool["name"] for tool in page["tools"]] == ["s__weather"]
    size = len(msgspec.json.encode(page["tools"][0]))
    assert page["_meta"][COST_META] == {"tools": 1, "tokens": -(-size // 4)}


async def test_what_costs_too_much_is_searched_and_called(world: World) -> None:
    world.tools = [*MANY]
    await world.approve()
    page = (await world.ask("tools/list"))["result"]
    assert [tool["name"] for tool in page["tools"]] == [SEARCH, CALL]
    assert page["_meta"][COST_META]["tools"] == 101
    assert page["_meta"][COST_META]["tokens"] > MAX_TOKENS and "nextCursor" not in page
    assert (await found_by(world, query="weather in a city"))[0] == "s__weather"
    assert len(await found_by(world, query="account", limit=7)) == 7
    meant = {"name": "s__weather", "arguments": {"city": "Rome"}}
    assert "result" in await call(world, CALL, meant)
    (record,) = world.records.calls
    assert (record.server, record.tool) == ("s", "weather")
    wrong = {"name": "s__weather", "arguments": {"city": 1}}
    assert (await call(world, CALL, wrong))["result"]["isError"]
    assert len(world.records.calls) == 1


async def test_what_is_called_is_what_the_rules_see(world: World) -> None:
    world.tools = [*MANY]
    await world.approve()
    allows, never = (
        ToolRule(id="all", effect="allow", tools=("s__*", SEARCH, CALL)),
        ToolRule(id="never", effect="deny", tools=("s__weather",)),
    )
    world.rules.now = type(world.rules.now).of([allows, never])
    meant = {"name": "s__weather", "arguments": {"city": "Rome"}}
    assert code_of(await call(world, CALL, meant)) == DENIED and not world.records.calls


@pytest.mark.parametrize(
    "arguments",
    [{}, {"query": ""}, {"query": "x", "limit": 0}, {"query": "x" * 1_001}, {"q": "x"}, [], None],
)
async def test_a_search_that_does_not_conform_says_why(world: World, arguments: Any) -> None:
    await world.approve()
    result = (await call(world, SEARCH, arguments)).get("result")
    assert result is None or (result["isError"] and "arguments" in result["content"][0]["text"])


@pytest.mark.parametrize(
    "arguments", [{}, {"name": CALL, "arguments": {}}, {"name": SEARCH}, {"name": "s__x", "a": 1}]
)
async def test_a_call_of_nothing_is_refused(world: World, arguments: Any) -> None:
    await world.approve()
    assert code_of(await call(world, CALL, arguments)) == -32602


async def test_a_search_sees_what_is_approved_now(world: World) -> None:
    world.tools = [*MANY]
    await world.approve()
    assert await found_by(world, query="tide") == []
    world.tools.append({**WEATHER, "name": "tide", "description": "Tells the tide."})
    test_trust.pause(world)
    assert await found_by(world, query="tide") == []
    await world.approve()
    assert await found_by(world, query="tide") == ["s__tide"]


async def test_indices_are_so_many() -> None:
    pruner = Pruner(0)
    for number in range(MAX_INDICES + 5):
        tool = {"name": f"s__t{number}", "inputSchema": {"type": "object"}}
        await pruner.search(ALICE, [tool], {"query": "t"})
    assert len(pruner._indices) == MAX_INDICES


async def test_no_servers_tool_is_taken_for_one_of_these(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in the namespace "identity": a full stop is written otherwise there, too."""

    def pruning(*args: Any, **options: Any) -> Bridge:
        return Bridge(*args, pruner=Pruner(MAX_TOKENS), **options)

    monkeypatch.setattr(test_trust, "Bridge", pruning)
    world = World()
    world.tools = [{**WEATHER, "name": SEARCH}, {**WEATHER, "name": CALL}]
    async with bridge_of(world, redis):
        await world.approve()
        names = [tool["name"] for tool in (await world.ask("tools/list"))["result"]["tools"]]
        assert len(names) == 2 and not {SEARCH, CALL} & {*names}
        for name in names:
            assert "result" in await call(world, name, {"city": "Rome"})
        assert sorted(record.tool for record in world.records.calls) == sorted([SEARCH, CALL])
