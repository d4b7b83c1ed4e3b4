"""Thousands of requests (ten by night) on the whole main path (a real spool, a real Redis, the fake
engine), most of them left at some point: nothing is leaked, and all that was made is billed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count, repeat
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from billing.events import UsageEvent
from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from engine.fairness import LANE_WEIGHTS
from engine.fake.engine import FAKE_CONFIG, FakeCore, FakeEngine
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from foundation.tasks import TaskSet
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.errors import NoSlot
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Fleet, Route
from gateway.inference import delivery as delivery_module
from gateway.inference.delivery import Delivery
from gateway.inference.generate import RateLimited
from gateway.inference.services import GenerationServices
from gateway.lanes import Priority
from gateway.principal import Plan
from tests.budget import cycles
from tests.gateway.office import Office, WatchedLimiter

NUM_REQUESTS = cycles(10_000, 2_500)
AT_ONCE = 64
STALLED_S = 0.05
MAX_TOKENS = 12
WIDE = Plan(name="wide", tokens_per_minute=100_000_000, max_concurrent_streams=AT_ONCE)
NARROW = Plan(name="narrow", tokens_per_minute=60_000, max_concurrent_streams=4)


class WatchedEngine(FakeEngine):
    """Counts those that were told to rest."""

    num_pauses = 0

    async def pause(self, request_id: str) -> None:
        self.num_pauses += 1
        await super().pause(request_id)


@pytest.fixture
async def engine(tokenizer: Tokenizer) -> AsyncIterator[WatchedEngine]:
    """Fewer places than there are requests: some are left while they wait."""
    config = replace(FAKE_CONFIG, max_num_seqs=AT_ONCE // 2)
    (letter,) = tokenizer.encode("x")
    core = FakeCore(
        config, vocab_size=tokenizer.vocab_size, respond=lambda request, index: repeat(letter)
    )
    engine = WatchedEngine(core)
    yield engine
    await engine.close()


@pytest.fixture
async def services(
    engine: WatchedEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    threads: PrepareThreads,
    tmp_path: Path,
    redis: Redis,
) -> AsyncIterator[GenerationServices]:
    replica = EngineReplica(
        name="m", client=engine, tokenizer=tokenizer, template=template, threads=threads
    )
    spool, limiter, tasks = await Spool.open(tmp_path / "spool"), WatchedLimiter(redis), TaskSet()
    yield GenerationServices(
        fleet=Fleet([Route(model="m", kind="engine", replicas=(replica,))]),
        limiter=limiter,
        spool=spool,
        price_book=PriceBook.load(),
        tasks=tasks,
        cache_salts=lambda org: org,
        stalled_reader_s=STALLED_S,
    )
    await tasks.close()
    await limiter.close()
    await spool.shutdown()


async def leave_somewhere(delivery: Delivery, rng: random.Random) -> str:
    """How it went. Whoever does not leave reads all of it, or nothing at all."""
    how = rng.choice(["at once", "some time", "some time", "some chunks", "some chunks", "stalls"])
    how = "stays" if rng.random() < 0.1 else how
    try:
        if how == "some time":
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
        elif how == "some chunks":
            for _ in range(rng.randrange(1, 6)):
                if await delivery.next() is None:
                    return "ended before"
        elif how == "stays":
            while await delivery.next() is not None:
                continue
        elif how == "stalls":
            while not (delivery.abandoned or delivery._ended):
                await asyncio.sleep(STALLED_S / 4)
    except (RateLimited, NoSlot) as error:
        return type(error).__name__
    finally:
        delivery.abandon()
    return how


async def take_all(spool: Spool) -> list[UsageEvent]:
    events: list[UsageEvent] = []
    while batch := await spool.read_closed(1000):
        if not batch.events:
            break
        events += batch.events
        await spool.commit(batch)
    return events


@pytest.mark.slow
async def test_whoever_leaves_leaves_nothing_behind(
    services: GenerationServices,
    engine: WatchedEngine,
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery_module, "MAX_QUEUED_CHUNKS", 3)
    rng = random.Random(11)
    tasks_before = asyncio.all_tasks()
    offices = [(Office(services, redis), WIDE)] * 3 + [(Office(services, redis), NARROW)]
    numbers, outcomes = count(), Counter[str]()

    async def clients() -> None:
        """One after the other."""
        while next(numbers) < NUM_REQUESTS:
            office, plan = rng.choice(offices)
            priority = Priority(
                lane=rng.choice(sorted(LANE_WEIGHTS)),
                tenant=rng.choice("abc"),
                deadline_s=rng.choice([None, None, 0.002]),
            )
            delivery = office.begin(
                plan,
                stream=rng.random() < 0.8,
                max_tokens=rng.randint(1, MAX_TOKENS),
                priority=priority,
            )
            outcomes[await leave_somewhere(delivery, rng)] += 1

    await asyncio.gather(*(clients() for _ in range(AT_ONCE)))
    for office, _ in offices:
        await office.settled()
    async with asyncio.timeout(30):
        while asyncio.all_tasks() - tasks_before - {engine._stepping}:
            await asyncio.sleep(0.005)

    assert sum(outcomes.values()) == NUM_REQUESTS
    wanted = {"at once", "some time", "some chunks", "stays", "stalls"}
    wanted |= {"RateLimited", "NoSlot"}
    assert min(outcomes[each] for each in wanted) > NUM_REQUESTS // 500, outcomes
    assert engine.num_pauses > NUM_REQUESTS // 50
    assert services.fleet._failures == {}, "who came too late says nothing against the engine"
    assert not services.open_calls and not services.tasks._tasks
    assert services.spool._open == {} and services.limiter._open == {}
    assert engine._streams == {} and not engine.core.has_work()
    status = engine.status
    assert status.num_running == status.num_waiting == 0
    assert status.num_free_blocks == status.num_blocks
    engine.core.check_integrity()
    events = await take_all(services.spool)
    assert len({event.id for event in events}) == len(events)
    assert sum(event.quantities.output for event in events) == status.generated_tokens
    assert Counter(event.finish for event in events).keys() == {"done", "disconnect"}
    assert set(engine.acknowledged) <= {event.id for event in events}
