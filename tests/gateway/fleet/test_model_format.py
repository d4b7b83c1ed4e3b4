"""What a model's own folder decides of a request: the settings that its chat template knows, the
form that an answer can have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from engine.chat_template import ChatTemplate
from engine.fake import FakeCore, FakeEngine
from engine.tokenizer import Tokenizer
from gateway.fleet.engine_replica import EngineReplica
from gateway.fleet.errors import BadField, UnsupportedField
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import ReplicaEvent
from gateway.wire.from_openai import from_openai
from gateway.wire.request import GenerateRequest

Make = Callable[..., EngineReplica]


def chat(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    return from_openai(json.dumps(body).encode(), "engine")


@pytest.fixture
def make(tokenizer: Tokenizer, threads: PrepareThreads) -> Make:
    """A replica by the source of its template, before an engine that says these texts."""

    def make_replica(source: str, *texts: str) -> EngineReplica:
        core = FakeCore(
            vocab_size=tokenizer.vocab_size,
            respond=lambda _, index: iter(tokenizer.encode(texts[index])),
        )
        return EngineReplica(
            name="m@0",
            client=FakeEngine(core),
            tokenizer=tokenizer,
            template=ChatTemplate({"default": source}, {}),
            threads=threads,
        )

    return make_replica


async def events(replica: EngineReplica, request: GenerateRequest) -> AsyncIterator[ReplicaEvent]:
    prepared = await replica.prepare(request)
    async with aclosing(replica.stream(prepared, attempt_id="a", cache_salt="org")) as stream:
        async for event in stream:
            yield event


async def test_a_grammar_is_refused_by_the_field_that_asked_for_it(make: Make) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    with pytest.raises(BadField) as caught:  # there is no grammar without a model
        [event async for event in events(make("x", "x"), chat(response_format=schema))]
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("setting", "effort", "shown"),
    [
        ("reasoning_effort", "none", "none"),
        ("reasoning_effort", "high", "high"),
        ("enable_thinking", "none", "False"),
        ("thinking", "minimal", "True"),
        ("neither", "none", ""),
    ],
)
async def test_how_much_to_think_is_told_to_the_template(
    make: Make, tokenizer: Tokenizer, setting: str, effort: str, shown: str
) -> None:
    replica = make("{{ " + setting + " }}!")
    prepared = await replica.prepare(chat(reasoning_effort=effort))
    assert prepared.payload.prompt_token_ids == tokenizer.encode(f"{shown}!")


async def test_a_model_that_does_not_reason_is_told_nothing_else(make: Make) -> None:
    with pytest.raises(UnsupportedField) as caught:
        await make("x").prepare(chat(reasoning_effort="low"))
    assert caught.value.param == "reasoning_effort"
