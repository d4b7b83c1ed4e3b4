"""A call that a person approved goes out with the bytes that the person was shown."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from mcp_bridge.errors import NotCanonical
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.continuation import request_digest
from mcp_bridge.protocol.rpc import APPROVAL_NEEDED
from mcp_bridge.trust.approvals import arguments_digest
from mcp_bridge.trust.policy import ToolRule
from tests.budget import examples
from tests.mcp_bridge import memory as kept
from tests.mcp_bridge.processes import last_of, modern
from tests.mcp_bridge.trust.test_trust import URL, World, bridge_of, code_of

OTHERS = [
    ('{"n": 5}', '{"n": 5.0}'),
    ('{"n": 5}', '{"n": 5e0}'),
    ('{"n": 5.0}', '{"n": 5}'),
    ('{"n": 0}', '{"n": -0.0}'),
    ('{"n": 9007199254740992}', '{"n": 9007199254740993}'),
    ('{"n": 9007199254740993}', '{"n": 9007199254740992.0}'),
    ('{"n": 100000000000000000000000}', '{"n": 1e23}'),
    ('{"n": 9007199254740993}', '{"n": "20000000000001"}'),
    ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),
    ('{"n": "\\u00e9"}', '{"n": "e\\u0301"}'),
    ('{"n": "K"}', '{"n": "\\u212a"}'),
    ('{"n": true}', '{"n": 1}'),
    ('{"n": null}', "{}"),
]
SAME = [
    ('{"n": 5.0}', '{"n": 5e0}'),
    ('{"n": "\\u00e9/"}', '{"n":"é\\/"}'),
    ('{"n": 1}', '{\n"n" : 1}'),
    ("{}", "null"),
]


async def call(world: World, arguments: str) -> dict[str, object]:
    """Make a call with arguments as they are written."""
    message, headers = modern("tools/call", {"name": "weather", "arguments": "HERE"})
    body = json.dumps(message).replace('"HERE"', arguments)
    more = {**headers, "content-type": "application/json"}
    return last_of(await world.client.post(URL, content=body.encode(), headers=more))


def sent(world: World) -> list[bytes]:
    return [msgspec.json.encode(each["params"].get("arguments", {})) for each in world.went_out]


@pytest.mark.parametrize(("approved", "brought"), OTHERS + SAME)
async def test_what_goes_out_is_what_was_approved(
    redis: Redis, approved: str, brought: str
) -> None:
    world = World()
    world.tools[0]["inputSchema"] = {"type": "object"}
    del world.tools[0]["outputSchema"]
    async with bridge_of(world, redis):
        await world.approve()
        world.rules.now = kept.MemoryRules(ToolRule(id="ask", effect="ask")).now
        approval_id = (await call(world, approved))["error"]["data"]["approvalId"]  # type: ignore[index]
        shown = world.waiting.shown[approval_id]
        await world.approvals.decide("org_a", approval_id, approve=True, by="bob")
        found = await call(world, brought)
        if (approved, brought) in OTHERS:
            assert code_of(found) == APPROVAL_NEEDED and sent(world) == []
            found = await call(world, approved)
        assert "result" in found
        assert sent(world) == [shown]
        assert world.records.calls[0].approval_id == approval_id


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ARGUMENTS = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        st.none() | st.booleans() | NUMBERS | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=6,
    ),
    max_size=3,
)


@settings(max_examples=examples(400), deadline=None)
@given(ARGUMENTS, ARGUMENTS)
def test_one_digest_is_of_one_text(one: dict[str, object], other: dict[str, object]) -> None:
    """Also after the text was read again, as the server and another worker do."""
    text = rpc.encode(one)
    assert (arguments_digest(one) == arguments_digest(other)) == (text == rpc.encode(other))
    assert arguments_digest(msgspec.json.decode(text)) == arguments_digest(one)
    turned = dict(reversed(one.items()))
    assert (arguments_digest(turned) == arguments_digest(one)) == (len(one) < 2)


@pytest.mark.parametrize(("approved", "brought"), OTHERS + SAME[:-1])
def test_what_goes_on_has_the_bytes_that_were_approved(approved: str, brought: str) -> None:
    """The state of a call that asked its client something is of the arguments that went out."""
    first, again = (
        request_digest("", "tools/call", {"name": "t", "arguments": msgspec.json.decode(text)})
        for text in (approved, brought)
    )
    assert (first == again) == ((approved, brought) in SAME)
    turned = {"arguments": msgspec.json.decode(approved), "name": "t"}
    assert request_digest("", "tools/call", turned) == first


def test_what_is_too_deep_has_no_digest() -> None:
    deep: object = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(NotCanonical):
        arguments_digest({"a": deep})
    with pytest.raises(NotCanonical):
        arguments_digest({"a": "\ud800"})
