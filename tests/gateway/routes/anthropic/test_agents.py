"""Agents that speak Anthropic's messages, with the official SDK, before the whole application: a
long loop of tools whose prompt is cached further with each turn, streams that add up to the whole
answer, clients that leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool

from engine.config import EngineConfig
from engine.fake.engine import FakeCore
from engine.protocol import EngineRequest
from engine.text.tokenizer import Tokenizer
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.gateway.wire.recorded_clients import recorded
from tests.journeys.sdk.sdk_shapes import extras, said_by

PENNY = Path(__file__).resolve().parents[4] / "models" / "penny"
TOKENIZER = Tokenizer.load(PENNY)
CONFIG = EngineConfig(model=Path("fake"), max_model_len=16_384, num_blocks=8192)
SYSTEM = "You are an agent that looks at places, one after the other, and reports. " * 60
NUM_TURNS = 12
ENDLESS = "Write without an end."
LOOK: Any = {
    "name": "look",
    "description": "Look at a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
    },
}
KEPT: Any = {"type": "ephemeral"}


def respond(request: EngineRequest, index: int) -> Iterator[int]:
    """Looks at one place after the other, and reports after the last."""
    text = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False)
    num_seen = text.count("<tool_response>")
    if ENDLESS in text:
        return cycle(TOKENIZER.encode("on and "))
    if "tools" not in text or num_seen >= NUM_TURNS:
        said = f"I have seen {num_seen} places. END of it."
    else:
        call = json.dumps({"name": "look", "arguments": {"place": f"p{num_seen}"}})
        said = f"Next.\n<tool_call>\n{call}\n</tool_call>"
    return iter(TOKENIZER.encode(said))


CORE = FakeCore(CONFIG, vocab_size=TOKENIZER.vocab_size, respond=respond)


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("agents")
    given = {"core": CORE, "near": 'cache_contract = "explicit"'}
    with fresh_worker(databases, redis_server_url, folder, **given) as found:
        yield found


@pytest.fixture
def client(worker: Running) -> Iterator[Anthropic]:
    with Anthropic(
        base_url=worker.url,
        api_key=worker.everything,
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


def asked(**options: Any) -> dict[str, Any]:
    hello = [{"role": "user", "content": "Hello, who are you?"}]
    return {"model": "near", "max_tokens": 100, "messages": hello, **options}


def result(call: Any, marked: bool) -> dict[str, Any]:
    found = {"type": "tool_result", "tool_use_id": call.id, "content": f"{call.input} is fine"}
    return found | ({"cache_control": KEPT} if marked else {})


def test_a_long_loop_reads_what_the_turn_before_had_kept(client: Anthropic) -> None:
    """The breakpoint moves along, on the last block, as agents do it."""
    # Nothing of it is in the cache, whatever was asked before.
    system: Any = [{"type": "text", "text": f"In a loop. {SYSTEM}", "cache_control": KEPT}]
    messages: list[Any] = [{"role": "user", "content": "Look at all places."}]
    kept = 0
    for number in range(NUM_TURNS + 1):
        hit_before = CORE.status().prefix_cache_hit_tokens
        options = {"system": system, "tools": [LOOK], "messages": messages}
        counted = client.messages.count_tokens(model="near", **options)
        with client.messages.stream(**asked(**options)) as stream:
            message = stream.get_final_message()
        usage = message.usage
        read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        assert read is not None and written is not None
        assert usage.input_tokens + read + written == counted.input_tokens
        assert read == kept, f"turn {number}"
        assert CORE.status().prefix_cache_hit_tokens - hit_before >= read
        kept = read + written
        if message.stop_reason != "tool_use":
            break
        *_, call = message.content
        assert call.type == "tool_use" and call.input == {"place": f"p{number}"}
        for earlier in messages[1:]:
            for block in earlier["content"] if earlier["role"] == "user" else ():
                block.pop("cache_control", None)
        messages.append({"role": "assistant", "content": message.content})
        messages.append({"role": "user", "content": [result(call, marked=True)]})
    assert message.stop_reason == "end_turn" and number == NUM_TURNS
    assert f"{NUM_TURNS} places" in message.content[0].text  # type: ignore[union-attr]


SAMPLED = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
"""Sampling fields: versions of the API before 2026-10-21 had them, and so has ours."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "system and sampling": {"system": "Be brief.", "extra_body": SAMPLED},
    "cut": {"max_tokens": 3},
    "stopped": {"stop_sequences": ["nowhere", "END"]},
    "a call": {"tools": [LOOK], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "a call that breaks off": {"tools": [LOOK], "max_tokens": 24},
    "no call": {"tools": [LOOK], "tool_choice": {"type": "none"}},
    "no thoughts": {"thinking": {"type": "disabled"}},
    "labels": {"metadata": {"user_id": "u"}, "service_tier": "auto"},
    "begun": {
        "messages": [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "I am"},
        ]
    },
    "kept": {"cache_control": KEPT, "system": SYSTEM * 2},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_a_stream_adds_up_to_the_whole_answer(client: Anthropic, options: dict[str, Any]) -> None:
    client.messages.create(**asked(**options))  # what is kept is kept from now on
    whole = client.messages.create(**asked(**options))
    assert extras(whole) == []
    with client.messages.stream(**asked(**options)) as stream:
        streamed = stream.get_final_message()
    assert said_by(streamed) == said_by(whole)
    if "stop_sequences" in options:
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "END")
    if "cache_control" in options:
        assert whole.usage.cache_read_input_tokens


