"""Several plain prompts of one request are one thing to the limiter and to the bill: one event,
exact whatever ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from billing.events import Quantities
from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from engine.fake.engine import FAKE_CONFIG, FakeCore, FakeEngine
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from foundation.tasks import TaskSet
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Fleet, Route
from gateway.generate_request import (
    AnswerHeader,
    CompletionPrompt,
    EmbeddingPrompt,
    GenerateRequest,
)
from gateway.inference.services import GenerationServices
from gateway.principal import Plan
from gateway.wire.openai.embeddings import to_embeddings
from gateway.wire.openai.to_completions import to_completions
from tests.gateway.office import Office, WatchedLimiter, read

WIDE = Plan(name="wide", tokens_per_minute=100_000_000, max_concurrent_streams=100)
PROMPTS = ("one", "two and three", "four")
HEADING = AnswerHeader(id="cmpl-1", created=1)


@pytest.fixture
async def engine(tokenizer: Tokenizer) -> AsyncIterator[FakeEngine]:
    """A token a millisecond for everybody."""
    engine = FakeEngine(FakeCore(FAKE_CONFIG, vocab_size=tokenizer.vocab_size), delay_s=0.001)
    yield engine
    await engine.close()
    engine.core.check_integrity()


@pytest.fixture
async def office(
    tmp_path: Path,
    redis: Redis,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    threads: PrepareThreads,
) -> AsyncIterator[Office]:
    replica = EngineReplica(
        name="m", client=engine, tokenizer=tokenizer, template=template, threads=threads
    )
    async with contextlib.AsyncExitStack() as stack:
        tasks, limiter = TaskSet(), WatchedLimiter(redis)
        stack.push_async_callback(tasks.close)
        stack.push_async_callback(limiter.close)
        spool = await Spool.open(tmp_path / "spool")
        stack.push_async_callback(spool.shutdown)
        services = GenerationServices(
            fleet=Fleet([Route(model="m", kind="engine", replicas=(replica,))]),
            limiter=limiter,
            spool=spool,
            price_book=PriceBook.load(),
            tasks=tasks,
            cache_salts=lambda org: org,
            stalled_reader_s=10.0,
        )
        yield Office(services, redis)


def completion(max_tokens: int, *, stream: bool = True, n: int = 2) -> GenerateRequest:
    prompt = CompletionPrompt(prompts=PROMPTS, max_tokens=max_tokens)
    return GenerateRequest(model="m", stream=stream, include_usage=True, n=n, completion=prompt)


@pytest.fixture
def num_tokens(tokenizer: Tokenizer) -> int:
    return sum(len(tokenizer.encode(prompt, add_special_tokens=True)) for prompt in PROMPTS)


async def test_all_is_one_event(office: Office, engine: FakeEngine, num_tokens: int) -> None:
    request = completion(5, stream=False)
    await read(office.begin(WIDE, request=request, encoder=to_completions(request, HEADING)))
    await office.settled()
    (event,) = await office.billed()
    assert event.quantities == Quantities(uncached_input=num_tokens, output=2 * 3 * 5)
    assert (event.finish, engine.acknowledged) == ("done", [event.id])


async def test_who_leaves_pays_for_what_was_generated(
    office: Office, engine: FakeEngine, num_tokens: int
) -> None:
    request = completion(4000)
    delivery = office.begin(WIDE, request=request, encoder=to_completions(request, HEADING))
    for _ in range(3):
        await asyncio.wait_for(delivery.next(), 30)
    delivery.abandon()
    await office.settled()
    (event,) = await office.billed()
    assert event.quantities == Quantities(
        uncached_input=num_tokens, output=engine.status.generated_tokens
    )
    assert (event.finish, engine.acknowledged) == ("disconnect", [event.id])


async def test_a_lost_engine_costs_what_was_delivered(office: Office, engine: FakeEngine) -> None:
    request = completion(4000)
    office.services.max_resumes = 0
    delivery = office.begin(WIDE, request=request, encoder=to_completions(request, HEADING))
    for _ in range(3):
        await asyncio.wait_for(delivery.next(), 30)
    engine.lose()
    with pytest.raises(Exception, match="lost"):
        await read(delivery)
    await office.settled()
    (event,) = await office.billed()
    assert event.finish == "error" and event.kind == "usage"
    assert 0 < event.quantities.output <= engine.status.generated_tokens


async def test_what_was_not_asked_for_is_the_houses(office: Office, num_tokens: int) -> None:
    """`max_tokens` of 0: an engine says one token all the same."""
    prompt = CompletionPrompt(prompts=PROMPTS, max_tokens=0, echo=True)
    request = GenerateRequest(model="m", stream=False, include_usage=False, completion=prompt)
    await read(office.begin(WIDE, request=request, encoder=to_completions(request, HEADING)))
    await office.settled()
    event, waste = await office.billed()
    assert event.quantities == Quantities(uncached_input=num_tokens)
    assert (waste.kind, waste.quantities) == ("waste", Quantities(output=len(PROMPTS)))


async def test_embeddings_are_a_component_of_their_own(office: Office, num_tokens: int) -> None:
    request = GenerateRequest(
        model="m",
        stream=False,
        include_usage=False,
        embedding=EmbeddingPrompt(prompts=PROMPTS),
    )
    await read(office.begin(WIDE, request=request, encoder=to_embeddings(request, HEADING)))
    await office.settled()
    (event,) = await office.billed()
    assert event.quantities == Quantities(embedding_input=num_tokens)
    assert event.finish == "done"
