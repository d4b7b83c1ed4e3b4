"""Servers that want a model to write, in front of a worker as it runs: what its own model writes
is of whoever called the server, on their bill and within their money."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
import msgspec
import pytest
import sqlalchemy as sa
from mcp.shared.exceptions import MCPError
from openai import OpenAI

from billing.ledger import check
from gateway.db import tenant
from gateway.mcp.metered import LIMITED
from gateway.mcp.sampling import to_chat
from gateway.settings import load
from gateway.settings_file import SettingsError, WrittenMcpSampling
from gateway.tenancy.keys import create_key
from mcp_bridge.protocol.rpc import RpcError
from tests.databases import Databases
from tests.gateway.openapi.fresh import fresh_worker, mcp_client
from tests.gateway.openapi.running import ACTOR, TIMEOUT_S, Running
from tests.gateway.tool_loop.scripted import core, script
from tests.mcp_bridge.processes import ERAS
from tests.mcp_bridge.processes import running as processes

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
SERVERS = ("old", "new")
CONFIG = "".join(
    f"""
[[mcp.servers]]
name = "{name}{suffix}"
url = "{name.upper()}"
network = "loopback"
trust = "all"
sampling = {sampling}
"""
    for name in SERVERS
    for suffix, sampling in (
        ("", '{by = "engine", model = "near", max_tokens = 50, max_per_call = 3}'),
        ("off", '{by = "off"}'),
    )
)
WRITTEN = "Done after 0 rounds."
MODES = ("legacy", "auto")


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("sampling")
    commands = [("fixture_server", "--port", "0", "--era", era) for era in ERAS]
    with processes(*commands) as (old, new):
        more = CONFIG.replace("OLD", old.url).replace("NEW", new.url)
        given = {"is_patient": True, "core": core(), "more": more}
        with fresh_worker(databases, redis_server_url, folder, **given) as found:
            yield found


def new_key(worker: Running, *more: str) -> tuple[str, str]:
    """Its id and its secret: it may call tools, and no model itself."""
    services = worker.services

    async def work() -> tuple[str, str]:
        pepper_id, pepper = services.authenticator.pepper
        async with tenant(services.db, worker.org_id) as conn:
            made = await create_key(
                conn,
                org_id=worker.org_id,
                project_id=worker.project_id,
                name="caller",
                scopes=["mcp:call", *more],
                pepper=pepper,
                pepper_id=pepper_id,
                actor=ACTOR,
            )
        return made.row.id, made.secret

    return worker.run(work())


def called(
    worker: Running, secret: str, mode: str, name: str, arguments: dict[str, Any], **can: Any
) -> str:
    """Its text. Raises: MCPError."""

    async def work() -> str:
        async with mcp_client(worker, secret, mode, **can) as client:
            found = await client.call_tool(name, arguments)
            return str(found.content[0].text)

    return asyncio.run(work())


def refusal_of(worker: Running, secret: str, mode: str, name: str, **arguments: Any) -> Any:
    with pytest.raises((MCPError, ExceptionGroup)) as raised:
        called(worker, secret, mode, name, {"prompt": "Write.", **arguments})
    error: Any = raised.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error.error


def rows(worker: Running, query: str, **named: Any) -> list[Any]:
    async def read() -> list[Any]:
        async with worker.services.system_db.connect() as conn:
            return list((await conn.execute(sa.text(query), named)).all())

    return worker.run(read())


def until(worker: Running, count: int, query: str, **named: Any) -> list[Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while len(found := rows(worker, query, **named)) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


BOOKED = "SELECT model, finish, output, lane FROM usage_events WHERE key = :key ORDER BY model"
SAMPLED = (
    "SELECT target, after FROM audit_entries"
    " WHERE action = 'mcp.sampled' AND actor_id = :key ORDER BY id"
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server", SERVERS)
def test_our_model_writes_for_who_cannot_and_they_pay(
    worker: Running, server: str, mode: str
) -> None:
    key_id, secret = new_key(worker)
    said = called(worker, secret, mode, f"{server}__test_sampling", {"prompt": "Write."})
    assert said == f"LLM response: {WRITTEN}"
    call, generation = until(worker, 2, BOOKED, key=key_id)
    assert (call.model, call.finish) == (f"mcp/{server}", "done")
    assert (generation.model, generation.finish) == ("near", "done") and generation.output > 0
    (entry,) = until(worker, 1, SAMPLED, key=key_id)
    after = msgspec.json.decode(entry.after)
    assert (entry.target, after.pop("request_id")[:4]) == (server, "req_")
    assert after == {"model": "near", "outcome": "done"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server", SERVERS)
def test_what_only_a_person_can_say_is_asked_of_the_client(
    worker: Running, server: str, mode: str
) -> None:
    """In one breath with what our model writes, which is written once."""
    key_id, secret = new_key(worker)

    async def elicit(context: Any, params: Any) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"name": "Ada"})

    async def roots(context: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[])

    name = f"{server}__test_input_required_result_multiple_inputs"
    said = called(
        worker, secret, mode, name, {}, elicitation_callback=elicit, list_roots_callback=roots
    )
    assert said.startswith("state-ok") and "Ada" in said and WRITTEN in said
    models = [row.model for row in until(worker, 2, BOOKED, key=key_id)]
    assert models.count("near") == 1


@pytest.mark.parametrize("server", SERVERS)
def test_a_spent_budget_is_told_by_name(worker: Running, server: str) -> None:
    key_id, secret = new_key(worker)
    cap = {"key_id": key_id, "period": "day", "amount_usd": "0.000001"}
    worker.post("/v1/admin/spend-caps", **cap)
    error = refusal_of(worker, secret, "auto", f"{server}__test_sampling")
    assert (error.code, error.message) == (LIMITED, "The budget is spent")
    (entry,) = until(worker, 1, SAMPLED, key=key_id)
    assert msgspec.json.decode(entry.after)["outcome"] == "refused"
    assert "near" not in [row.model for row in rows(worker, BOOKED, key=key_id)]


@pytest.mark.parametrize("server", SERVERS)
def test_a_call_has_so_many_answers(worker: Running, server: str) -> None:
    key_id, secret = new_key(worker)
    error = refusal_of(worker, secret, "auto", f"{server}__test_sampling", times=4)
    assert error.message == "The server asked for a model too often"
    assert error.data == {"server": server, "reason": "too_many_samples", "limit": 3}
    assert len(until(worker, 3, SAMPLED, key=key_id)) == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_sees_whether_it_may_ask(worker: Running, server: str, mode: str) -> None:
    """Whatever its client says of itself."""

    async def write(context: Any, params: Any) -> types.CreateMessageResult:
        raise AssertionError("nobody asks the client")

    _, secret = new_key(worker)
    name = "__test_missing_capability"
    assert called(worker, secret, mode, f"{server}{name}", {}) == "It can sample."
    with pytest.raises((MCPError, ExceptionGroup)) as raised:
        called(worker, secret, mode, f"{server}off{name}", {}, sampling_callback=write)
    assert "Needs sampling" in repr(raised.value)


def test_a_tool_that_a_model_calls_may_want_a_model(worker: Running) -> None:
    key_id, secret = new_key(worker, "inference")
    calls: Any = [[("new__test_sampling", {"prompt": "Write."})]]
    server: Any = {"type": "mcp", "server_label": "new", "require_approval": "never"}
    with OpenAI(api_key=secret, base_url=f"{worker.url}/v1", max_retries=0) as client:
        made = client.responses.create(model="near", input=script(*calls), tools=[server])
    call = next(item for item in made.output if item.type == "mcp_call")
    assert call.output == f"LLM response: {WRITTEN}"
    models = [row.model for row in until(worker, 4, BOOKED, key=key_id)]
    assert models == ["mcp/new", "near", "near", "near"]


def test_who_leaves_ends_what_is_written_for_them(worker: Running) -> None:
    key_id, secret = new_key(worker)

    async def leave() -> None:
        services = worker.services
        assert services.mcp is not None
        principal = await services.authenticator.authenticate(secret)
        sampler = services.mcp._bridge._sampler
        assert sampler is not None
        caller = services.mcp.caller_of(principal)
        waiting = asyncio.create_task(sampler.sample(caller, "new", {**WISH, "maxTokens": 50}))
        while not services.desk.open_calls:
            await asyncio.sleep(0)
        generating = list(services.desk.open_calls)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait(generating)

    worker.run(leave())
    (entry,) = until(worker, 1, SAMPLED, key=key_id)
    assert msgspec.json.decode(entry.after)["outcome"] == "left"


WISH: dict[str, Any] = {
    "messages": [{"role": "user", "content": {"type": "text", "text": "Write."}}],
    "maxTokens": 9,
}
OURS = WrittenMcpSampling(by="engine", model="near", max_tokens=50)


def test_a_wish_is_a_chat_within_bounds() -> None:
    more = {"systemPrompt": "Be brief.", "temperature": 0.5, "stopSequences": ["."]}
    hints = {"modelPreferences": {"hints": [{"name": "far"}]}, "includeContext": "none"}
    chat = msgspec.json.decode(to_chat(OURS, {**WISH, **more, **hints, "maxTokens": 1000}))
    assert chat == {
        "model": "near",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Write."},
        ],
        "max_tokens": 50,
        "temperature": 0.5,
        "stop": ["."],
    }


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}, "tools"),
        ({"toolChoice": {"mode": "auto"}}, "toolChoice"),
        ({"task": {"ttl": 1}}, "task"),
        ({"includeContext": "allServers"}, "includeContext"),
        ({"maxTokens": 0}, "maxTokens"),
        ({"maxTokens": "many"}, "maxTokens"),
        ({"messages": None}, "messages"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": {"type": "image", "data": "AA==", "mimeType": "image/png"},
                    }
                ]
            },
            "messages.0.content",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": {"type": "text", "text": "a" * (1024 * 1024)}}
                ]
            },
            "messages",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(RpcError) as raised:
        to_chat(OURS, {**WISH, **wrong})
    assert raised.value.data == {"field": field} and field in raised.value.message


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{by = 'engine'}", "sampling.model: is wanted for by = 'engine'"),
        ("{model = 'm'}", "sampling.model: is wanted for by = 'engine'"),
        ("{by = 'engine', model = 'm'}", "sampling.model: 'm' is no model of this file"),
        ("{by = 'off', max_per_call = 0}", "sampling.max_per_call: expected `int` >= 1"),
    ],
)
def test_a_configuration_that_cannot_be_stops_the_start(
    tmp_path: Path, written: str, said: str
) -> None:
    config = tmp_path / "tollgate.toml"
    config.write_text(
        f"[[mcp.servers]]\nname = 'a'\nurl = 'https://h.example'\nsampling = {written}\n"
    )
    with pytest.raises(SettingsError, match=re.escape(f"mcp.servers[0].{said}")):
        load({"home": tmp_path, "config": config}, {})


def test_the_books_agree(worker: Running) -> None:
    """Behind all others."""
    assert worker.run(check(worker.services.system_db)) == []
