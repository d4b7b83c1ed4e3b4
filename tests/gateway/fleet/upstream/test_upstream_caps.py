"""A hard cap and an upstream that counts more, writes more and knows fewer fields than we would
like: what is held is what it is told, and what it bills stays below."""

from __future__ import annotations

import asyncio
import json
import time
import unicodedata
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.fleet.errors import DeadlinePassed
from gateway.fleet.router import Route
from gateway.fleet.upstream.bounds import DEFAULT_MAX_OUTPUT_TOKENS, most_bytes
from gateway.fleet.upstream.image_bound import IMAGE_TOKENS
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generate_request import GenerateRequest, bounded_to, under_a_cap
from gateway.inference.generate import RateLimited
from gateway.request_errors import UnsupportedField
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, Upstream, chunk, completion
from tests.gateway.limits.money.capped_office import CappedOffice, open_office

BOOK = """
[[price]]
model = "big"
valid_from = "2020-01-01"
uncached_input = "1"
output = "2"
"""
"""USD per million: 1000 and 2000 nano a token."""
NAMES = ("max_tokens", "max_completion_tokens")
Chat = Callable[..., GenerateRequest]
Make = Callable[..., UpstreamReplica]
Ask = Callable[..., Any]
IMAGE = {"type": "image_url", "image_url": {"url": "https://images.example/1.png"}}


def seen(**part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]}


async def greedy(exchange: Exchange) -> None:
    """Counts a token for each byte of the text, and writes all that it may: without a bound, too
    much."""
    text = "".join(str(message["content"]) for message in exchange.body["messages"])
    bounds = [exchange.body[name] for name in NAMES if name in exchange.body]
    assert len(bounds) <= 1
    prompt, written = len(text.encode()) + 20, bounds[0] if bounds else 100_000
    usage = {"prompt_tokens": prompt, "completion_tokens": written}
    await exchange.answer(completion(usage={**usage, "total_tokens": prompt + written}))


@pytest.fixture
async def till(
    redis: Redis, tmp_path: Path, upstream: Upstream, make_replica: Make
) -> AsyncIterator[CappedOffice]:
    upstream.script = greedy
    routes = [Route(model="big", kind="upstream", replicas=(make_replica(),))]
    async with open_office(redis, tmp_path, routes, BOOK) as office:
        yield office


@pytest.mark.parametrize("cap_tokens", [DEFAULT_MAX_OUTPUT_TOKENS + 2000, 3000])
async def test_who_names_no_bound_is_given_what_was_held(
    till: CappedOffice, upstream: Upstream, chat: Chat, cap_tokens: int
) -> None:
    """Whether all that is assumed fits below the cap, or less."""
    cap_nano = cap_tokens * 2000
    await till.ask(chat(max_completion_tokens=None), cap_nano)
    sent = upstream.exchanges[0].body
    assert sent["max_tokens"] <= min(DEFAULT_MAX_OUTPUT_TOKENS, cap_tokens)
    assert "max_completion_tokens" not in sent
    assert sent["max_tokens"] * 2000 < await till.counted() <= cap_nano


async def test_what_an_upstream_counts_beyond_our_estimate_was_held(
    till: CappedOffice, upstream: Upstream, chat: Chat
) -> None:
    """4000 ASCII bytes read as 1000 tokens by their length, and are 4020 over there."""
    long = chat(max_tokens=10, messages=[{"role": "user", "content": "{}[]" * 1000}])
    with pytest.raises(RateLimited):
        await till.ask(long, 4020 * 1000)
    assert upstream.exchanges == []
    cap_nano = 5_000_000
    await till.ask(long, cap_nano)
    assert await till.counted() == 4020 * 1000 + 10 * 2000 <= cap_nano


@pytest.mark.parametrize("stream", [True, False])
async def test_at_the_clients_deadline_it_is_cut_off_and_what_it_wrote_is_counted(
    till: CappedOffice, upstream: Upstream, chat: Chat, stream: bool
) -> None:
    async def takes_long(exchange: Exchange) -> None:
        if stream:
            await exchange.begin_stream()
            await exchange.send(chunk("word"))
        await exchange.hang()

    upstream.script = takes_long
    with pytest.raises(DeadlinePassed):
        await till.ask(chat(stream=stream, max_tokens=50), 1_000_000, timeout_s=0.5)
    await asyncio.wait_for(upstream.exchanges[0].left.wait(), 30)
    (event,) = (await till.services.spool.read_closed(10)).events
    used = event.quantities
    assert (event.finish, event.kind, event.estimated) == ("disconnect", "usage", True)
    assert used.uncached_input > 0 and (used.output == 1 if stream else 1 <= used.output <= 50)
    assert await till.counted() == used.uncached_input * 1000 + used.output * 2000


