"""Plain prompts at an upstream: asked at their own paths, passed on as they come, and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.fleet.errors import ReplicaUnavailable
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generate_request import GenerateRequest
from gateway.generation_events import MeteredUsage, RawBody
from gateway.request_errors import BadField
from gateway.wire.openai.completions import from_completions
from gateway.wire.openai.embeddings import from_embeddings
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, Upstream, run

Make = Callable[..., UpstreamReplica]
USAGE = {"prompt_tokens": 7, "total_tokens": 7}


def completion(**fields: Any) -> GenerateRequest:
    return from_completions(json.dumps({"model": "big", **fields}).encode(), "upstream")


def embedding(**fields: Any) -> GenerateRequest:
    return from_embeddings(json.dumps({"model": "big", **fields}).encode(), "upstream")


async def test_embeddings_are_asked_for_where_they_are_made(
    upstream: Upstream, make_replica: Make
) -> None:
    async def answer(exchange: Exchange) -> None:
        data = [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}]
        await exchange.answer({"object": "list", "data": data, "model": "x", "usage": USAGE})

    upstream.script = answer
    (event,) = await run(make_replica(), embedding(input=["a", "b"], dimensions=2))
    (exchange,) = upstream.exchanges
    assert exchange.target.endswith("/embeddings")
    assert (exchange.body["input"], exchange.body["dimensions"]) == (["a", "b"], 2)
    assert event.usage == MeteredUsage(embedding_input=7)
    assert isinstance(event.items[0], RawBody) and b'"usage"' not in event.items[0].payload


async def test_a_completion_is_metered_as_it_comes(upstream: Upstream, make_replica: Make) -> None:
    def part(text: str, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {"id": "cmpl-x", "object": "text_completion", "model": "x", "choices": [choice]}

    async def answer(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(part("Hel"), part("lo"), part("", "length"), "[DONE]")
        await exchange.end_stream()

    upstream.script = answer
    events = await run(make_replica(), completion(prompt="hi", stream=True))
    (exchange,) = upstream.exchanges
    assert exchange.target.endswith("/completions") and "chat" not in exchange.target
    assert exchange.body["max_tokens"] == 16
    usage = events[-1].usage
    assert usage is not None and (usage.output, usage.estimated) == (2, True)


async def test_an_answer_without_vectors_is_none(upstream: Upstream, make_replica: Make) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer({"object": "list", "data": [], "usage": USAGE})

    upstream.script = answer
    with pytest.raises(ReplicaUnavailable):
        await run(make_replica(), embedding(input="a"))


async def test_what_is_reserved(make_replica: Make) -> None:
    replica = make_replica()
    prepared = await replica.prepare(completion(prompt=[[1, 2, 3], [4]], n=2, max_tokens=5))
    assert (prepared.input_tokens, prepared.max_output_tokens) == (4, 20)
    assert prepared.max_tokens_given and prepared.request.n == 4
    prepared = await replica.prepare(embedding(input=[1, 2, 3]))
    assert (prepared.input_tokens, prepared.max_output_tokens) == (3, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "n": 0}, "n"),
        ({}, "prompt"),
    ],
)
def test_what_would_change_the_bill_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadField) as refused:
        completion(**fields)
    assert refused.value.param == param
