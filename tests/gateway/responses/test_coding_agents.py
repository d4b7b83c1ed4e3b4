"""Tests coding agents at /v1/responses before the whole application: the requests of Codex as they
were recorded, reasoning that comes back sealed, conversations that are made shorter."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI

from engine.config import EngineConfig
from engine.fake.engine import FakeCore
from gateway.request_errors import UnsupportedField
from gateway.responses.creation import to_tools
from gateway.responses.kept import ResponseOwner
from gateway.wire.openai_responses.from_responses import read_response
from tests.databases import Databases
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, chunk, usage_chunk
from tests.gateway.responses.test_responses import neighbour, to_client
from tests.gateway.routes.openapi.fresh import fresh_worker
from tests.gateway.routes.openapi.running import TIMEOUT_S, VOCAB_SIZE, Running
from tests.gateway.wire.recorded_clients import recorded_body
from tests.journeys.sdk.sdk_shapes import extras
from tests.journeys.upstreams import good

CONFIG = EngineConfig(model=Path("fake"), max_model_len=16_384, num_blocks=8192)
SEALED: Any = ["reasoning.encrypted_content"]
HELLO: Any = {"type": "message", "role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("codex")
    core = FakeCore(CONFIG, vocab_size=VOCAB_SIZE)
    with fresh_worker(databases, redis_server_url, folder, core=core) as found:
        yield found


@pytest.fixture
def client(worker: Running) -> Iterator[OpenAI]:
    worker.far.script = good
    with to_client(worker, worker.everything) as client:
        yield client


@pytest.mark.parametrize(
    ("recorded", "model"), [("codex", "near"), ("codex", "far"), ("codex_custom", "far")]
)
def test_what_codex_sends_is_answered(
    client: OpenAI, worker: Running, recorded: str, model: str
) -> None:
    sent = recorded_body(recorded, "/v1/responses", model=model)
    if model == "near":
        sent["max_output_tokens"] = 8  # the model here would write on and on
    headers = {"authorization": f"Bearer {worker.everything}"}
    answer = worker.session.post(
        f"{worker.url}/v1/responses", json=sent, headers=headers, timeout=TIMEOUT_S
    )
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.rstrip().rpartition("data: ")[2])
    assert last["type"] in ("response.completed", "response.incomplete")
    assert "web_search" in last["response"]["metadata"]["tollgate.left_out_tools"]
    assert last["response"]["usage"]["output_tokens"] > 0


def test_an_installation_may_refuse_what_nobody_runs(worker: Running) -> None:
    responses = msgspec.structs.replace(worker.services.responses, refuses_hosted_tools=True)
    body = b'{"model": "m", "input": "x", "tools": [{"type": "web_search"}]}'
    owner = ResponseOwner(worker.org_id, worker.project_id)
    assert not to_tools(worker.services.responses, owner, read_response(body)).functions
    with pytest.raises(UnsupportedField) as caught:
        to_tools(responses, owner, read_response(body))
    assert caught.value.param == "tools[0].type"


# ---- reasoning


THOUGHT = "It is 42."


async def thinks(exchange: Exchange) -> None:
    """Thinks, and says what it read of its earlier thoughts."""
    read = [each.get("reasoning_content") for each in exchange.body["messages"]]
    thought = chunk()
    thought["choices"][0]["delta"] = {"reasoning_content": THOUGHT}
    await exchange.begin_stream()
    said = json.dumps([each for each in read if each])
    await exchange.send(thought, chunk(said), chunk(finish="stop"), usage_chunk(), "[DONE]")
    await exchange.end_stream()


def think(client: OpenAI, *items: Any, **options: Any) -> Any:
    with client.responses.stream(
        model="far", input=[HELLO, *items], include=SEALED, store=False, **options
    ) as stream:
        return stream.get_final_response()


def test_what_was_thought_comes_back_sealed(client: OpenAI, worker: Running) -> None:
    worker.far.script = thinks
    first = think(client)
    assert extras(first) == []
    reasoning, message = (item.to_dict() for item in first.output)
    sealed = reasoning["encrypted_content"]
    readable = sealed.encode() + base64.urlsafe_b64decode(sealed.rpartition(".")[2])
    assert THOUGHT.encode() not in readable and first.output_text == "[]"
    carried = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    assert think(client, carried, message, HELLO).output_text == json.dumps([THOUGHT])
    wrong = {**carried, "encrypted_content": sealed[:-8] + "AAAAAAAA"}
    with pytest.raises(openai.BadRequestError) as caught:
        think(client, wrong, message, HELLO)
    assert caught.value.param == "input[1].encrypted_content"
    with to_client(worker, neighbour(worker)) as other:
        with pytest.raises(openai.BadRequestError) as caught:
            think(other, carried, message, HELLO)
    assert caught.value.param == "input[1].encrypted_content"


def test_nothing_is_sealed_where_nothing_was_thought_or_asked_for(
    client: OpenAI, worker: Running
) -> None:
    assert [item.type for item in think(client).output] == ["message"]
    worker.far.script = thinks
    plain = client.responses.create(model="far", input="x", store=False, stream=True)
    *_, last = plain
    assert last.type == "response.completed"
    assert getattr(last.response.output[0], "encrypted_content", None) is None


# ---- conversations made shorter


def compact(client: OpenAI, **asked: Any) -> dict[str, Any]:
    """Ask for it with the SDK, whose types have no place for the messages of the user in what is
    left of a conversation; OpenAI documents them there."""
    answer = client.responses.with_raw_response.compact(**asked)
    found: dict[str, Any] = json.loads(answer.text)
    return found


def test_a_conversation_is_made_shorter_and_goes_on(client: OpenAI, worker: Running) -> None:
    told: Any = [HELLO, {"type": "message", "role": "assistant", "content": "Hi!"}, HELLO]
    before = len(worker.far.exchanges)
    compacted = compact(client, model="far", input=told, instructions="Be brief.")
    assert compacted["object"] == "response.compaction"
    *said, summary = compacted["output"]
    assert [each["role"] for each in said] == ["user", "user"]
    assert summary["type"] == "compaction"
    assert compacted["usage"]["output_tokens"] > 0
    asked = worker.far.exchanges[before].body["messages"]
    assert [each["role"] for each in asked] == ["system", "user", "assistant", "user", "user"]
    assert "Sum up" in asked[-1]["content"]
    going_on: Any = [*said, summary, HELLO]
    client.responses.create(model="far", input=going_on, store=False)
    read = worker.far.exchanges[-1].body["messages"]
    assert "Hello there" in read[2]["content"]  # what the upstream had said
    assert read[-1]["content"] == "Hello"
    counted = client.responses.input_tokens.count(model="far", input=going_on)
    assert counted.input_tokens > 0


def test_what_is_made_shorter_may_be_kept_and_is_nobody_elses(
    client: OpenAI, worker: Running
) -> None:
    first = client.responses.create(model="near", input="Hello", max_output_tokens=6)
    codex = {"tools": [{"type": "web_search"}], "parallel_tool_calls": True, "reasoning": {}}
    compacted = compact(client, model="far", previous_response_id=first.id, extra_body=codex)
    summary = compacted["output"][-1]
    mine: Any = [summary, HELLO]
    client.responses.create(model="far", input=mine)
    with to_client(worker, neighbour(worker)) as other:
        for ask in (other.responses.create, other.responses.compact):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(model="far", input=mine)
            assert caught.value.param == "input[0].encrypted_content"
    with pytest.raises(openai.BadRequestError) as caught:
        compact(client, model="far")
    assert caught.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(compacted["id"])