async def test_without_a_cap_nothing_is_added(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    prepared = await make_replica().prepare(chat())
    assert prepared.most_input_tokens is None and b"max_" not in prepared.payload
    seen_by_many = chat(**seen(**IMAGE))
    assert (await make_replica().prepare(seen_by_many)).input_tokens > 1000


async def sent(replica: UpstreamReplica, request: GenerateRequest) -> dict[str, Any]:
    return dict(json.loads((await replica.prepare(request)).payload))


async def test_the_bound_stands_in_one_field(make_replica: Make, chat: Chat) -> None:
    newer = make_replica(max_tokens_field="max_completion_tokens")
    for replica, field in ((newer, NAMES[1]), (make_replica(), NAMES[0])):
        other = next(name for name in NAMES if name != field)
        asked = under_a_cap(chat(n=2, max_tokens=None))
        body = await sent(replica, bounded_to(asked, 100))
        assert body[field] == 50 and other not in body
        body = await sent(replica, under_a_cap(chat(**{other: 7})))
        assert body[other] == 7 and field not in body, "the client's own stays where it is"


async def test_what_is_held_of_an_answer_can_be_set(make_replica: Make, chat: Chat) -> None:
    replica = make_replica(max_output_tokens=4096)
    body = await sent(replica, under_a_cap(chat()))
    assert body["max_tokens"] == 4096
    prepared = await replica.prepare(under_a_cap(chat(n=3)))
    assert prepared.max_output_tokens == 3 * 4096
    small = make_replica(max_output_tokens=4096, context_window=2048)
    prepared = await small.prepare(under_a_cap(chat()))
    assert prepared.most_input_tokens is not None
    assert prepared.max_output_tokens == 2048 - prepared.most_input_tokens, "both fit its window"
    full = await small.prepare(
        under_a_cap(chat(messages=[{"role": "user", "content": "word " * 800}]))
    )
    assert full.most_input_tokens == 2048
    assert full.max_output_tokens == (2048 - full.input_tokens) // 2


UNBOUNDED = [
    (seen(type="image_url", image_url={"url": "data:text/html,x"}), "messages[0].content[1]"),
    (seen(type="image_url", image_url={"id": 1}), "messages[0].content[1]"),
    (seen(type="video_url", text="a caption"), "messages[0].content[1]"),
    (seen(type="file", file={"file_id": "file-1"}), "messages[0].content[1]"),
    ({"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "messages[0].images"),
    ({"chat_template": "{% for i in range(9) %}x{% endfor %}"}, "chat_template"),
    ({"data_sources": [{"type": "azure_search"}]}, "data_sources"),
]


@pytest.mark.parametrize(("fields", "param"), UNBOUNDED)
async def test_what_nobody_can_bound_is_refused_by_name(
    make_replica: Make, chat: Chat, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedField) as raised:
        await make_replica().prepare(under_a_cap(chat(**fields)))
    assert raised.value.param == param and f"'{param}'" in raised.value.message
    prepared = await make_replica(context_window=5000).prepare(under_a_cap(chat(**fields)))
    assert prepared.most_input_tokens == 5000, "no input is larger than its window"


async def test_an_image_is_held_at_the_most_that_a_vendor_counts_for_it(
    till: CappedOffice, upstream: Upstream, chat: Chat
) -> None:
    """And is refused where that does not fit, before anybody is asked."""
    asked = chat(max_tokens=10, **seen(**IMAGE))
    with pytest.raises(RateLimited):
        await till.ask(asked, IMAGE_TOKENS * 1000)
    assert upstream.exchanges == []
    cap_nano = (IMAGE_TOKENS + 1000) * 1000
    await till.ask(asked, cap_nano)
    assert 0 < await till.counted() <= cap_nano


async def test_a_tokenizers_count_is_held_instead_of_bytes(make_replica: Make, chat: Chat) -> None:
    def words(text: str) -> list[int]:
        return [0] * len(text.split())

    asked = under_a_cap(chat(messages=[{"role": "user", "content": "unbelievable " * 1000}]))
    counted = (await make_replica(encoding=words).prepare(asked)).most_input_tokens
    by_bytes = (await make_replica().prepare(asked)).most_input_tokens
    assert counted is not None and by_bytes is not None
    assert 1000 < counted < 2000 < 13_000 < by_bytes


async def test_megabytes_are_held_by_their_bytes_and_not_tokenized(
    make_replica: Make, chat: Chat
) -> None:
    def refuse(_: str) -> list[int]:
        raise AssertionError("it was tokenized")

    asked = under_a_cap(chat(messages=[{"role": "user", "content": "word " * 900_000}]))
    prepared = await make_replica(encoding=refuse).prepare(asked)
    by_bytes = await make_replica().prepare(asked)
    assert prepared.input_tokens == by_bytes.input_tokens > 10**6
    assert prepared.most_input_tokens == by_bytes.most_input_tokens


async def test_tools_are_held_as_templates_write_them(make_replica: Make, chat: Chat) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 1000}}]
    most = [
        (await make_replica().prepare(under_a_cap(chat(**fields)))).most_input_tokens
        for fields in ({}, {"tools": tools})
    ]
    assert most[0] is not None and most[1] is not None and most[1] - most[0] >= 2 * 1000


@given(st.text(max_size=50))
def test_no_normalization_makes_more_of_a_text(text: str) -> None:
    data = text.encode(errors="replace")
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        told = unicodedata.normalize(form, data.decode())  # type: ignore[arg-type]
        assert len(told.encode()) <= most_bytes(data)


async def test_marks_in_a_row_do_not_hold_a_worker(make_replica: Make, chat: Chat) -> None:
    """To put them in order takes minutes, and nobody else's turn comes meanwhile."""
    prompt = "a" + "\u0315\u0300\u05ae" * 100_000
    request = under_a_cap(chat(messages=[{"role": "user", "content": prompt}], max_tokens=5))
    begun = time.process_time()
    prepared = await make_replica().prepare(request)
    assert time.process_time() - begun < 30
    assert prepared.most_input_tokens is not None
    assert len(prompt.encode()) < prepared.most_input_tokens < 2 * len(prompt.encode())
