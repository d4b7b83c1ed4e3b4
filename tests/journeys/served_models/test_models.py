"""Models of every kind, served by name in one Tollgate: each says what `transformers` says with the
weights that its checkpoint stands for, and is billed under its own name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI

from billing.tables import AMOUNTS
from tests.journeys.reports import events
from tests.journeys.served_models.zoo import PRICES, Served, Zoo
from tests.stack import Stack

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
PROMPT = [5, 17, 101, 44, 90, 3, 3, 61, 150, 8, 77, 12, 9, 198, 0, 31, 64, 65] * 2
CACHED = 32
"""Tokens of PROMPT that are cached once it was asked: whole blocks."""


@pytest.fixture
def client(stack: Stack) -> OpenAI:
    return stack.client(max_retries=0)


def ask(client: OpenAI, model: str, prompt: list[int] = PROMPT, **options: Any) -> Any:
    content = " ".join(f"w{token_id}" for token_id in prompt)
    options = {"max_tokens": NUM_TOKENS, "temperature": 0} | options
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        extra_body={"ignore_eos": True},
        **options,
    )


def ids_of(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


def check(served: Served, prompt: list[int], said: list[int]) -> None:
    """Every token is the one that `transformers` holds for the likeliest."""
    assert len(said) == NUM_TOKENS
    with torch.inference_mode():
        rows = served.reference(torch.tensor([prompt + said])).logits[0].float()
    for best, token_id in zip(rows[len(prompt) - 1 : -1], said, strict=True):
        assert float(best.max() - best[token_id]) < served.tolerance


def test_all_are_listed_adapters_behind_their_base(client: OpenAI, zoo: Zoo) -> None:
    others = [name for name in zoo.served if not name.startswith("base")]
    names = ["base", "base-legal", "base-terse", *others]
    assert [model.id for model in client.models.list()][-len(names) :] == names
    assert client.models.retrieve("base-legal").id == "base-legal"
    with pytest.raises(openai.NotFoundError):
        ask(client, "legal")


def test_each_says_what_transformers_says_under_its_own_name(client: OpenAI, zoo: Zoo) -> None:
    """All at once, so that what shares an engine shares its batches."""
    with ThreadPoolExecutor(len(zoo.served)) as pool:
        asked = {name: pool.submit(ask, client, name) for name in zoo.served}
        answers = {name: future.result() for name, future in asked.items()}
    said = {name: ids_of(answer.choices[0].message.content) for name, answer in answers.items()}
    for name, answer in answers.items():
        usage = answer.usage
        assert answer.model == name
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), NUM_TOKENS)
        check(zoo.served[name], PROMPT, said[name])
    assert len({tuple(said[name]) for name in ("base", "base-legal", "base-terse")}) == 3


def test_a_stream_of_an_adapter_carries_its_name_and_finds_its_own_cache(
    client: OpenAI, zoo: Zoo
) -> None:
    prompt = PROMPT[::-1]
    for name in ("base", "base-legal", "base-terse"):
        whole = ask(client, name, prompt)
        assert whole.usage.prompt_tokens_details.cached_tokens == 0, "another's keys and values"
    usage = {"include_usage": True}
    chunks = list(ask(client, "base-terse", prompt, stream=True, stream_options=usage))
    assert {chunk.model for chunk in chunks} == {"base-terse"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == CACHED
    check(zoo.served["base-terse"], prompt, ids_of(text))


@pytest.mark.parametrize(
    ("model", "priced_as"),
    [("base", "base"), ("base-legal", "base"), ("base-terse", "base-terse"), ("awq", None)],
)
def test_usage_is_billed_under_the_models_name(
    stack: Stack, client: OpenAI, model: str, priced_as: str | None
) -> None:
    before = {event.id for event in events(stack, model)}
    cached = ask(client, model).usage.prompt_tokens_details.cached_tokens
    stack.wait("the event is there", lambda: len(events(stack, model)) > len(before))
    (event,) = (event for event in events(stack, model) if event.id not in before)
    assert (event.cache_read, event.uncached_input) == (cached, len(PROMPT) - cached)
    assert event.output == NUM_TOKENS
    assert event.suspended == (priced_as is None)
    uncached_input, output = PRICES.get(priced_as or "", (0, 0))
    expected = event.uncached_input * uncached_input + NUM_TOKENS * output
    expected += cached if priced_as else 0
    assert sum(getattr(event, amount) for amount in AMOUNTS) == expected


def test_an_engines_own_options_are_its_own(stack: Stack, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="96 tokens"):
        ask(client, "awq", max_tokens=100)
    assert ask(client, "gptq", max_tokens=100).usage.completion_tokens == 100
    assert "awq: 64 KV blocks of 16 tokens, context of 96" in stack.log.read_text()
    assert len(stack.pids("engine", "--speculative")) == 1


def test_an_adapter_is_measured_by_its_name(stack: Stack, client: OpenAI) -> None:
    def one() -> tuple[int]:
        ask(client, "base-legal")
        return (NUM_TOKENS,)

    tokens = ("tollgate_tokens_total", {"model": "base-legal", "kind": "output"})
    stack.wait_counted(one, tokens)
    stack.wait("what was reserved is settled", lambda: stack.open_leases() == 0)
