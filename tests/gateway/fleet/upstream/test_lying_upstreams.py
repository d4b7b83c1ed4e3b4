"""Upstreams that claim what they like, write as long as they like and know no bound: a hard cap is
never passed, a stream ends where its bound is, and who goes on like that is left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from billing.events import DisputedUsage
from billing.pricing.rating import rate
from gateway.fleet.errors import ReplicaUnavailable
from gateway.fleet.router import Route
from gateway.fleet.upstream.bounds import MOST_TOKENS
from gateway.fleet.upstream.claim_breaker import ClaimBreaker
from gateway.fleet.upstream.image_bound import IMAGE_TOKENS
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generate_request import GenerateRequest, under_a_cap
from gateway.inference.generate import RateLimited
from gateway.limits.spending import to_nano
from gateway.wire.anthropic.from_anthropic import from_anthropic
from gateway.wire.openai.completions import from_completions
from gateway.wire.openai.embeddings import from_embeddings
from tests.gateway.fleet.upstream.scripted_upstream import (
    Exchange,
    Script,
    Upstream,
    chunk,
    chunks,
    completion,
    run,
    texts,
)
from tests.gateway.limits.money.capped_office import CappedOffice, open_office

BOOK = """
[[price]]
model = "big"
valid_from = "2020-01-01"
uncached_input = "1"
cache_read = "0.1"
cache_write = "1.25"
output = "2"
"""
TRILLION = 10**12
Chat = Callable[..., GenerateRequest]
Make = Callable[..., UpstreamReplica]


def claiming(usage: Any, text: str = "Hello there") -> Script:
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}

    async def script(exchange: Exchange) -> None:
        if not exchange.body.get("stream"):
            return await exchange.answer(completion(choices=[choice], usage=usage))
        await exchange.begin_stream()
        await exchange.send(chunk(text), chunk(finish="stop"))
        await exchange.send({**chunk(), "choices": [], "usage": usage}, "[DONE]")
        await exchange.end_stream()

    return script


async def endless(exchange: Exchange) -> None:
    """One token a chunk, until the client leaves."""
    if not exchange.body.get("stream"):
        usage = {"prompt_tokens": 8, "completion_tokens": 4000, "total_tokens": 4008}
        return await exchange.answer(
            completion(
                choices=[
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "words " * 4000},
                        "finish_reason": "stop",
                    }
                ],
                usage=usage,
            )
        )
    await exchange.begin_stream()
    await exchange.flood(chunk("words "))


@pytest.fixture
async def till(
    redis: Redis, tmp_path: Path, upstream: Upstream, make_replica: Make
) -> AsyncIterator[CappedOffice]:
    replica = make_replica(context_window=32_768, claims=ClaimBreaker(0))
    routes = [Route(model="big", kind="upstream", replicas=(replica,))]
    async with open_office(redis, tmp_path, routes, BOOK) as office:
        yield office


def prompt_of(size_bytes: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "w" * size_bytes}]


TOLD = {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}
LIES = [
    {**TOLD, "prompt_tokens": TRILLION},
    {**TOLD, "prompt_tokens": 1_000_000},
    {**TOLD, "completion_tokens": TRILLION},
    {**TOLD, "total_tokens": TRILLION},
    {**TOLD, "prompt_tokens": 2**63, "completion_tokens": 2**63},
    {**TOLD, "prompt_tokens": 1e30},
    {**TOLD, "prompt_tokens": TRILLION, "prompt_tokens_details": {"cache_write_tokens": TRILLION}},
    {**TOLD, "completion_tokens_details": {"reasoning_tokens": TRILLION}},
]
HARMLESS = [
    None,
    {**TOLD, "prompt_tokens": -5},
    {**TOLD, "completion_tokens": "NaN"},
    {**TOLD, "prompt_tokens_details": {"cached_tokens": TRILLION, "cache_write_tokens": TRILLION}},
    {**TOLD, "completion_tokens_details": {"reasoning_tokens": -1}},
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("usage", [*LIES, *HARMLESS])
async def test_no_claim_passes_a_hard_cap(
    till: CappedOffice, upstream: Upstream, chat: Chat, usage: Any, stream: bool
) -> None:
    upstream.script = claiming(usage)
    cap_nano = 50_000_000
    await till.ask(chat(stream=stream, max_tokens=20), cap_nano)
    (event,) = (await till.services.spool.read_closed(10)).events
    most_input = 32_768
    assert 0 < event.quantities.input_total <= most_input
    assert event.quantities.output_total <= 20
    cost = rate(event.quantities, event.attempt.prices).amount_pico
    assert await till.counted() == to_nano(cost) <= cap_nano
    if usage in LIES[:-1]:
        assert isinstance(event.disputed, DisputedUsage) and event.disputed.upstream == "big@0"
    else:
        assert event.disputed is UNSET


async def test_what_is_disputed_is_what_was_claimed_beyond(
    till: CappedOffice, upstream: Upstream, chat: Chat
) -> None:
    upstream.script = claiming({**TOLD, "prompt_tokens": TRILLION, "completion_tokens": 21})
    await till.ask(chat(stream=True, max_tokens=20), 50_000_000)
    (event,) = (await till.services.spool.read_closed(10)).events
    billed = event.quantities.input_total
    assert event.disputed == DisputedUsage("big@0", TRILLION - billed, 1)
    shown = till.telemetry.registry
    assert counted(shown, "tollgate_upstream_disputes_total", upstream="big@0") == 1
    labels = {"upstream": "big@0", "kind": "input"}
    disputed = counted(shown, "tollgate_upstream_disputed_tokens_total", **labels)
    assert disputed == TRILLION - billed


def counted(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


async def test_64_at_once_of_an_upstream_that_knows_no_bound_stay_within_the_cap(
    till: CappedOffice, upstream: Upstream, chat: Chat
) -> None:
    """Each writes and claims ten times what it was told; some fifty fit under the cap."""
    usage = {"prompt_tokens": 5000, "completion_tokens": 1000, "total_tokens": 6000}
    upstream.script = claiming(usage, "words " * 1000)
    request = chat(max_tokens=100)
    prepared = await till.services.fleet.routes[0].replicas[0].prepare(under_a_cap(request))
    assert prepared.most_input_tokens is not None
    held = prepared.most_input_tokens * 1250 + 100 * 2000
    cap_nano = held * 50 + 7
    answers = await asyncio.gather(
        *(till.ask(request, cap_nano) for _ in range(64)), return_exceptions=True
    )
    refused = [each for each in answers if isinstance(each, RateLimited)]
    assert {type(each) for each in answers} == {bytes, RateLimited}
    events = (await till.services.spool.read_closed(100)).events
    assert len(events) + len(refused) == 64
    spent = sum(rate(each.quantities, each.attempt.prices).amount_pico for each in events)
    assert await till.counted() == to_nano(spent) <= cap_nano


async def test_an_input_is_never_larger_than_its_window(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    upstream.script = claiming({**TOLD, "prompt_tokens": 1_000_000})
    events = await run(
        make_replica(context_window=32_768), chat(messages=prompt_of(200_000), max_tokens=5)
    )
    usage = events[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.disputed_input) == (32_768, 1_000_000 - 32_768)


async def test_an_input_without_a_cap_is_bounded_by_its_bytes_or_by_a_tokenizer(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    upstream.script = claiming({**TOLD, "prompt_tokens": 50_000})
    asked = chat(messages=prompt_of(1000), max_tokens=5)
    by_bytes = (await run(make_replica(), asked))[-1].usage
    counted = (await run(make_replica(encoding=lambda text: [0] * 10), asked))[-1].usage
    assert by_bytes is not None and 1000 < by_bytes.prompt_tokens < 2000
    assert counted is not None and 10 < counted.prompt_tokens < 500


def image(url: str = "https://images.example/1.png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


MEGABYTE = "A" * 2**20
FRAME = 1000
"""The texts around the images, their URLs and a template are less."""
IMAGES: list[tuple[list[dict[str, Any]], dict[str, Any], int]] = [
    ([image()], {}, IMAGE_TOKENS),
    ([image(), image(text="a caption")], {}, 2 * IMAGE_TOKENS),
    ([image(f"data:image/png;base64,{MEGABYTE}")], {}, IMAGE_TOKENS),
    ([image(f"DATA:Image/jpeg;base64,{MEGABYTE}")] * 2, {"max_image_tokens": 9}, 2 * 9),
    ([{"type": "image_url", "image_url": "https://images.example/1.png"}], {}, IMAGE_TOKENS),
    ([image()], {"max_image_tokens": 1600}, 1600),
    ([image()], {"max_image_tokens": 1600, "encoding": lambda text: [0] * len(text)}, 1600),
    ([image()], {"max_image_tokens": 10**6, "context_window": 32_768}, 32_768),
]


@pytest.mark.parametrize(("parts", "options", "most"), IMAGES)
@pytest.mark.parametrize("is_capped", [True, False])
async def test_an_image_is_bounded_by_what_vendors_state_whatever_its_bytes_are(
    upstream: Upstream,
    make_replica: Make,
    chat: Chat,
    parts: list[dict[str, Any]],
    options: dict[str, Any],
    most: int,
    is_capped: bool,
) -> None:
    asked = chat(messages=[{"role": "user", "content": parts}], max_tokens=5)
    asked = under_a_cap(asked) if is_capped else asked
    replica = make_replica(**options)
    held = (await replica.prepare(asked)).most_input_tokens
    assert held is not None and most <= held < most + FRAME
    for claimed in (held, held + 1, TRILLION):
        upstream.script = claiming({**TOLD, "prompt_tokens": claimed, "total_tokens": claimed + 3})
        usage = (await run(replica, asked))[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.disputed_input) == (held, claimed - held)


@pytest.mark.parametrize(
    "part",
    [
        image("data:application/pdf;base64,eA=="),
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,eA=="}},
        {"type": "video_url", "video_url": {"url": "https://images.example/1.mp4"}},
    ],
)
async def test_documents_and_videos_are_bounded_by_the_window_alone(
    upstream: Upstream, make_replica: Make, chat: Chat, part: dict[str, Any]
) -> None:
    upstream.script = claiming({**TOLD, "prompt_tokens": TRILLION})
    asked = chat(messages=[{"role": "user", "content": [part]}], max_tokens=5)
    for options, most in (({}, MOST_TOKENS), ({"context_window": 32_768}, 32_768)):
        usage = (await run(make_replica(**options), asked))[-1].usage
        assert usage is not None and usage.prompt_tokens == most


async def test_no_tenant_has_an_upstream_rest_by_what_it_sends(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    """A claim for an image counts against its upstream only if no window holds as much."""
    claims = ClaimBreaker(2)
    replica = make_replica(claims=claims)
    asked = chat(messages=[{"role": "user", "content": [image()]}], max_tokens=5)
    upstream.script = claiming({**TOLD, "prompt_tokens": 2 * IMAGE_TOKENS})
    for _ in range(3):
        events = await run(replica, asked)
        assert events[-1].usage is not None and events[-1].usage.is_disputed
    assert claims.num_in_a_row == 0 and replica.health().available
    upstream.script = claiming({**TOLD, "prompt_tokens": MOST_TOKENS + 1})
    await run(replica, asked)
    upstream.script = claiming({**TOLD, "prompt_tokens": 2 * IMAGE_TOKENS})
    await run(replica, asked)
    assert claims.num_in_a_row == 1, "it says nothing, for or against"
    upstream.script = claiming({**TOLD, "completion_tokens": 6})
    await run(replica, asked)
    assert not replica.health().available


def embedding(prompt: Any) -> GenerateRequest:
    return from_embeddings(json.dumps({"model": "big", "input": prompt}).encode(), "upstream")


def plain(**fields: Any) -> GenerateRequest:
    body = {"model": "big", "max_tokens": 5, **fields}
    return from_completions(json.dumps(body).encode(), "upstream")


@pytest.mark.parametrize(
    "request_", [embedding("some text"), embedding([7] * 50), plain(prompt=["some", "text"])]
)
@pytest.mark.parametrize("is_capped", [True, False])
async def test_plain_prompts_are_bounded_as_well(
    upstream: Upstream, make_replica: Make, request_: GenerateRequest, is_capped: bool
) -> None:
    async def script(exchange: Exchange) -> None:
        usage = {"prompt_tokens": TRILLION, "completion_tokens": TRILLION}
        choices = [{"index": at, "text": "x", "finish_reason": "stop"} for at in range(2)]
        data = [{"index": 0, "embedding": [1.0]}]
        embeds = exchange.target.endswith("/embeddings")
        said: Any = {"data": data} if embeds else {"choices": choices}
        await exchange.answer({**said, "usage": usage})

    upstream.script = script
    usage = (await run(make_replica(), under_a_cap(request_) if is_capped else request_))[-1].usage
    assert usage is not None
    assert usage.prompt_tokens < 300 and usage.output <= 10
    assert usage.prompt_tokens + usage.disputed_input == TRILLION


@pytest.mark.parametrize("max_tokens", [1, 20, 300])
async def test_an_endless_stream_ends_for_its_length(
    upstream: Upstream, make_replica: Make, chat: Chat, max_tokens: int
) -> None:
    upstream.script = endless
    events = await run(make_replica(), chat(stream=True, max_tokens=max_tokens))
    assert texts(events) == ["words "] * max_tokens
    last = chunks(events)[-1]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}]
    assert (last["id"], last["model"]) == ("chatcmpl-theirs", "big")
    usage = events[-1].usage
    assert usage is not None and usage.output == max_tokens and usage.disputed_output >= 1
    await asyncio.wait_for(upstream.exchanges[0].left.wait(), 30)


async def test_an_endless_stream_of_several_choices_ends_each(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        first = chunk("words ")
        second = {**first, "choices": [{**first["choices"][0], "index": 1}]}
        await exchange.send(chunk("done", finish="stop"))
        await exchange.flood(second)

    upstream.script = script
    events = await run(make_replica(), chat(stream=True, max_tokens=10, n=2))
    assert chunks(events)[-1]["choices"] == [{"index": 1, "delta": {}, "finish_reason": "length"}]
    assert events[-1].usage is not None and events[-1].usage.output == 20


async def test_other_surfaces_are_told_in_their_words(
    upstream: Upstream, make_replica: Make
) -> None:
    upstream.script = endless
    said = [{"role": "user", "content": "hello"}]
    body = {"model": "big", "max_tokens": 20, "messages": said}
    for stream in (True, False):
        request = from_anthropic(json.dumps({**body, "stream": stream}).encode(), "upstream")
        events = await run(make_replica(), request)
        reasons = [getattr(item, "finish_reason", None) for each in events for item in each.items]
        assert [each for each in reasons if each] == ["length"]

    async def words(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.flood({"choices": [{"index": 0, "text": "words "}]})

    upstream.script = words
    events = await run(make_replica(), plain(max_tokens=20, prompt="hello", stream=True))
    found = chunks(events)
    assert "".join(each["choices"][0]["text"] for each in found) == "words " * 20
    assert found[-1]["choices"] == [{"index": 0, "text": "", "finish_reason": "length"}]


async def test_a_repeated_prompt_is_not_cut(upstream: Upstream, make_replica: Make) -> None:
    """`echo`: what is said again was not written."""

    async def repeats(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for _ in range(60):
            await exchange.send({"choices": [{"index": 0, "text": "words "}]})
        await exchange.send({"choices": [{"index": 0, "text": "!", "finish_reason": "stop"}]})
        await exchange.send("[DONE]")
        await exchange.end_stream()

    upstream.script = repeats
    request = plain(max_tokens=1, prompt="words " * 60, stream=True, echo=True)
    events = await run(make_replica(), request)
    assert chunks(events)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_who_cuts_its_text_into_letters_is_not_cut(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    text = "These are no more than twenty tokens of plain English text, said by letters."

    async def letters(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(*(chunk(letter) for letter in text), chunk(finish="stop"), "[DONE]")
        await exchange.end_stream()

    upstream.script = letters
    events = await run(make_replica(), chat(stream=True, max_tokens=20))
    assert "".join(texts(events)) == text
    assert chunks(events)[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1].usage is not None and not events[-1].usage.is_disputed


async def test_an_upstream_that_goes_on_like_that_is_left_alone(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    now = [100.0]
    claims = ClaimBreaker(3, 60.0, clock=lambda: now[0])
    replica = make_replica(claims=claims)
    upstream.script = claiming({**TOLD, "prompt_tokens": TRILLION})
    for asked in (1, 2):
        await run(replica, chat(max_tokens=5))
        assert replica.health().available, asked
    upstream.script = claiming(TOLD)
    await run(replica, chat(max_tokens=5))
    upstream.script = claiming({**TOLD, "prompt_tokens": TRILLION})
    for stream in (True, False, True):
        await run(replica, chat(max_tokens=5, stream=stream))
    assert not replica.health().available
    asked_before = len(upstream.exchanges)
    with pytest.raises(ReplicaUnavailable) as raised:
        await run(replica, chat(max_tokens=5))
    assert raised.value.retry_after_s == 60.0 and len(upstream.exchanges) == asked_before
    now[0] += 61
    assert replica.health().available
    await run(replica, chat(max_tokens=5))
    assert not replica.health().available, "the next claim rests it again"
    now[0] += 61
    upstream.script = claiming(TOLD)
    await run(replica, chat(max_tokens=5))
    assert replica.health().available and claims.num_in_a_row == 0


async def test_another_replica_is_told_no_more_than_was_held_for_the_first(
    redis: Redis, tmp_path: Path, upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    """Its shorter name leaves more of the window."""

    async def script(exchange: Exchange) -> None:
        if exchange.body["model"] != "b":
            return await exchange.answer({"error": {"message": "not now"}}, 503)
        await claiming({"prompt_tokens": TRILLION, "completion_tokens": TRILLION})(exchange)

    upstream.script = script
    first, second = (
        make_replica(upstream_model=name, context_window=4096) for name in ("a" * 500, "b")
    )
    held = await first.prepare(under_a_cap(chat()))
    routes = [Route(model="big", kind="upstream", replicas=(first, second))]
    async with open_office(redis, tmp_path, routes, BOOK) as office:
        await office.ask(chat(), 50_000_000)
        (event,) = (await office.services.spool.read_closed(10)).events
    assert [each.body["max_tokens"] for each in upstream.exchanges] == [held.max_output_tokens] * 2
    most = await second.prepare(under_a_cap(chat()))
    assert event.quantities.output_total == held.max_output_tokens < most.max_output_tokens
    assert event.quantities.input_total == most.most_input_tokens < (held.most_input_tokens or 0)
