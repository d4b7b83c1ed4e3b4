"""The main path under a hard cap: what is held, what an answer may be, and what is settled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from billing.events import Band, Price, PriceSet
from gateway.fleet.replica import ANYBODYS, PreparedRequest
from gateway.fleet.router import Route
from gateway.generate_request import ChatPrompt, GenerateRequest, bounded_to
from gateway.inference.generate import RateLimited
from gateway.lanes import Priority
from gateway.limits.spending import MAX_NANO, UnpricedModel, spending_of
from gateway.principal import Principal, SpendCap
from tests.gateway.limits.money.capped_office import CappedOffice, open_office
from tests.gateway.office import ScriptedReplica

ROOM = 1000
BOOK = """
[[price]]
model = "m"
valid_from = "2020-01-01"
uncached_input = "1"
cache_read = "0.5"
output = "2"
"""


class Careful(ScriptedReplica):
    """Says as much as it may."""

    async def prepare(
        self, request: GenerateRequest, priority: Priority = ANYBODYS, cache_salt: str = ""
    ) -> PreparedRequest:
        assert request.prompt is not None
        found = await super().prepare(request, priority, cache_salt)
        given = request.prompt.max_tokens
        self.length = min(self.length, given or ROOM)
        return msgspec.structs.replace(
            found,
            max_output_tokens=(given or ROOM) * request.n,
            max_tokens_given=given is not None,
        )

    def bounded(self, prepared: PreparedRequest, max_output_tokens: int) -> PreparedRequest:
        self.length = min(self.length, max_output_tokens)
        return super().bounded(prepared, max_output_tokens)


def chat(*, model: str = "m", max_tokens: int | None = None) -> GenerateRequest:
    prompt = ChatPrompt(messages=[], max_tokens=max_tokens)
    return GenerateRequest(model=model, stream=True, include_usage=True, prompt=prompt)


@pytest.fixture
async def shop(redis: Redis, tmp_path: Path) -> AsyncIterator[CappedOffice]:
    routes = [
        Route(model=name, kind="upstream", replicas=(Careful(length=400),)) for name in ("m", "x")
    ]
    async with open_office(redis, tmp_path, routes, BOOK) as office:
        yield office


async def test_an_answer_ends_where_the_money_does(shop: CappedOffice) -> None:
    """10 tokens of input held at 1000 nano each, of 100,000; of the rest 45 tokens at 2000."""
    said = await shop.ask(chat(), 100_000)
    assert said.endswith(b"w45 [45]")
    assert await shop.counted() == 6 * 1000 + 4 * 500 + 45 * 2000
    with pytest.raises(RateLimited):
        await shop.ask(chat(), 100_000)
    assert await shop.counted() == 98_000, "a refusal consumes nothing"
    (event,) = (await shop.services.spool.read_closed(10)).events
    assert event.attempt.prices["output"].pico_per_token == 2_000_000


async def test_what_was_asked_for_is_held_whole_or_refused(shop: CappedOffice) -> None:
    with pytest.raises(RateLimited):
        await shop.ask(chat(max_tokens=46), 100_000)
    assert (await shop.ask(chat(max_tokens=45), 100_000)).endswith(b"[45]")


async def test_a_model_without_a_price_is_refused_where_money_is_capped(shop: CappedOffice) -> None:
    with pytest.raises(UnpricedModel):
        await shop.ask(chat(model="x"), 100_000)
    assert (await shop.services.spool.read_closed(10)).events == []


def test_what_a_request_may_write_is_told_to_each_kind_of_replica() -> None:
    asked = GenerateRequest(model="m", stream=False, include_usage=False, n=3, forward={"n": 3})
    told = bounded_to(asked, 100)
    assert (told.max_output_tokens, told.forward) == (33, {"n": 3})
    ours = msgspec.structs.replace(asked, forward=None, prompt=ChatPrompt(messages=[]))
    prompt = bounded_to(ours, 100).prompt
    assert prompt is not None and prompt.max_tokens == 33


def test_what_is_held_is_the_dearest_of_the_bands_that_a_request_can_reach() -> None:
    prices: PriceSet = {
        "uncached_input": Price("i", 1000, (Band(200_001, "i2", 3000), Band(900_001, "i9", 9000))),
        "cache_read": Price("c", 100),
        "output": Price("o", 2000, (Band(200_001, "o2", 1000),)),
        "reasoning_output": Price("r", 5000),
        "batch_queue": Price("q", 70_000),
    }

    def held(most_input: int) -> int:
        caller = Principal(
            org_id="o", project_id="p", key_id="k", key_hint="", scopes=frozenset(),
            spend_caps=(SpendCap("key", "k", "total", MAX_NANO),),
        )  # fmt: skip
        found = spending_of(
            caller, "m", prices, input_tokens=most_input, max_output_tokens=10,
            min_output_tokens=0, admitted_at=0.0,
        )  # fmt: skip
        assert found is not None
        return found.hold_nano

    assert held(200_000) == 200_000 * 1 + 10 * 5 + 70
    assert held(200_001) == 200_001 * 3 + 10 * 5 + 70
