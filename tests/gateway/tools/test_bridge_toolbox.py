"""The bridge as a toolbox, before servers of both eras."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from redis.asyncio import Redis

from foundation.request_context import LOG_CONTEXT, LogContext
from gateway.mcp.calls import RedisCalls
from gateway.mcp.service.service import to_caller
from gateway.principal import Principal
from gateway.tools.mcp_toolbox import BridgeToolbox, to_tool
from gateway.tools.toolbox import ListFailed, RefusedCall, ToolResult
from gateway.wire.openai_responses.tool_rounds import OfferedTool
from mcp_bridge.server.bridge import Bridge
from mcp_bridge.trust.approvals import Approvals
from mcp_bridge.upstream.upstream import ServerConfig
from tests.mcp_bridge.memory import MemoryApprovals
from tests.mcp_bridge.processes import ERAS, Process, running

INFO = {"name": "tollgate", "version": "0"}
ALICE = Principal(
    org_id="org_1",
    project_id="proj_1",
    key_id="key_1",
    key_hint="a key",
    scopes=frozenset({"inference", "mcp:call"}),
)
LABELS = ("old", "new")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Process]]:
    with running(*(("fixture_server", "--era", era) for era in ERAS)) as found:
        yield found


@pytest.fixture
async def toolbox(servers: list[Process], redis_server_url: str) -> AsyncIterator[BridgeToolbox]:
    redis = Redis.from_url(redis_server_url)
    configs = [
        *(
            ServerConfig(name=label, url=server.url)
            for label, server in zip(LABELS, servers, strict=True)
        ),
        ServerConfig(name="away", url="http://127.0.0.1:1/mcp"),
    ]
    bridge = Bridge(configs, redis, [b"k" * 32], info=INFO)
    await bridge.start()
    queue = Approvals(MemoryApprovals(), now_s=lambda: 0.0, new_id=str, new_nonce=str)
    yield BridgeToolbox(
        bridge, INFO, to_caller, RedisCalls(redis).once, lambda _: queue, lambda *_: 7
    )
    await bridge.close()
    await redis.aclose()


@pytest.mark.parametrize("label", LABELS)
async def test_tools_are_found_and_called(toolbox: BridgeToolbox, label: str) -> None:
    LOG_CONTEXT.set(context := LogContext("req_" + "1" * 32))
    assert toolbox.knows(ALICE, label) and not toolbox.knows(ALICE, "nobody")
    found = {tool.name: tool for tool in await toolbox.offered(ALICE, label)}
    simple = found["test_simple_text"]
    assert simple.alias == f"{label}__test_simple_text"
    result = await toolbox.call(ALICE, simple, {}, 10.0)
    assert isinstance(result, ToolResult) and not result.is_error and result.text
    failed = await toolbox.call(ALICE, found["test_error_handling"], {}, 10.0)
    assert isinstance(failed, ToolResult) and failed.is_error
    image = await toolbox.call(ALICE, found["test_image_content"], {}, 10.0)
    assert isinstance(image, ToolResult) and image.text == "[image: not shown]"
    assert [(each.about, each.outcome) for each in context.stages if each.name == "tool_call"] == [
        (f"{label}/test_simple_text", ""),
        (f"{label}/test_error_handling", "tool_error"),
        (f"{label}/test_image_content", ""),
    ]
    assert context.stages.have_ended


def test_a_model_is_shown_the_same_of_a_list_that_is_written() -> None:
    listed = {
        "name": "s__weather",
        "title": "Weather",
        "description": "Says what the weather is.",
        "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "annotations": {"readOnlyHint": True},
    }
    found = to_tool("s", msgspec.Raw(msgspec.json.encode(listed)))
    assert found == to_tool("s", listed) and found.name == "weather"
    assert found.input_schema == listed["inputSchema"] and found.annotations
    odd = to_tool("s", msgspec.Raw(b'{"name":"s__a","description":1,"inputSchema":[]}'))
    assert (odd.description, odd.input_schema, odd.annotations) == (None, {}, {})


async def test_what_is_away_is_said_so(toolbox: BridgeToolbox) -> None:
    with pytest.raises(ListFailed):
        await toolbox.offered(ALICE, "away")
    away = OfferedTool(server_label="away", name="look")
    assert isinstance(await toolbox.call(ALICE, away, {}, 10.0), RefusedCall)


async def test_an_approval_is_spent_once_in_its_org(toolbox: BridgeToolbox) -> None:
    async with asyncio.TaskGroup() as group:
        tries = [group.create_task(toolbox.spend(ALICE, "mcpr_1")) for _ in range(8)]
    assert sum(each.result() for each in tries) == 1
    assert await toolbox.spend(ALICE, "mcpr_2")
    assert await toolbox.spend(msgspec.structs.replace(ALICE, org_id="org_2"), "mcpr_1")
