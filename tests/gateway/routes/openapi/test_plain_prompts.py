"""Plain prompts as the official SDK sends them and reads the answers, sync and async: completions
and embeddings on a running worker, whose engine has no model."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion

from engine.text.tokenizer import Tokenizer
from tests.gateway.routes.openapi.running import ROOT, TIMEOUT_S, Running
from tests.journeys.sdk.sdk_shapes import extras

PROMPTS = ["Hello", "Who are you?", "Hello"]
SHAPES: dict[str, dict[str, Any]] = {
    "one": {"prompt": "Hello there"},
    "several": {"prompt": PROMPTS, "n": 2},
    "token ids": {"prompt": [5, 6, 7]},
    "lists of them": {"prompt": [[5, 6, 7], [8]], "echo": True},
    "with logprobs": {"prompt": PROMPTS, "logprobs": 2},
    "echo": {"prompt": PROMPTS, "echo": True, "logprobs": 3, "n": 2},
    "echo alone": {"prompt": "Hello", "echo": True, "max_tokens": 0},
    "echo scored, nothing written": {
        "prompt": ["Hello", "you"],
        "echo": True,
        "max_tokens": 0,
        "logprobs": 1,
    },
    "best of as many": {"prompt": "Hello", "n": 2, "best_of": 2},
    "stopped": {"prompt": "Hello", "stop": ["e", "a", "o"], "max_tokens": 40},
    "sampled": {
        "prompt": "Hello",
        "temperature": 1.3,
        "top_p": 0.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"5": -100},
        "user": "u",
        "suffix": None,
    },
}


@pytest.fixture
def lax(worker: Running) -> Iterator[OpenAI]:
    """For streams: where a choice goes on its reason to finish is null, which the SDK's types, made
    for whole answers, do not have."""
    with OpenAI(api_key=worker.everything, base_url=f"{worker.url}/v1", max_retries=0) as found:
        yield found


@pytest.fixture
def client(worker: Running) -> Iterator[OpenAI]:
    with OpenAI(
        api_key=worker.everything,
        base_url=f"{worker.url}/v1",
        max_retries=0,
        _strict_response_validation=True,
    ) as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ROOT / "models" / "penny")


def asked(**options: Any) -> dict[str, Any]:
    return {"model": "near", "max_tokens": 6, "seed": 7} | options


def joined(chunks: list[Completion]) -> list[dict[str, Any]]:
    """Join what a stream says, choice by choice."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said = found.setdefault(
                choice.index,
                {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None},
            )
            assert said["finish_reason"] is None, "something comes behind the end"
            said["text"] += choice.text
            said["finish_reason"] = choice.finish_reason
            if choice.logprobs is not None:
                said["logprobs"] = said["logprobs"] or {}
                for name, values in choice.logprobs.model_dump().items():
                    said["logprobs"][name] = said["logprobs"].get(name, []) + values
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_a_stream_adds_up_to_the_whole_answer(
    client: OpenAI, lax: OpenAI, options: dict[str, Any]
) -> None:
    # Nothing comes before the first token of a prompt: null, as OpenAI says it and not its types.
    strict = not (options.get("echo") and "logprobs" in options)
    whole = (client if strict else lax).completions.create(**asked(**options))
    assert not extras(whole)
    chunks = list(
        lax.completions.create(
            **asked(**options), stream=True, stream_options={"include_usage": True}
        )
    )
    assert not any(extras(chunk) for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert joined(chunks[:-1]) == [choice.model_dump() for choice in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_prompts_say_what_each_says_alone(client: OpenAI) -> None:
    together = client.completions.create(**asked(prompt=PROMPTS, n=2))
    texts = [choice.text for choice in together.choices]
    assert [choice.index for choice in together.choices] == list(range(6))
    alone = [client.completions.create(**asked(prompt=prompt, n=2)) for prompt in PROMPTS]
    assert texts == [choice.text for each in alone for choice in each.choices]
    assert together.usage and together.usage.completion_tokens == 36
    tokens = [each.usage.prompt_tokens for each in alone if each.usage]
    assert together.usage.prompt_tokens == sum(tokens)


def test_an_echo_is_scored_token_by_token(lax: OpenAI, tokenizer: Tokenizer) -> None:
    text = "Hello, who are you?"
    ids = tokenizer.encode(text, add_special_tokens=True)
    options = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    for prompt in (text, ids):
        (choice,) = lax.completions.create(**asked(prompt=prompt, **options)).choices
        told = choice.logprobs
        assert told is not None and told.token_logprobs is not None and told.tokens is not None
        assert choice.text.startswith(text)
        assert len(told.token_logprobs) == len(ids) + 1
        assert told.token_logprobs[0] is None and None not in told.token_logprobs[1:]
        assert told.top_logprobs is not None and len(told.top_logprobs) == len(ids) + 1
        assert "".join(told.tokens) == choice.text
        assert told.text_offset is not None
        starts = [len("".join(told.tokens[:place])) for place in range(len(told.tokens))]
        assert told.text_offset == starts


def test_max_tokens_are_16_unless_said(client: OpenAI) -> None:
    answer = client.completions.create(model="near", prompt="Hello")
    assert answer.usage and answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


async def test_the_async_client_reads_the_same(worker: Running, client: OpenAI) -> None:
    def sync() -> Completion:
        return client.completions.create(**asked(prompt=PROMPTS))

    async with AsyncOpenAI(api_key=worker.everything, base_url=f"{worker.url}/v1") as found:
        whole = await found.completions.create(**asked(prompt=PROMPTS))
        stream = await found.completions.create(**asked(prompt=PROMPTS), stream=True)
        chunks = [chunk async for chunk in stream]
        vectors = await found.embeddings.create(model="near", input=PROMPTS)
    assert whole.choices == (await asyncio.to_thread(sync)).choices
    assert joined(chunks) == [choice.model_dump() for choice in whole.choices]
    assert [each.index for each in vectors.data] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": [[5], []]}, "prompt[1]"),
        ({"prompt": [[5], [10**6]]}, "prompt[1][0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": "a " * 100_000}, "prompt"),
        ({"prompt": "a", "max_tokens": 10**6}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({}, "prompt"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    client: OpenAI, options: dict[str, Any], param: str
) -> None:
    body = {"model": "near"} | options
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/completions", body=body, cast_to=object)
    assert refused.value.param == param


@pytest.mark.parametrize("given", ["Hello", PROMPTS, [5, 6, 7], [[5, 6, 7], [8]]])
def test_embeddings_in_both_forms(client: OpenAI, lax: OpenAI, given: Any) -> None:
    floats = client.embeddings.create(model="near", input=given, encoding_format="float")
    assert not extras(floats)
    coded = lax.embeddings.create(model="near", input=given, encoding_format="base64")
    for index, (plain, raw) in enumerate(zip(floats.data, coded.data, strict=True)):
        assert plain.index == raw.index == index
        found = base64.b64decode(raw.embedding)  # type: ignore[arg-type]
        assert struct.pack(f"<{len(plain.embedding)}f", *plain.embedding) == found
        assert abs(sum(number * number for number in plain.embedding) - 1) < 1e-5
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 0
    assert lax.embeddings.create(model="near", input=given).data == floats.data


def test_fewer_dimensions(client: OpenAI) -> None:
    short = client.embeddings.create(
        model="near", input="Hello", dimensions=4, encoding_format="float"
    )
    (vector,) = [each.embedding for each in short.data]
    assert len(vector) == 4 and abs(sum(number * number for number in vector) - 1) < 1e-5


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 17}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "stream": True}, "stream"),
        ({}, "input"),
    ],
)
def test_embeddings_that_cannot_be(client: OpenAI, options: dict[str, Any], param: str) -> None:
    body = {"model": "near"} | options
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/embeddings", body=body, cast_to=object)
    assert refused.value.param == param


def test_what_embeddings_cost_is_said_and_is_their_own_component(worker: Running) -> None:
    headers = {"authorization": f"Bearer {worker.everything}", "x-tollgate-cost": "true"}
    body = {"model": "near", "input": PROMPTS}
    answer = worker.session.post(
        f"{worker.url}/v1/embeddings", json=body, headers=headers, timeout=TIMEOUT_S
    )
    usage = answer.json()["usage"]
    components = usage["cost"]["components"]
    assert components.keys() == {"embedding_input"}
    assert components["embedding_input"]["quantity"] == usage["prompt_tokens"]
