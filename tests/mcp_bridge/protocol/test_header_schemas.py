"""A schema says which arguments travel as headers: what is kept of it says the same as the schema,
and is bounded whatever a server lists."""

from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio
from hypothesis import example, given
from hypothesis import strategies as st

from mcp_bridge.protocol import header_schemas
from mcp_bridge.protocol.envelope import check_param_headers, header_schema, param_headers
from mcp_bridge.protocol.header_schemas import MAX_TOOLS, HeaderSchemas
from mcp_bridge.protocol.rpc import RpcError
from tests.mcp_bridge.attacks.hostile import Attacker, attacked
from tests.mcp_bridge.processes import ask_modern, modern
from tests.mcp_bridge.test_hostile import whole

NAMES = st.sampled_from(["a", "b", "properties", "type"])
LEAVES = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "integer", "boolean", "number"])},
    optional={"x-mcp-header": st.sampled_from(["One", "Two", "Three", "one", "not a token", 1])},
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)},
        optional={"anyOf": st.lists(inner, max_size=2), "description": st.text(max_size=20)},
    ),
    max_leaves=6,
)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["x", "é", " y "])
ARGUMENTS = st.dictionaries(
    NAMES, st.recursive(SCALARS, lambda inner: st.dictionaries(NAMES, inner), max_leaves=4)
)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["mcp-param-one", "mcp-param-two", "other"]), st.sampled_from(["1", "x"])
    ),
    max_size=3,
)


INNER = {"type": "object", "properties": {"b": {"type": "string", "x-mcp-header": "Two"}}}
FIRST = {"type": "string", "x-mcp-header": "One"}
THIRD = {"type": "string", "x-mcp-header": "Three"}


@given(SCHEMAS, ARGUMENTS, HEADERS)
@example(
    {"type": "object", "properties": {"a": FIRST, "c": INNER, "d": THIRD}},
    {"a": "x", "c": {"b": "x"}, "d": "x"},
    [],
)
@example(
    {"type": "object", "properties": {"c": INNER, "d": THIRD}},
    {"c": {"b": "x"}, "d": "x"},
    [],
)
def test_what_is_kept_of_a_schema_says_the_same(
    schema: Any, arguments: dict[str, Any], headers: list[tuple[str, str]]
) -> None:
    kept = header_schema(schema)
    sent = param_headers(schema, arguments)
    assert param_headers(kept, arguments) == sent
    own = [(name.lower(), value) for name, value in sent.items()]
    assert refusal(schema, arguments, own) is None is refusal(kept, arguments, own)
    assert refusal(kept, arguments, headers) == refusal(schema, arguments, headers)
    assert header_schema(kept) == kept


def refusal(
    schema: Any, arguments: dict[str, Any], headers: list[tuple[str, str]]
) -> tuple[int, str] | None:
    try:
        check_param_headers(schema, arguments, headers)
    except RpcError as error:
        return error.code, error.message
    return None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 60)), max_size=30))
def test_what_is_kept_of_a_server_is_bounded(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header_schemas, "MAX_KEPT_BYTES", 100)
        patch.setattr(header_schemas, "MAX_TOOLS", 3)
        schemas = HeaderSchemas()
        for name, size in steps:
            schema = {"x": "y" * size}
            schemas.keep(name, schema)
            assert schemas.get(name) == schema, "what was listed last is there"
            assert schemas.kept_bytes <= 100 and len(schemas) <= 3
        schemas.keep("a", {"x": "y" * 100})
        assert schemas.get("a") is None, "what is longer than all may be is not kept"
        schemas.clear()
        assert (len(schemas), schemas.kept_bytes) == (0, 0)


async def test_a_flood_of_schemas_is_not_kept_and_headers_are_checked_all_the_same(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes are kept of 20 pages of half a megabyte each; also where they are too many."""
    filler = {"type": "object", "description": "x" * 100_000}
    named = {"properties": {"city": {"type": "string", "x-mcp-header": "City"}}}

    def flooding(server: Any, writer: Any, message: Any) -> bytes:
        if message["method"] != "tools/list":
            return whole({"jsonrpc": "2.0", "id": message["id"], "result": {"content": []}})
        page = int(message["params"].get("cursor", "0"))
        tools = [{"name": f"t{page}.{number}", "inputSchema": filler} for number in range(5)]
        if page == 10:
            tools.insert(0, {"name": "weather", "inputSchema": named})
        result: dict[str, Any] = {"tools": tools}
        if page < 19:
            result["nextCursor"] = str(page + 1)
        return whole({"jsonrpc": "2.0", "id": message["id"], "result": result})

    params = {"name": "weather", "arguments": {"city": "Rome"}}
    for most in (MAX_TOOLS, 3):
        monkeypatch.setattr(header_schemas, "MAX_TOOLS", most)
        server = Attacker(flooding)
        async with attacked(redis, server) as client:
            cursor: str | None = None
            for _ in range(20):
                asked = {} if cursor is None else {"cursor": cursor}
                page = await ask_modern(client, "/mcp", "tools/list", asked)
                cursor = page["result"].get("nextCursor")
            refused = await ask_modern(client, "/mcp", "tools/call", params)
            assert "Mcp-Param-City header is missing" in refused["error"]["message"]
            message, headers = modern("tools/call", params)
            headers["mcp-param-city"] = "Rome"
            answer = await client.post("/mcp", json=message, headers=headers)
            assert answer.status_code == 200
            endpoint = client.bridge.endpoint("org_alice")
            assert endpoint is not None
            schemas = endpoint.upstreams[0].schemas
            assert schemas.kept_bytes < 2_000 and len(schemas) == min(most, 101)
        called = [head for head, message in server.heard if message.get("method") == "tools/call"]
        assert len(called) == 1 and "mcp-param-city: rome" in called[0]
