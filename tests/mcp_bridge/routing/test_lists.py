"""Lists are written once and shown many times: never longer than what they say holds."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from mcp_bridge.pinning import ApprovedPins, pin_of
from mcp_bridge.routing.catalog import VisibleList, launch_pin
from mcp_bridge.trust.policy import ToolRule
from tests.mcp_bridge.memory import MemoryRules
from tests.mcp_bridge.processes import LegacyClient
from tests.mcp_bridge.trust.test_trust import URL, WEATHER, World, bridge_of, pause

LEAVES = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(max_size=8), VALUES, max_size=5), st.sampled_from(["look", "s__look"])
)
def test_what_is_written_is_what_is_pinned_but_for_its_name(more: Any, alias: str) -> None:
    pin = pin_of("tool", {**more, "name": "look"})
    (found,) = VisibleList((pin,), stale=False).written("s", lambda name: alias, 0, 1)
    assert msgspec.json.decode(found) == {**msgspec.json.decode(pin.body), "name": alias}
    if alias == pin.name:
        assert bytes(found) == pin.body


def test_a_list_is_written_once_for_each_label_and_leaves_out_what_has_no_name() -> None:
    shown = VisibleList(tuple(pin_of("tool", {"name": name}) for name in "abc"), stale=False)
    asked: list[str] = []

    def alias_of(name: str) -> str | None:
        asked.append(name)
        return None if name == "a" else f"s__{name}"

    (first,) = shown.written("s", alias_of, 0, 2)
    assert bytes(first) == b'{"name":"s__b"}' and set(asked) == {"a", "b"}, (
        "so many as are asked for"
    )
    again = shown.written("s", alias_of, 0, 3)
    assert again[0] is first and len(again) == 2 and set(asked[4:]) == {"c"}
    other = shown.written("", lambda name: name, 0, 3)
    assert [bytes(each) for each in other] == [pin.body for pin in shown.pins]


class Lists:
    """The lists that clients of both eras see of a world, and that are the same."""

    def __init__(self, world: World, legacy: LegacyClient) -> None:
        self.world, self.legacy = world, legacy

    async def now(self) -> list[dict[str, Any]]:
        """Twice, so that the second is of what the first has written."""
        found = [await self._page() for _ in range(2)]
        assert found[0] == found[1]
        return found[0]

    async def _page(self) -> list[dict[str, Any]]:
        modern = (await self.world.ask("tools/list"))["result"]["tools"]
        assert (await self.legacy.ask(URL, "tools/list"))["result"]["tools"] == modern
        found: list[dict[str, Any]] = modern
        return found


@pytest.mark.parametrize("namespace", ["identity", None])
async def test_whatever_changes_is_in_the_next_list(redis: Redis, namespace: str | None) -> None:
    world, name = World(), "weather" if namespace else "s__weather"
    async with bridge_of(world, redis, namespace=namespace):
        assert await world.names() == [], "nothing is approved"
        await world.approve()
        pause(world)
        lists = Lists(world, await LegacyClient.open(world.client, URL))
        assert await lists.now() == [{**WEATHER, "name": name}]

        changed = {**copy.deepcopy(WEATHER), "description": "Says more."}
        world.tools = [changed]
        pause(world)
        assert await lists.now() == [], "the offer"
        await world.approve()
        assert await lists.now() == [{**changed, "name": name}], "an approval, at once"

        kept = await world.pins.approved("org_a", "s")
        without = {key: pin for key, pin in kept.pins.items() if pin.kind != "tool"}
        world.pins.kept["org_a", "s"] = ApprovedPins(without)
        assert await lists.now() == [], "an approval taken back, at once"
        world.pins.kept["org_a", "s"] = kept
        assert [each["name"] for each in await lists.now()] == [name]

        launch = launch_pin(world.config)
        unknown = {key: pin for key, pin in kept.pins.items() if key != launch.key}
        world.pins.kept["org_a", "s"] = ApprovedPins(unknown)
        assert await lists.now() == [], "how the server is reached"
        world.pins.kept["org_a", "s"] = kept
        pause(world)
        assert [each["name"] for each in await lists.now()] == [name]

        world.prompts = [{"name": "weather", "description": "The same name."}]
        pause(world)
        assert [each["name"] for each in await lists.now()] == [name], "what is of another kind"

        world.tools = [changed, {**changed, "title": "Again"}]
        pause(world)
        assert await lists.now() == [], "two of one name"


async def test_rules_that_change_decide_calls_of_what_is_listed_already(redis: Redis) -> None:
    world = World()
    async with bridge_of(world, redis):
        await world.approve()
        assert await world.names() == ["weather"]
        assert "result" in await world.call()
        world.rules.now = MemoryRules(ToolRule(id="never", effect="deny")).now
        assert await world.names() == [], "what no arguments would let through"
        assert "error" in await world.call() and len(world.went_out) == 1
