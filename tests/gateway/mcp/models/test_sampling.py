"""Servers that want a model to write, in front of a worker as it runs: what its own model writes
is of whoever called the server, on their bill and within their money."""

from __future__ import annotations

import asyncio
import re
import threading
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

from billing.reconciliation.checks import check_ledger
from gateway.db import tenant
from gateway.mcp.models.sampling import ModelSampler
from gateway.mcp.models.sampling_turns import to_chat, to_result
from gateway.settings.file import SettingsError, WrittenMcpSampling
from gateway.settings.load import load
from gateway.tenancy.keys.keys import create_key
from gateway.wire.openai.chat_answer import (
    AnswerCall,
    AnswerChoice,
    AnswerFunction,
    AnswerMessage,
    ChatCompletion,
)
from mcp_bridge.protocol import continuation
from mcp_bridge.protocol.rpc import INVALID_PARAMS, LIMITED, RpcError
from mcp_bridge.routing.sampling import SampleCount
from mcp_bridge.server import legacy as legacy_face
from mcp_bridge.server import modern as modern_face
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker, mcp_client
from tests.gateway.routes.openapi.running import ACTOR, TIMEOUT_S, Running
from tests.gateway.tools.scripted import SEEN, TOKENIZER, core, script
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
        ("", '{by = "engine", model = "near", max_tokens = 200, max_per_call = 3}'),
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
        given = {"core": core(), "more": more}
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server", SERVERS)
def test_our_model_calls_tools_that_a_server_has(worker: Running, server: str, mode: str) -> None:
    """The server runs the calls, as its SDK asks for it, and goes on with the results."""
    key_id, secret = new_key(worker)
    both: Any = [("sums_add", {"a": 2, "b": 3}), ("sums_add", {"a": 4, "b": 5})]
    prompt = script(both, [("sums_add", {"a": 6, "b": 7})])
    name = f"{server}__test_sampling_with_tools"
    seen = len(SEEN)
    assert called(worker, secret, mode, name, {"prompt": prompt}) == (
        "LLM response: Done after 2 rounds."
    )
    last = TOKENIZER.decode(SEEN[-1][0], skip_special_tokens=False)
    assert len(SEEN) == seen + 3
    results = re.findall(r"<tool_response>\s*(\d+)\s*</tool_response>", last)
    assert results == ["5", "9", "13"]
    models = [row.model for row in until(worker, 4, BOOKED, key=key_id)]
    assert models == [f"mcp/{server}", "near", "near", "near"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server", SERVERS)
def test_a_spent_budget_is_told_by_name(worker: Running, server: str, mode: str) -> None:
    key_id, secret = new_key(worker)
    cap = {"key_id": key_id, "period": "total", "amount_usd": "0.000001"}
    worker.post("/v1/admin/spend-caps", **cap)
    error = refusal_of(worker, secret, mode, f"{server}__test_sampling")
    assert (error.code, error.message) == (LIMITED, "The budget is spent")
    (entry,) = until(worker, 1, SAMPLED, key=key_id)
    assert msgspec.json.decode(entry.after)["outcome"] == "refused"
    assert "near" not in [row.model for row in rows(worker, BOOKED, key=key_id)]


COSTS = "SELECT uncached_input_pico + cache_read_pico + output_pico AS pico FROM usage_events"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server", SERVERS)
def test_a_loop_of_samplings_ends_with_the_callers_money(
    worker: Running, server: str, mode: str
) -> None:
    """The calls together spend no more than the cap, whatever each of them may sample."""
    key_id, secret = new_key(worker)
    cap_pico = 100_000_000
    cap = {"key_id": key_id, "period": "total", "amount_usd": f"{cap_pico / 10**12:.6f}"}
    worker.post("/v1/admin/spend-caps", **cap)
    name, arguments = f"{server}__test_sampling", {"prompt": "Write.", "times": 3}
    ended = None
    for _ in range(20):
        try:
            called(worker, secret, mode, name, arguments)
        except (MCPError, ExceptionGroup) as error:
            ended = error
            break
    while isinstance(ended, ExceptionGroup):
        ended = ended.exceptions[0]
    assert isinstance(ended, MCPError) and ended.error.code == LIMITED
    written = [msgspec.json.decode(row.after) for row in rows(worker, SAMPLED, key=key_id)]
    num_done = sum(each["outcome"] == "done" for each in written)
    costs = f"{COSTS} WHERE key = :key AND model = 'near'"
    spent = [row.pico for row in until(worker, max(num_done, 1), costs, key=key_id)]
    assert 0 < sum(spent) <= cap_pico


def test_what_a_chat_refuses_is_told_by_the_servers_name_of_it(worker: Running) -> None:
    key_id, secret = new_key(worker)

    async def ask() -> Any:
        services = worker.services
        assert services.mcp is not None
        principal = await services.authenticator.authenticate(secret)
        sampler = services.mcp._bridge._sampler
        assert sampler is not None
        wish = {**WISH, "tools": [{**TOOL, "inputSchema": {"type": "array"}}]}
        with pytest.raises(RpcError) as raised:
            await sampler.sample(services.mcp.caller_of(principal), "new", wish)
        return raised.value

    error = worker.run(ask())
    assert (error.code, error.data) == (INVALID_PARAMS, {"field": "tools.0.inputSchema"})
    assert rows(worker, BOOKED, key=key_id) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("asks", ["at once", "in a loop"])
def test_a_call_has_so_many_answers(worker: Running, server: str, mode: str, asks: str) -> None:
    key_id, secret = new_key(worker)
    name, arguments = f"{server}__test_sampling", dict[str, Any](times=4)
    if asks == "in a loop":
        rounds: Any = [[("sums_add", {"a": number, "b": 1})] for number in range(4)]
        name, arguments = f"{name}_with_tools", {"prompt": script(*rounds)}
    error = refusal_of(worker, secret, mode, name, **arguments)
    assert error.message == "The server asked for a model too often"
    assert error.data == {"server": server, "reason": "too_many_samples", "limit": 3}
    assert len(until(worker, 3, SAMPLED, key=key_id)) == 3


TOOL_USE = {
    "role": "assistant",
    "model": "near",
    "stopReason": "toolUse",
    "content": [{"type": "tool_use", "id": "1", "name": "sums_add", "input": {"a": 1, "b": 1}}],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server", SERVERS)
def test_a_loop_of_samplings_ends_with_the_time_of_its_call(
    worker: Running, server: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the server may ask, and whoever writes meanwhile."""
    rounds, given_up = list[str](), threading.Event()

    async def write(self: Any, caller: Any, server: str, params: Any) -> dict[str, Any]:
        rounds.append(server)
        if len(rounds) > 2:
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()
        return TOOL_USE

    monkeypatch.setattr(ModelSampler, "sample", write)
    monkeypatch.setattr(SampleCount, "take", lambda self: None)
    _, secret = new_key(worker)
    for call_s in (0.5, 2.0, 8.0):  # a busy machine may not come to the third round at first
        for module in (continuation, legacy_face, modern_face):
            monkeypatch.setattr(module, "CALL_S", call_s)
        rounds.clear()
        error = refusal_of(worker, secret, mode, f"{server}__test_sampling_with_tools")
        assert (error.message, error.data) == ("It took too long", {"reason": "call_time"})
        if given_up.wait(call_s):
            return
    raise AssertionError(rounds)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_sees_whether_it_may_ask(worker: Running, server: str, mode: str) -> None:
    """A server sees that whatever its client claims."""

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
        while not services.generation.open_calls:
            await asyncio.sleep(0)
        generating = list(services.generation.open_calls)
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
TOOL: dict[str, Any] = {"name": "sums.add", "inputSchema": {"type": "object"}}
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
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [TOOL, {**TOOL, "name": "sums_add"}]}, "tools.1.name"),
        ({"tools": [{**TOOL, "name": "a" * 129}]}, "tools.0.name"),
        ({"tools": [{**TOOL, "name": f"t{n}"} for n in range(129)]}, "tools"),
        ({"toolChoice": {"mode": "required"}}, "toolChoice"),
        ({"tools": [TOOL], "toolChoice": {"mode": "sums.add"}}, "toolChoice.mode"),
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
    assert raised.value.code == INVALID_PARAMS
    assert raised.value.data == {"field": field} and field in raised.value.message


def use(id: str, **input: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "sums.add", "input": input}


def result(id: str, *said: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": each} for each in said]
    return {"type": "tool_result", "toolUseId": id, "content": content, **more}


def said(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def test_calls_and_their_results_are_turns_of_a_chat() -> None:
    """In the order of the calls; a name that functions cannot have is another one there."""
    messages = [
        *WISH["messages"],
        said("assistant", {"type": "text", "text": "Let me see."}, use("a", n=1), use("b", n=2)),
        said("user", result("b", "no", isError=True), result("a", structuredContent={"n": 1})),
    ]
    more = {"tools": [{**TOOL, "description": "Adds."}], "toolChoice": {"mode": "required"}}
    chat = msgspec.json.decode(to_chat(OURS, {**WISH, "messages": messages, **more}))
    calls = [
        {"id": id, "type": "function", "function": {"name": "sums_add", "arguments": arguments}}
        for id, arguments in (("a", '{"n":1}'), ("b", '{"n":2}'))
    ]
    assert chat["messages"][1:] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": '{"n":1}'},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no"},
    ]
    shown = {"name": "sums_add", "description": "Adds.", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": shown}]
    assert chat["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([said("assistant", use("a"))], "Tool result missing in request: 'a'"),
        ([said("assistant", use("a")), said("user", {"type": "text", "text": "?"})], "missing"),
        ([said("assistant", use("a")), said("assistant", result("a"))], "Tool result missing"),
        ([said("assistant", use("a"), use("b")), said("user", result("a"))], "missing.*'b'"),
        ([said("assistant", use("a")), said("user", result("a"), result("b"))], "'b'"),
        ([said("assistant", use("a")), said("user", result("a"), result("a"))], "same call"),
        (
            [
                said("assistant", use("a")),
                said("user", result("a"), {"type": "text", "text": "and"}),
            ],
            "Tool results mixed with other content",
        ),
        ([said("user", result("a"))], "not in the message before"),
        ([said("user", use("a")), said("user", result("a"))], "only the assistant"),
        ([said("assistant", use("a"), use("a")), said("user", result("a"))], "the same id"),
    ],
)
def test_calls_and_results_belong_together(messages: list[Any], why: str) -> None:
    with pytest.raises(RpcError, match=why) as raised:
        to_chat(OURS, {**WISH, "messages": messages, "tools": [TOOL]})
    assert raised.value.code == INVALID_PARAMS


def written(reason: str, content: str | None, *calls: tuple[str, str]) -> ChatCompletion:
    made = [
        AnswerCall(id=f"call_{n}", function=AnswerFunction(name, arguments))
        for n, (name, arguments) in enumerate(calls)
    ]
    message = AnswerMessage(content=content, tool_calls=made)
    finish: Any = reason
    unread: Any = None
    return ChatCompletion(
        id="chatcmpl-1",
        created=1,
        model="near",
        choices=[AnswerChoice(index=0, message=message, logprobs=None, finish_reason=finish)],
        usage=unread,
        service_tier=None,
        system_fingerprint=None,
    )


def test_what_the_model_calls_is_told_by_the_servers_name() -> None:
    wish = {**WISH, "tools": [TOOL]}
    found = to_result(written("tool_calls", "So.", ("sums_add", '{"n": 1}')), wish)
    use_ = {"type": "tool_use", "id": "call_0", "name": "sums.add", "input": {"n": 1}}
    assert found["content"] == [{"type": "text", "text": "So."}, use_]
    assert found["stopReason"] == "toolUse"
    cut = to_result(written("length", None, ("sums_add", '{"n"')), wish)
    assert (cut["content"], cut["stopReason"]) == ({"type": "text", "text": ""}, "maxTokens")
    for call in (("sums_add", "[1]"), ("sums_add", '{"n'), ("another", "{}")):
        with pytest.raises(RpcError) as raised:
            to_result(written("tool_calls", None, call), wish)
        assert raised.value.data == {"reason": "invalid_tool_call"}


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
    assert worker.run(check_ledger(worker.services.system_db)) == []
