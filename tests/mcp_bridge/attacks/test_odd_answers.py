"""Servers whose JSON has any shape: each request gets an answer that says so, and none breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import redis.asyncio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mcp_bridge.upstream.upstream import as_object
from tests.budget import examples
from tests.mcp_bridge.attacks.hostile import Attacker, attacked, note
from tests.mcp_bridge.processes import LegacyClient, ask_modern
from tests.mcp_bridge.test_hostile import OK, SSE

NAMES = [
    "tools", "prompts", "resources", "resourceTemplates", "name", "inputSchema", "nextCursor",
    "content", "contents", "inputRequests", "requestState", "resultType", "_meta", "capabilities",
    "supportedVersions", "protocolVersion", "instructions", "uri", "k", "method", "params",
]  # fmt: skip
TEXTS = ["input_required", "2026-07-28", "2025-11-25", "elicitation/create", "object", "", "a\r\nb"]
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from(TEXTS), st.integers(2**62, 2**70)
)
anything = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    ),
    max_leaves=12,
)
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("server/discover", {}),
    ("tools/list", {}),
    ("prompts/list", {}),
    ("resources/list", {}),
    ("tools/call", {"name": "s0__t", "arguments": {"a": 1}}),
    ("prompts/get", {"name": "s0__t"}),
    ("resources/read", {"uri": "a:b"}),
]


shapes = st.one_of(anything, st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, anything)))


@settings(max_examples=examples(6), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    modern=st.booleans(),
    capabilities=st.one_of(st.just({"tools": {}, "prompts": {}, "resources": {}}), anything),
    turns=st.lists(st.tuples(shapes, st.sampled_from(REQUESTS)), min_size=6, max_size=12),
)
@example(
    modern=True,
    capabilities={"tools": {}, "prompts": {}, "resources": {}},
    turns=[
        ({"tools": [{}]}, ("tools/list", {})),
        ({"tools": 5}, ("tools/list", {})),
        ({"tools": 5}, ("tools/call", {"name": "s0__t", "arguments": {"a": 1}})),
        ({"resources": 5, "nextCursor": {}}, ("resources/list", {})),
    ],
)
async def test_an_answer_of_any_shape_is_answered(
    redis: redis.asyncio.Redis, modern: bool, capabilities: Any, turns: Any
) -> None:
    """The result of a request, or what a server says that it can; the tools of the other of two
    servers are there, whatever the first says."""
    odd, good = Attacker(modern=modern), Attacker()
    odd.capabilities = capabilities
    good.result = {"tools": [{"name": "fine", "inputSchema": {"type": "object"}}]}
    async with attacked(redis, odd, good) as client:
        session = await LegacyClient.open(client, "/mcp")
        for odd.result, (method, params) in turns:
            found = await ask_modern(client, "/mcp", method, params)
            assert ("result" in found) != ("error" in found)
            found = await session.ask("/mcp", method, params)
            assert ("result" in found) != ("error" in found)
            assert as_object(found.get("error")).get("message") != "Internal error"
        odd.result = {**as_object(odd.result), "nextCursor": 5}
        page: dict[str, Any] = {}
        names: list[str] = []
        for _ in range(2):
            found = (await session.ask("/mcp", "tools/list", page))["result"]
            names += [tool["name"] for tool in found["tools"]]
            page = {"cursor": found.get("nextCursor")}
            if page["cursor"] is None:
                break
        assert "s1__fine" in names


@pytest.mark.parametrize(
    "granted",
    [{"notifications": {"resourceSubscriptions": [[], {}, 1]}}, {"notifications": 5},
     {"notifications": {"resourceSubscriptions": True, "evil": "x", "toolsListChanged": "yes"}}],
)  # fmt: skip
async def test_an_odd_acknowledgement_ends_nobody_elses_subscription(
    redis: redis.asyncio.Redis, granted: dict[str, Any]
) -> None:
    """One of two servers acknowledges what it was not asked for; changes at the other are told."""
    told = asyncio.Event()

    def listening(said: dict[str, Any], change: bool) -> Any:
        async def answer(server: Any, writer: Any, message: Any) -> bytes:
            acknowledged = note("notifications/subscriptions/acknowledged", **said)
            writer.write(OK + SSE + b"\r\ndata: " + msgspec.json.encode(acknowledged) + b"\n\n")
            await writer.drain()
            await told.wait()
            if change:
                changed = note("notifications/tools/list_changed")
                writer.write(b"data: " + msgspec.json.encode(changed) + b"\n\n")
                await writer.drain()
            await asyncio.Event().wait()
            return b""

        return answer

    honest = {"notifications": {"toolsListChanged": True, "resourceSubscriptions": ["a:b"]}}
    servers = [Attacker(listening(granted, False)), Attacker(listening(honest, True))]
    servers[1].calls, servers[0].calls = [], []
    async with attacked(redis, *servers) as client:
        wanted = {"notifications": {"toolsListChanged": True, "resourceSubscriptions": ["a:b"]}}
        asking = asyncio.create_task(
            ask_modern(client, "/mcp", "subscriptions/listen", wanted, id=5)
        )
        while not all(server.calls for server in servers):
            await asyncio.sleep(0.01)
        told.set()
        done, _ = await asyncio.wait({asking}, timeout=0.3)
        assert not done, asking.result()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