def test_the_window_ends_an_answer_that_may_be_longer(client: Anthropic) -> None:
    """As agents ask, for more than there is; a prompt that does not fit is counted all the same."""
    assert (
        client.messages.create(**asked(max_tokens=10**6), timeout=TIMEOUT_S).stop_reason
        == "end_turn"
    )
    long = "word " * 40_000
    counted = client.messages.count_tokens(model="near", system=long, messages=asked()["messages"])
    assert counted.input_tokens > CONFIG.max_model_len  # type: ignore[operator]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**asked(system=long))


def test_who_leaves_is_billed_for_what_was_made(worker: Running) -> None:
    async def leave() -> str:
        async with AsyncAnthropic(base_url=worker.url, auth_token=worker.everything) as client:
            answer = await client.messages.create(**asked())
            assert answer._request_id is not None and answer._request_id.startswith("req_")
            async with client.messages.stream(**asked(max_tokens=16_000, system=ENDLESS)) as stream:
                async for event in stream:
                    if event.type == "text":
                        break
                return stream.current_message_snapshot.id

    message_id = asyncio.run(leave())
    headers = {"authorization": f"Bearer {worker.everything}"}
    deadline = time.monotonic() + TIMEOUT_S
    found: dict[str, Any] = {"finish_reason": None}
    while found["finish_reason"] is None:
        assert time.monotonic() < deadline, found
        answer = worker.session.get(
            f"{worker.url}/api/v1/generation",
            params={"id": message_id},
            headers=headers,
            timeout=TIMEOUT_S,
        )
        found = answer.json()["data"] if answer.ok else found
    assert found["cancelled"] and 0 < found["tokens_completion"] < 16_000


def test_the_sdks_own_loop_of_tools(client: Anthropic) -> None:
    seen: list[str] = []

    @beta_tool
    def look(place: str) -> str:
        """Look at a place.

        Args:
            place: Which.
        """
        seen.append(place)
        return "fine"

    runner = client.beta.messages.tool_runner(**asked(tools=[look]), max_iterations=NUM_TURNS + 1)
    last = runner.until_done()
    assert seen == [f"p{number}" for number in range(NUM_TURNS)]
    assert last.stop_reason == "end_turn"


@pytest.mark.parametrize("model", ["near", "far"])
def test_what_claude_code_sends_is_answered_and_counted(worker: Running, model: str) -> None:
    headers = {"x-api-key": worker.everything}
    assert worker.session.head(f"{worker.url}/", timeout=TIMEOUT_S).status_code == 200
    for sent in recorded("claude_code"):
        body = {**sent["body"], "model": model}
        answer = worker.session.request(
            sent["method"],
            worker.url + sent["path"],
            json=body,
            headers={**sent["headers"], **headers},
            timeout=TIMEOUT_S,
        )
        assert answer.status_code == 200, answer.text
        assert answer.text.rstrip().endswith('data: {"type":"message_stop"}')
    used = json.loads(answer.text.rpartition('"usage":')[2].partition("\n")[0][:-1])
    for name in ("max_tokens", "metadata", "stream"):
        del body[name]
    counted = worker.session.post(
        f"{worker.url}/v1/messages/count_tokens?beta=true",
        json=body,
        headers=headers,
        timeout=TIMEOUT_S,
    )
    assert counted.status_code == 200, counted.text
    if model == "near":  # what an upstream says is its own
        kept = used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
        assert used["input_tokens"] + kept == counted.json()["input_tokens"]


# ---- refusals


def test_refusals_have_anthropics_shape(client: Anthropic, worker: Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**asked(model="nothing"))
    body: Any = missing.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    assert body["request_id"] == missing.value.request_id
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(base_url=worker.url, api_key="wrong").messages.create(**asked())
    with pytest.raises(anthropic.PermissionDeniedError):
        Anthropic(base_url=worker.url, api_key=worker.nothing).messages.create(**asked())
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**asked(), extra_headers={"anthropic-version": "2020-01-01"})
    assert "anthropic-version" in bad.value.message
    betas = {"anthropic-beta": "no-such-beta-2030-01-01"}
    assert client.messages.create(**asked(), extra_headers=betas).content


def test_models_are_listed_as_anthropics_clients_read_them(client: Anthropic) -> None:
    first = client.models.list(limit=1)
    assert [each.id for each in first.data] == ["near"] and first.has_more
    assert [each.id for each in client.models.list(limit=1)] == ["near", "far"]
    assert [each.id for each in client.models.list(before_id="far").data] == ["near"]
    found = client.models.retrieve("near")
    assert extras(found) == [] and found.display_name == "near"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("nothing")


def test_an_upstream_answers_as_a_model_of_ours_does(client: Anthropic) -> None:
    whole = client.messages.create(**asked(model="far"))
    assert extras(whole) == [] and whole.stop_reason == "end_turn"
    assert [block.type for block in whole.content] == ["text"]
    assert client.messages.count_tokens(model="far", messages=asked()["messages"]).input_tokens
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**asked(model="far"), extra_body={"top_k": 5})
    assert "'top_k'" in refused.value.message
