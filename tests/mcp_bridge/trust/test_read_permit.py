"""Resources, prompts and completions, which are no tools, stand under the rules, too."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from mcp_bridge.protocol.rpc import DENIED, INVALID_PARAMS, RpcError
from mcp_bridge.trust.call_records import ReadRecord
from mcp_bridge.trust.policy import CallLimit, ToolRule
from tests.mcp_bridge.memory import MemoryRules
from tests.mcp_bridge.processes import LegacyClient
from tests.mcp_bridge.trust.test_trust import ALICE, URL, WEATHER, World, bridge_of, code_of

URI = "raw://a/b"
ALL = ToolRule(id="all", effect="allow")
KINDS = {"resource": f"s__{URI}", "prompt": "s__greet", "template": "s__raw://{x}"}


def deny(*globs: str) -> ToolRule:
    return ToolRule(id="no", effect="deny", tools=globs)


def reads_of(namespace: str | None) -> list[tuple[str, str, dict[str, Any]]]:
    """The kind of what each is about, its method and parameters."""
    greet = "greet" if namespace == "identity" else "s__greet"
    given = {"name": "city", "value": "R"}
    return [
        ("resource", "resources/read", {"uri": URI}),
        ("prompt", "prompts/get", {"name": greet, "arguments": {"city": "Rome"}}),
        (
            "prompt",
            "completion/complete",
            {"ref": {"type": "ref/prompt", "name": greet}, "argument": given},
        ),
        (
            "template",
            "completion/complete",
            {"ref": {"type": "ref/resource", "uri": "raw://{x}"}, "argument": given},
        ),
    ]


def new_world() -> World:
    world = World()
    world.prompts = [{"name": "greet"}]
    world.resources = [{"uri": URI, "name": "b"}]
    world.server.capabilities["completions"] = {}
    world.result = {
        "contents": [],
        "messages": [],
        "completion": {"values": []},
        "content": [],
        "structuredContent": {"degrees": 20},
    }
    return world


def went_out(world: World) -> list[str]:
    methods = {method for _, method, _ in reads_of(None)}
    return [each["method"] for each in world.server.calls if each["method"] in methods]


async def ask(world: World, is_modern: bool, method: str, params: Any) -> dict[str, Any]:
    if is_modern:
        return await world.ask(method, params)
    client = await LegacyClient.open(world.client, URL)
    return await client.ask(URL, method, params)


@pytest.mark.parametrize("is_modern", [True, False])
@pytest.mark.parametrize("namespace", ["identity", None])
async def test_what_is_no_tool_stands_under_the_rules(
    redis: Redis, namespace: str | None, is_modern: bool
) -> None:
    """By all of its server, and by its own name; where some rules are, what none allows is not."""
    world = new_world()
    async with bridge_of(world, redis, namespace=namespace):
        await world.approve()
        for kind, method, params in reads_of(namespace):
            refusing = (
                [ALL, deny("s__*")],
                [ALL, deny(KINDS[kind])],
                [ToolRule(id="other", effect="allow", tools=("s__weather", "t__*"))],
                [ToolRule(id="asks", effect="ask")],
                [ToolRule(id="writes", effect="allow", annotations={"readOnlyHint": False})],
            )
            for rules in refusing:
                world.rules.now = MemoryRules(*rules).now
                answer = await ask(world, is_modern, method, params)
                assert code_of(answer) == DENIED, (method, rules)
                denial = world.records.denials[-1]
                assert (denial.server, denial.method) == ("s", method)
            assert went_out(world) == []
            others = [each for each in KINDS.values() if each != KINDS[kind]]
            letting = (
                [ALL, deny("t__*", *others)],
                [ToolRule(id="own", effect="allow", tools=(KINDS[kind],))],
                [ToolRule(id="reads", effect="allow", annotations={"readOnlyHint": True})],
            )
            for rules in letting:
                world.rules.now = MemoryRules(*rules).now
                assert "result" in await ask(world, is_modern, method, params), (method, rules)
            assert went_out(world) == [method] * len(letting)
            await world.guard.ports.endings.wait()
            read, outcome = world.records.reads[-1]
            assert (read.method, read.rules, outcome) == (method, ("reads",), "done")
            world.server.calls.clear()


async def test_reads_are_counted_by_rates_and_by_their_callers_limits(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world()
    limit = CallLimit(calls=1, window_s=60)
    world.rules.now = MemoryRules(ToolRule(id="all", effect="allow", rate=limit)).now
    counted: list[str] = []

    async def count(read: ReadRecord) -> None:
        counted.append(read.method)
        if len(counted) > 2:
            raise RpcError(-32032, "Too many calls", {"reason": "rate_limit_exceeded"})

    monkeypatch.setattr(world.guard.ports.meter, "count", count)
    async with bridge_of(world, redis):
        await world.approve()
        assert "result" in await world.ask("resources/read", {"uri": URI})
        over = await world.ask("resources/read", {"uri": URI})
        assert over["error"]["data"] == {
            "reason": "rate",
            "rules": ["all"],
            "retryAfterSeconds": 60,
        }
        world.rules.now = MemoryRules(ALL).now
        assert code_of(await world.ask("prompts/get", {"name": "greet"})) == -32032
        assert counted == ["resources/read"] * 2 + ["prompts/get"]
        assert went_out(world) == ["resources/read"]
        assert [each.reason for each in world.records.denials] == ["rate", "rate_limit_exceeded"]


@pytest.mark.parametrize("namespace", ["identity", None])
async def test_lists_do_not_show_what_the_rules_deny_whatever_is_asked(
    redis: Redis, namespace: str | None
) -> None:
    """To whom they do: of the project and the key each has its own."""
    world = new_world()
    world.tools.append({**WEATHER, "name": "send", "annotations": {}})
    own = {"level": "key", "of": "key_1"}
    reads = {"readOnlyHint": True}
    asks = ToolRule(id="ask", effect="ask", tools=("s__send", KINDS["resource"]))
    sees: list[tuple[list[ToolRule], set[str], set[str]]] = [
        ([], {"weather", "send", "greet", URI}, {"weather", "send", "greet", URI}),
        ([ALL, deny("s__*")], set(), set()),
        ([ALL, deny("s__send")], {"weather", "greet", URI}, {"weather", "greet", URI}),
        ([ALL, asks], {"weather", "send", "greet"}, {"weather", "send", "greet"}),
        (
            [ALL, ToolRule(id="k", effect="deny", tools=("s__send", "s__raw:*"), **own)],
            {"weather", "greet"},
            {"weather", "send", "greet", URI},
        ),
        (
            [ALL, ToolRule(id="k", effect="allow", annotations=reads, **own)],
            {"weather", "greet", URI},
            {"weather", "send", "greet", URI},
        ),
        (
            [ToolRule(id="maybe", effect="allow", tools=("s__send",), when="args.n == 1")],
            {"send"},
            {"send"},
        ),
        (
            [ALL, ToolRule(id="maybe", effect="deny", when="args.n == 1")],
            {"weather", "send", "greet", URI},
            {"weather", "send", "greet", URI},
        ),
    ]
    async with bridge_of(world, redis, namespace=namespace):
        await world.approve()
        for rules, mine, theirs in sees:
            world.rules.now = MemoryRules(*rules).now
            for client, expected in (("key_1", mine), ("key_2", theirs), ("key_1", mine)):
                world.caller = msgspec.structs.replace(ALICE, client=client)
                found = {each.removeprefix("s__") for each in await shown(world)}
                assert found == expected, (rules, client)


async def shown(world: World) -> list[str]:
    found: list[str] = []
    for method, member in (("tools", "name"), ("prompts", "name"), ("resources", "uri")):
        page = (await world.ask(f"{method}/list"))["result"]
        found += [each[member] for each in page[method]]
    return found


async def test_what_was_not_approved_is_completed_to_nobody(redis: Redis) -> None:
    world = new_world()
    async with bridge_of(world, redis):
        await world.approve()
        world.prompts.append({"name": "new"})
        given = {"name": "city", "value": "R"}
        params = {"ref": {"type": "ref/prompt", "name": "new"}, "argument": given}
        assert code_of(await world.ask("completion/complete", params)) == INVALID_PARAMS
        assert went_out(world) == []


async def test_every_list_and_what_arguments_or_limits_refuse_is_on_record(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world()

    async def admit(record: Any) -> Any:
        raise RpcError(-32032, "The budget is spent", {"reason": "insufficient_quota"})

    async with bridge_of(world, redis):
        await world.approve()
        for method in ("resources/list", "resources/templates/list"):
            assert "result" in await world.ask(method)
        assert world.records.lists == [
            ("s", "resources/list", 1, False),
            ("s", "resources/templates/list", 0, False),
        ]
        assert (await world.call(city=1))["result"]["isError"]
        monkeypatch.setattr(world.guard.ports.meter, "admit", admit)
        assert code_of(await world.call()) == -32032
        told = [(each.name, each.reason) for each in world.records.denials]
        assert told == [("weather", "arguments"), ("weather", "insufficient_quota")]
