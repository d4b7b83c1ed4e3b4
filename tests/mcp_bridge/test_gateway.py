"""The bridge behind a whole gateway of two workers: who is let in where, and both eras there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import msgspec
import openai
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from openai import AsyncOpenAI

from billing.events import Attempt
from billing.spool.format import Checkpoint, CloseRecord, OpenRecord, scan
from gateway.home import Home
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, chunk, usage_chunk
from tests.journeys.upstreams import live_upstreams
from tests.mcp_bridge.counting import Counting, counting
from tests.mcp_bridge.fixture_data import PLAIN
from tests.mcp_bridge.processes import (
    ACCEPT,
    ERAS,
    LegacyClient,
    Process,
    ask_modern,
    last_of,
    modern,
    running,
)
from tests.stack import Stack
from tests.stack import running as running_stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),
]
CONFIG = """
[[model]]
name = "b"
upstream = "MODEL"

[[mcp.servers]]
name = "old"
url = "OLD"
network = "loopback"
namespace = "identity"
trust = "all"

[[mcp.servers]]
name = "new"
url = "NEW"
network = "loopback"
namespace = "second"
trust = "all"

[[mcp.servers]]
name = "unknown"
url = "NEW"
network = "loopback"
namespace = "third"

[[mcp.servers]]
name = "counted"
url = "COUNTED"
network = "loopback"
namespace = "fourth"
trust = "all"
"""


class World(msgspec.Struct, frozen=True, kw_only=True):
    stack: Stack
    servers: list[Process]
    counted: Counting
    key: str
    key_id: str
    org_id: str
    project_id: str

    @property
    def whole(self) -> str:
        return f"{self.stack.base_url}/mcp/{self.org_id}"

    @property
    def identity(self) -> str:
        return f"{self.whole}/{self.project_id}/identity"


async def looking(exchange: Exchange) -> None:
    """A model that calls the tool it is told of, and never ends what it says of the result."""
    await exchange.begin_stream()
    told = exchange.body["messages"][-1]
    if told["role"] == "tool":
        await exchange.send(chunk("It is "))
        await exchange.hang()
        return
    function = {"name": told["content"], "arguments": "{}"}
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}
    called = chunk()
    called["choices"][0]["delta"] = {"tool_calls": [call]}
    await exchange.send(called, chunk(finish="tool_calls"), usage_chunk(), "[DONE]")
    await exchange.end_stream()


def new_key(stack: Stack, *scopes: str) -> tuple[str, str]:
    """Its id, and itself."""
    options = [part for scope in scopes for part in ("--scope", scope)]
    made = msgspec.json.decode(stack.run("keys", "create", "--json", "--name", "k", *options))
    return made["id"], made["key"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    fixtures = running(*(("fixture_server", "--era", era) for era in ERAS))
    with fixtures as servers, counting() as counted, live_upstreams(1) as (model,):
        model.play(looking)
        config = CONFIG.replace("OLD", servers[0].url).replace("NEW", servers[1].url)
        config = config.replace("COUNTED", counted.url).replace("MODEL", model.base_url)
        with running_stack(config=config, workers=2) as stack:
            key_id, key = new_key(stack, "mcp:call")
            found = asyncio.run(stack.sql("SELECT org_id, id FROM projects"))
            yield World(
                stack=stack,
                servers=servers,
                counted=counted,
                key=key,
                key_id=key_id,
                org_id=found[0][0],
                project_id=found[0][1],
            )


@asynccontextmanager
async def client_of(world: World, url: str, mode: Any) -> AsyncIterator[Client]:
    headers = {"authorization": f"Bearer {world.key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=20) as http:
        async with Client(streamable_http_client(url, http_client=http), mode=mode) as client:
            yield client


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_one_url_has_every_server(world: World, mode: str) -> None:
    """Each page is of one server; each name begins with its server's."""
    async with client_of(world, world.whole, mode) as client:
        names: list[str] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            names += [tool.name for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
        for server in ("old", "new"):
            assert {f"{server}__{name}" for name in PLAIN} <= set(names)
            found = await client.call_tool(f"{server}__test_simple_text", {})
            assert found.content[0].text.startswith("This is a simple")  # type: ignore[union-attr]
        prompt = await client.get_prompt("new__test_simple_prompt")
        assert prompt.messages
        with pytest.raises(MCPError, match="Several servers have this resource: old, new"):
            await client.read_resource("test://static-text")


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_namespace_of_one_keeps_names(world: World, mode: str) -> None:
    async with client_of(world, world.identity, mode) as client:
        found = await client.call_tool("test_simple_text", {})
        assert not found.is_error
        assert (await client.read_resource("test://static-text")).contents


async def test_the_bare_path_is_the_credentials_orgs(world: World, http: httpx.AsyncClient) -> None:
    message, headers = modern("tools/call", {"name": "new__test_simple_text", "arguments": {}})
    headers["authorization"] = f"Bearer {world.key}"
    answer = await http.post(f"{world.stack.base_url}/mcp", json=message, headers=headers)
    assert not last_of(answer)["result"].get("isError")


async def test_a_session_is_of_one_endpoint(world: World, http: httpx.AsyncClient) -> None:
    http.headers["authorization"] = f"Bearer {world.key}"
    client = await LegacyClient.open(http, world.identity)
    assert "result" in await client.ask(world.identity, "ping")
    elsewhere = await client.send(world.whole, {"jsonrpc": "2.0", "id": 1, "method": "ping"})
    assert elsewhere.status_code == 404


async def test_nobody_else_is_let_in(world: World, http: httpx.AsyncClient) -> None:
    """With a way to find out how, wherever the path leads."""
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    inference = world.stack.create_key("--scope", "inference")
    other = world.whole[:-1] + ("0" if world.whole[-1] != "0" else "1")
    for url, key, status in (
        (world.whole, None, 401),
        (world.identity, None, 401),
        (world.whole, "wrong", 401),
        (world.whole, inference, 403),
        (other, world.key, 401),
        (f"{world.whole}/proj_other/identity", world.key, 401),
        (f"{world.whole}/{world.project_id}/nothing", world.key, 404),
    ):
        headers = {**ACCEPT} if key is None else {**ACCEPT, "authorization": f"Bearer {key}"}
        answer = await http.post(url, json=message, headers=headers)
        assert answer.status_code == status, (url, answer.text)
        if status in (401, 403):
            path = "/".join(httpx.URL(url).path.split("/")[:3])
            metadata = f"/.well-known/oauth-protected-resource{path}"
            assert metadata in answer.headers["www-authenticate"]


async def test_a_page_of_another_origin_is_not_let_in(
    world: World, http: httpx.AsyncClient
) -> None:
    message, headers = modern("server/discover")
    headers["authorization"] = f"Bearer {world.key}"
    for more, status in (
        ({"origin": "http://evil.example.com"}, 403),
        ({"host": "evil.example.com"}, 403),
        ({"origin": f"http://localhost:{world.stack.port}"}, 200),
    ):
        answer = await http.post(world.whole, json=message, headers={**headers, **more})
        assert answer.status_code == status


async def test_the_callers_token_stays_here(world: World, http: httpx.AsyncClient) -> None:
    """Servers get their own credentials, and of the request its message alone."""
    assert world.key not in "".join(str(each) for each in await seen_by_server(world, http))


async def seen_by_server(world: World, http: httpx.AsyncClient) -> list[Any]:
    message, headers = modern("tools/call", {"name": "new__test_headers", "arguments": {}})
    headers |= {"authorization": f"Bearer {world.key}", "cookie": "a=b", "x-own": "canary"}
    answer = await http.post(world.whole, json=message, headers=headers)
    seen = msgspec.json.decode(last_of(answer)["result"]["content"][0]["text"])
    assert "mcp-method" in seen and not {"authorization", "cookie", "x-own"} & set(seen)
    return [seen]


async def test_sessions_and_continuations_outlive_all_workers(
    world: World, http: httpx.AsyncClient
) -> None:
    http.headers["authorization"] = f"Bearer {world.key}"
    session = await LegacyClient.open(http, world.identity)
    call = {"name": "new__test_input_required_result_request_state", "arguments": {}}
    first = (await ask_modern(http, world.whole, "tools/call", call))["result"]
    await asyncio.to_thread(kill_workers, world)
    async with httpx.AsyncClient(headers=http.headers, timeout=20) as again:
        session.http = again
        found = await session.ask(world.identity, "tools/call", {"name": "test_simple_text"})
        assert "result" in found
        params = {
            **call,
            "requestState": first["requestState"],
            "inputResponses": {"confirm": {"action": "accept", "content": {"ok": True}}},
        }
        second = await ask_modern(again, world.whole, "tools/call", params)
        assert "state-ok" in second["result"]["content"][0]["text"]


def kill_workers(world: World) -> None:
    """All, by kill -9; and until others are ready."""
    before = set(world.stack.pids("gateway", "worker"))
    for pid in before:
        os.kill(pid, signal.SIGKILL)

    def are_new() -> bool:
        found = set(world.stack.pids("gateway", "worker"))
        return len(found) == 2 and not found & before

    world.stack.wait("all are new", are_new)
    world.stack.wait_ready()


class Loop:
    """A response whose model calls a tool, of a key of its own."""

    def __init__(self, world: World, tool: str) -> None:
        self.key_id, self.secret = new_key(world.stack, "mcp:call", "inference")
        self.world, self.tool = world, tool

    async def run(self) -> None:
        """Until its worker is gone."""
        url = f"{self.world.stack.base_url}/v1"
        tools: Any = [{"type": "mcp", "server_label": "counted", "require_approval": "never"}]
        async with AsyncOpenAI(api_key=self.secret, base_url=url, max_retries=0) as client:
            with pytest.raises((httpx2.TransportError, openai.APIConnectionError)):
                async for _ in await client.responses.create(
                    model="b", input=f"counted__{self.tool}", tools=tools, stream=True
                ):
                    continue

    def answers(self) -> bool:
        """Tell whether some of a round that is under way is on disk."""
        logs = Home(self.world.stack.home).spool.rglob("*.log")
        records = [placed.record for log in logs for placed in scan(written(log))]
        opened = {
            each.attempt.id
            for each in records
            if isinstance(each, OpenRecord) and self.is_round(each.attempt)
        }
        opened -= {each.event.id for each in records if isinstance(each, CloseRecord)}
        return any(isinstance(each, Checkpoint) and each.attempt_id in opened for each in records)

    def is_round(self, attempt: Attempt) -> bool:
        return attempt.key == self.key_id and attempt.model == "b"


def written(log: Path) -> bytes:
    try:
        return log.read_bytes()
    except FileNotFoundError:  # what was shipped goes
        return b""


async def booked(world: World, key_id: str) -> list[tuple[str, str, int]]:
    """Return what was booked of its rounds, and its calls of `counted`."""
    told = "SELECT model, finish, tool_call FROM usage_events WHERE model IN ('b', 'mcp/counted')"
    told += f" AND key = '{key_id}' ORDER BY id"
    return [tuple(row) for row in await world.stack.sql(told)]


async def test_a_kill_amid_calls_and_loops_leaves_each_on_the_bill_once(
    world: World, http: httpx.AsyncClient
) -> None:
    """And calls before it, whose results were told. A client's call, a loop that waits for its
    tool, and one between its tool's result and its answer: nothing of them is done again."""
    http.headers["authorization"] = f"Bearer {world.key}"
    url, before = f"{world.whole}/{world.project_id}/fourth", len(world.counted.called)
    calls, answers = [await asyncio.to_thread(Loop, world, tool) for tool in ("hold", "look")]
    for _ in range(3):
        look = {"name": "counted__look", "arguments": {}}
        assert "result" in await ask_modern(http, url, "tools/call", look)
    hold = {"name": "counted__hold", "arguments": {}}
    cut = asyncio.create_task(ask_modern(http, url, "tools/call", hold))
    loops = [asyncio.create_task(each.run()) for each in (calls, answers)]

    def is_amid() -> bool:
        return world.counted.called[before:].count("hold") == 2 and answers.answers()

    try:
        await asyncio.to_thread(world.stack.wait, "all are under way", is_amid)
        await asyncio.to_thread(kill_workers, world)
        with pytest.raises(httpx.TransportError):
            await cut
        await asyncio.gather(*loops)
    finally:
        for each in (cut, *loops):
            each.cancel()
        world.counted.release.set()

    ended = ("done", "done", "done", "recovered")
    mine = [("mcp/counted", finish, 1) for finish in ended]
    called = [("b", "done", 0), ("mcp/counted", "recovered", 1)]
    answered = [("b", "done", 0), ("mcp/counted", "done", 1), ("b", "recovered", 0)]
    keys = (world.key_id, calls.key_id, answers.key_id)

    async def all_is_booked() -> bool:
        counts = [len(await booked(world, key_id)) for key_id in keys]
        return counts == [4, 2, 3]

    await until(all_is_booked)
    await asyncio.to_thread(world.stack.wait_booked)
    assert [await booked(world, key_id) for key_id in keys] == [mine, called, answered]
    assert sorted(world.counted.called[before:]) == ["hold"] * 2 + ["look"] * 4
    assert await asyncio.to_thread(world.stack.run, "reconcile") == "The books balance.\n"


@pytest.mark.nightly
async def test_the_command_line_examines_servers_and_calls_tools(world: World) -> None:
    def tollgate(*arguments: str) -> str:
        config = world.stack.home.parent / "tollgate.toml"
        return world.stack.run("mcp", *arguments, "--config", str(config))

    said = await asyncio.to_thread(tollgate, "doctor")
    assert [line.split()[:2] for line in said.splitlines()] == [
        ["ok", f"{name}"] for name in ("old", "new", "unknown", "counted")
    ]
    there = ("--key", world.key, "--url", world.stack.base_url)
    called = await asyncio.to_thread(tollgate, "call", "counted", "look", '{"n": 1}', *there)
    assert msgspec.json.decode(called)["content"][0]["text"] == "all is well"


async def third_names(world: World, http: httpx.AsyncClient) -> set[str]:
    message, headers = modern("tools/list")
    headers["authorization"] = f"Bearer {world.key}"
    url = f"{world.whole}/{world.project_id}/third"
    answer = await http.post(url, json=message, headers=headers)
    return {each["name"] for each in last_of(answer)["result"]["tools"]}


async def third_call(world: World, http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    message, headers = modern("tools/call", {"name": f"unknown__{name}", "arguments": {}})
    headers["authorization"] = f"Bearer {world.key}"
    url = f"{world.whole}/{world.project_id}/third"
    return last_of(await http.post(url, json=message, headers=headers))


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait for `check`: what was announced is known to every worker within a second."""
    async with asyncio.timeout(90):
        while not await check():
            await asyncio.sleep(0.05)


@pytest.mark.nightly
async def test_what_is_approved_on_the_command_line_is_what_there_is(
    world: World, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    """A pinned server: nothing, one tool, and by the rules a call that waits for a person."""

    def tollgate(*arguments: str) -> str:
        config = world.stack.home.parent / "tollgate.toml"
        return world.stack.run("mcp", *arguments, "--config", str(config))

    assert await third_names(world, http) == set()
    assert "error" in await third_call(world, http, "test_simple_text")
    shown = await asyncio.to_thread(tollgate, "diff", "unknown")
    assert "new       tool test_simple_text" in shown and "new       launch" in shown
    await asyncio.to_thread(tollgate, "approve", "unknown", "--tool", "test_simple_text")
    only = {"unknown__test_simple_text"}

    async def only_that() -> bool:
        return await third_names(world, http) == only

    await until(only_that)
    found = await third_call(world, http, "test_simple_text")
    assert found["result"]["_meta"]["tollgate/provenance"]["server"] == "unknown"
    assert "error" in await third_call(world, http, "test_image_content")

    rules = tmp_path / "rules.json"
    rules.write_text('[{"id": "ask", "effect": "ask", "tools": ["unknown__*"]}]')
    await asyncio.to_thread(tollgate, "rules", str(rules))

    async def asks() -> bool:
        return "error" in await third_call(world, http, "test_simple_text")

    await until(asks)
    waiting = (await third_call(world, http, "test_simple_text"))["error"]["data"]
    assert waiting["reason"] == "approval_required"
    assert waiting["approvalId"] in await asyncio.to_thread(tollgate, "calls")
    assert await asyncio.to_thread(tollgate, "calls", "--show", waiting["approvalId"]) == "{}\n"
    await asyncio.to_thread(tollgate, "calls", "--allow", waiting["approvalId"])
    assert "result" in await third_call(world, http, "test_simple_text")
    assert "error" in await third_call(world, http, "test_simple_text")
    rules.write_text('[{"id": "lost", "effect": "deny", "tools": ["nobody__*"]}]')
    assert "nobody__*" in await asyncio.to_thread(tollgate, "rules", str(rules))
    rules.write_text("[]")
    await asyncio.to_thread(tollgate, "rules", str(rules))
    await asyncio.to_thread(
        tollgate, "approve", "unknown", "--revoke", "--tool", "test_simple_text"
    )

    async def nothing() -> bool:
        return await third_names(world, http) == set()

    await until(nothing)
    told = "SELECT action FROM audit_entries WHERE action LIKE 'mcp.%'"

    async def recorded() -> bool:
        actions = [row[0] for row in await world.stack.sql(told)]
        return {"mcp.listed", "mcp.denied", "mcp.called", "mcp.approved", "mcp.revoked"} <= set(
            actions
        ) and sum("approval" in action for action in actions) >= 3

    await until(recorded)
    whole = await asyncio.to_thread(world.stack.run, "audit", "verify")
    assert "BROKEN" not in whole
