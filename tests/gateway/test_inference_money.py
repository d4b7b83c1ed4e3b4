"""The main path under a hard cap: what is held, what an answer may be, and what is settled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from billing.price_book import PriceBook
from billing.spool import Spool
from gateway.fleet.replica import PreparedRequest
from gateway.fleet.router import Fleet, Route
from gateway.ids import uuid7
from gateway.inference import Call, Desk, RateLimited, start
from gateway.lanes import Turn
from gateway.limits.limiter import Limiter
from gateway.limits.spending import UnpricedModel, counter_of
from gateway.principal import Principal, SpendCap
from gateway.tasks import TaskSet
from gateway.telemetry import RequestMeter, Telemetry
from gateway.wire.request import ChatPrompt, GenerateRequest, bounded_to
from tests.gateway.office import AsListed, PlainEncoder, ScriptedReplica, read

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

    async def prepare(self, request: GenerateRequest) -> PreparedRequest:
        assert request.prompt is not None
        found = await super().prepare(request)
        given = request.prompt.max_tokens
        self.length = min(self.length, given or ROOM)
        return msgspec.structs.replace(
            found,
            max_output_tokens=(given or ROOM) * request.n,
            max_tokens_given=given is not None,
        )


class Shop:
    def __init__(self, desk: Desk, redis: Redis) -> None:
        self.desk, self.redis = desk, redis
        self.telemetry = Telemetry(models=["m"])

    async def ask(self, cap_nano: int, *, model: str = "m", max_tokens: int | None = None) -> bytes:
        caller = Principal(
            org_id="org_a",
            project_id="proj_a",
            key_id="key_a",
            key_hint="",
            scopes=frozenset({"inference"}),
            spend_caps=(SpendCap("key", "key_a", "total", cap_nano),),
        )
        prompt = ChatPrompt(messages=[], max_tokens=max_tokens)
        call = Call(
            turn=Turn(),
            request_id=f"req_{uuid7().hex}",
            principal=caller,
            request=GenerateRequest(model=model, stream=True, include_usage=True, prompt=prompt),
            encoder=PlainEncoder(),
            meter=RequestMeter(self.telemetry, "m"),
        )
        said = await read(start(self.desk, call))
        deadline = time.monotonic() + 5
        while self.desk.open_calls:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        return said

    async def counted(self) -> int:
        key = counter_of("key", "key_a", "total", 0).key("org_a")
        return int(await self.redis.hget(key, "n") or -1)


@pytest.fixture
async def shop(redis: Redis, tmp_path: Path) -> AsyncIterator[Shop]:
    book = tmp_path / "book.toml"
    book.write_text(BOOK)
    spool, tasks = await Spool.open(tmp_path / "spool"), TaskSet()
    limiter = Limiter(redis, grace_s=0)
    routes = [
        Route(model=name, kind="upstream", replicas=(Careful(length=400),)) for name in ("m", "x")
    ]
    desk = Desk(
        fleet=Fleet(routes, rng=AsListed()),
        limiter=limiter,
        spool=spool,
        price_book=PriceBook.load([book]),
        tasks=tasks,
        cache_salts=lambda org: org,
        stalled_reader_s=60.0,
    )
    yield Shop(desk, redis)
    await tasks.close()
    await limiter.close()
    await spool.shutdown()


async def test_an_answer_ends_where_the_money_does(shop: Shop) -> None:
    """10 tokens of input held at 1000 nano each, of 100,000; of the rest 45 tokens at 2000."""
    said = await shop.ask(100_000)
    assert said.endswith(b"w45 [45]")
    assert await shop.counted() == 6 * 1000 + 4 * 500 + 45 * 2000
    with pytest.raises(RateLimited):
        await shop.ask(100_000)
    assert await shop.counted() == 98_000, "a refusal consumes nothing"
    (event,) = (await shop.desk.spool.read_closed(10)).events
    assert event.attempt.prices["output"].pico_per_token == 2_000_000


async def test_what_was_asked_for_is_held_whole_or_refused(shop: Shop) -> None:
    with pytest.raises(RateLimited):
        await shop.ask(100_000, max_tokens=46)
    assert (await shop.ask(100_000, max_tokens=45)).endswith(b"[45]")


async def test_a_model_without_a_price_is_refused_where_money_is_capped(shop: Shop) -> None:
    with pytest.raises(UnpricedModel):
        await shop.ask(100_000, model="x")
    assert (await shop.desk.spool.read_closed(10)).events == []


def test_what_a_request_may_write_is_told_to_each_kind_of_replica() -> None:
    asked = GenerateRequest(model="m", stream=False, include_usage=False, n=3, forward={"n": 3})
    told = bounded_to(asked, 100)
    assert (told.max_output_tokens, told.forward) == (33, {"n": 3})
    ours = msgspec.structs.replace(asked, forward=None, prompt=ChatPrompt(messages=[]))
    prompt = bounded_to(ours, 100).prompt
    assert prompt is not None and prompt.max_tokens == 33
