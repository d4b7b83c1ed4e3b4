"""A prompt that one engine computes and another one goes on with: the reader gets what one engine
alone would say, and each token is on one bill, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from redis.asyncio import Redis

from billing.events import failover_waste_id
from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.fake.engine import FakeCore, FakeEngine
from engine.protocol import PeerStatus, ReplicaStatus, StepCosts
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.tiers.policy import PrefillCosts
from foundation.tasks import TaskSet
from gateway.fleet import router
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.predicted_time import PredictionError
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Fleet, Route
from gateway.generate_request import GenerateRequest
from gateway.inference.attempt import RESUMED
from gateway.inference.hedge_budget import HedgeBudget
from gateway.inference.services import GenerationServices
from tests.gateway.inference.test_hedging import GatedEngine
from tests.gateway.inference.test_resuming import (
    LENGTH,
    REQUESTS,
    MakeEngine,
    MortalEngine,
    completion,
    core_of,
    engine,
    merged,
    of_kind,
    open_office,
    say,
)
from tests.gateway.inference.test_resuming import chat as short_chat
from tests.gateway.office import AsListed, Office, WatchedLimiter

__all__ = ["engine", "open_office"]

PENNY = Path(__file__).resolve().parents[4] / "models" / "penny"
NUM_TOKENS = 24
STOP = "the end of the first token and the beginning of the next one"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
PENNYS_REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.2, "seed": 5, "logprobs": True, "top_logprobs": 2},
    "penalised": {"temperature": 1.0, "seed": 6, "frequency_penalty": 1.0, "min_tokens": 9},
    "grammar": {
        "temperature": 1.0,
        "seed": 8,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
        },
    },
    "stop string": {"temperature": 0, "stop": STOP},
}
PROMPT = [{"role": "user", "content": " ".join(str(number) for number in range(200))}]
COSTS = StepCosts(step_s=5e-3, prompt_token_s=1e-3)
OpenPools = Callable[..., Office]


def chat(**fields: Any) -> GenerateRequest:
    return short_chat(**{"messages": PROMPT} | fields)


def said(status: ReplicaStatus, number: int, num_running: int) -> ReplicaStatus:
    """Say what makes a prompt worth sending elsewhere: others decode where it would go."""
    lanes = {
        lane: msgspec.structs.replace(each, num_running=num_running)
        for lane, each in status.lanes.items()
    }
    peer = PeerStatus(address=f"unix:/{number}", layout=b"l", read_s=1e-3, read_token_s=1e-9)
    return msgspec.structs.replace(status, costs=COSTS, lanes=lanes, peer=peer, max_step_tokens=512)


@pytest.fixture
def open_pools(open_office: Callable[..., Office]) -> OpenPools:
    """The first engine computes prompts for the others, where many decode."""

    def make(*engines: MortalEngine, num_decoding: int = 50, **options: Any) -> Office:
        office = open_office(*engines, **options)
        (route,) = office.services.fleet.routes
        for number, replica in enumerate(route.replicas):
            replica.is_prefill = number == 0  # type: ignore[attr-defined]
            status = engines[number].core.status()
            found = said(status, number, num_decoding if number else 0)
            replica.view.heard(found)  # type: ignore[attr-defined]
        routes = [Route(model="m", kind="engine", replicas=route.replicas, has_roles=True)]
        office.services.fleet = Fleet(routes, rng=AsListed())
        return office

    return make


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_reader_gets_what_one_engine_would_say(
    fields: dict[str, Any],
    stream: bool,
    open_office: Callable[..., Office],
    open_pools: OpenPools,
    engine: MakeEngine,
) -> None:
    """Several choices are computed where they are decoded."""
    whole = await say(open_office(engine()), chat(**fields, stream=stream), surface=True)
    first, second = engine(), engine()
    office = open_pools(first, second)
    found = await say(office, chat(**fields, stream=stream), surface=True)
    await office.settled()
    assert len(first.asked) == ("n" not in fields) and len(second.asked) == 1
    assert RESUMED not in found
    if stream:
        assert merged(found) == merged(whole)
    else:
        assert found == whole


async def test_it_is_on_the_bill_once(open_pools: OpenPools, engine: MakeEngine) -> None:
    first, second = engine(), engine()
    office = open_pools(first, second)
    await say(office, chat())
    await office.settled()
    events = await office.billed()
    bills, waste = of_kind(events, "usage"), of_kind(events, "waste")
    prompt = bills[0].quantities.input_total
    assert [each.quantities.output for each in bills] == [1, LENGTH - 1]
    assert prompt > 0 and bills[1].quantities.input_total == 0
    assert [each.finish for each in bills] == ["moved", "done"]
    (again,) = waste
    assert (again.id, again.finish) == (failover_waste_id(bills[1].id), "moved")
    assert (again.quantities.input_total, again.quantities.output_total) == (prompt + 1, 0)
    assert office.services.limiter.settled == [prompt + LENGTH]  # type: ignore[attr-defined]
    assert first.acknowledged == [bills[0].id] and second.acknowledged == [bills[1].id]
    (asked,), (gone_on,) = first.asked, second.asked
    assert asked.sampling.max_tokens == 1 and gone_on.sampling.max_tokens == LENGTH
    assert len(gone_on.said) == 1 and len(gone_on.said[0]) == 1
    value = office.telemetry.registry.get_sample_value
    assert value("tollgate_handover_seconds_count", {"model": "m"}) == 1
    assert not value("tollgate_resumes_total", {"model": "m", "outcome": "resumed"})


async def test_a_whole_answer_is_booked_at_its_end(
    open_pools: OpenPools, engine: MakeEngine
) -> None:
    first, second = engine(), engine()
    office = open_pools(first, second)
    await say(office, chat(stream=False))
    await office.settled()
    bills = of_kind(await office.billed(), "usage")
    assert [each.quantities.output for each in bills] == [1, LENGTH - 1]
    assert first.acknowledged == [bills[0].id] and second.acknowledged == [bills[1].id]


async def test_who_decodes_is_told_where_the_prompt_is(
    open_pools: OpenPools, engine: MakeEngine
) -> None:
    first, second = engine(), engine()
    office = open_pools(first, second)
    (route,) = office.services.fleet.routes
    (first_id, _) = (each.view.status.engine_id for each in route.replicas)  # type: ignore[attr-defined]
    await say(office, chat())
    (gone_on,) = second.asked
    assert gone_on.fetch is not None
    assert (gone_on.fetch.engine_id, gone_on.fetch.address) == (first_id, "unix:/0")


async def test_a_prompt_stays_where_nobody_else_decodes(
    open_pools: OpenPools, engine: MakeEngine
) -> None:
    first, second = engine(), engine()
    await say(open_pools(first, second, num_decoding=0), chat())
    assert len(first.asked) == 0 and len(second.asked) == 1


async def test_what_tells_of_its_prompt_stays(open_pools: OpenPools, engine: MakeEngine) -> None:
    first, second = engine(), engine()
    await say(open_pools(first, second), completion())
    await say(open_pools(first, second), chat(max_tokens=1))
    assert len(first.asked) == 0 and len(second.asked) == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("of_prefill", "of_decode"), [((0,), ()), ((), (0,)), ((), (3,))])
async def test_an_engine_of_either_pool_may_die(
    of_prefill: tuple[int, ...],
    of_decode: tuple[int, ...],
    stream: bool,
    open_office: Callable[..., Office],
    open_pools: OpenPools,
    engine: MakeEngine,
) -> None:
    """Before the first token, on the way, and amid the rest."""
    whole = await say(open_office(engine()), chat(stream=stream), surface=True)
    first, second, third = engine(*of_prefill), engine(*of_decode), engine()
    office = open_pools(first, second, third)
    found = await say(office, chat(stream=stream), surface=True)
    await office.settled()
    assert found.replace(RESUMED, b"") == whole or merged(found) == merged(whole)
    (_, *events) = await office.billed()
    bills = of_kind(events, "usage")
    assert sum(each.quantities.output_total for each in bills) == LENGTH
    prompts = [each.quantities.input_total for each in bills]
    assert [each for each in prompts if each] == prompts[:1]
    if not of_prefill:
        assert bills[0].finish == "moved" and first.acknowledged == [bills[0].id]


async def test_who_is_asked_as_a_prefill_engine_is_late_says_all(
    open_office: Callable[..., Office],
    open_pools: OpenPools,
    tokenizer: Tokenizer,
    engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "MIN_LATE_S", 0.0)
    monkeypatch.setattr(PredictionError, "late_s", lambda _, predicted_s: 0.0)
    whole = await say(open_office(engine()), chat())
    stuck, second = GatedEngine(core_of(tokenizer)), engine()
    office = open_pools(stuck, second, hedges=HedgeBudget(1.0))
    assert await say(office, chat()) == whole
    await office.settled()
    assert stuck.asked[0].sampling.max_tokens == 1
    assert [each.sampling.max_tokens for each in second.asked] == [LENGTH]
    assert second.asked[0].said == ()


async def test_where_one_pool_is_away_the_other_does_both(
    open_pools: OpenPools, engine: MakeEngine
) -> None:
    first, second = engine(), engine()
    second.connected = False
    office = open_pools(first, second)
    await say(office, chat())
    (asked,) = first.asked
    assert asked.sampling.max_tokens == LENGTH


class LonePenny(FakeEngine):
    """An engine that runs the model itself, in this process."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            model=PENNY,
            num_blocks=128,
            max_model_len=1024,
            deterministic=True,
            peer_listen=f"unix:{folder}/kv.sock",
        )
        self.real = EngineCore(config)
        assert self.real._loader is not None
        self.real._loader._costs = lambda: PrefillCosts(token_s=1.0)  # it reads what it may
        super().__init__(cast("FakeCore", self.real))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LonePenny]]:
    torch.set_num_threads(1)
    found = [LonePenny(tmp_path_factory.mktemp("kv")) for _ in range(3)]
    yield found
    for each in found:
        each.real.close()


@pytest.mark.parametrize("fields", PENNYS_REQUESTS.values(), ids=PENNYS_REQUESTS)
async def test_each_token_is_that_of_one_engine(
    fields: dict[str, Any],
    engines: list[LonePenny],
    spool: Spool,
    redis: Redis,
    tasks: TaskSet,
    threads: PrepareThreads,
) -> None:
    limiter = WatchedLimiter(redis)
    tokenizer, template = Tokenizer.load(PENNY), ChatTemplate.load(PENNY)

    def office_of(*pool: LonePenny) -> Office:
        replicas = tuple(
            EngineReplica(
                name=f"m/{number}",
                client=each,
                tokenizer=tokenizer,
                template=template,
                threads=threads,
                is_prefill=number == 0 and len(pool) > 1,
            )
            for number, each in enumerate(pool)
        )
        for number, replica in enumerate(replicas):
            status = pool[number].status
            found = said(status, number, 50 if number else 0)
            replica.view.heard(msgspec.structs.replace(found, peer=status.peer))
        route = Route(model="m", kind="engine", replicas=replicas, has_roles=len(pool) > 1)
        services = GenerationServices(
            fleet=Fleet([route], rng=AsListed()),
            limiter=limiter,
            spool=spool,
            price_book=PriceBook.load(),
            tasks=tasks,
            cache_salts=lambda org: f"salt of {org} {json.dumps(fields)}",
            stalled_reader_s=60.0,
        )
        return Office(services, redis)

    alone, prefill, decode = engines
    steps, fetched = prefill.status.num_steps, decode.status.fetched_tokens
    fields = {"max_tokens": NUM_TOKENS} | fields
    if fields.get("stop") == STOP:
        plain = chat(**fields | {"stop": None, "logprobs": True})
        tokens = merged(await say(office_of(alone), plain, surface=True))[0][0]["logprobs"]
        fields["stop"] = tokens[0]["token"][-1] + tokens[1]["token"][:2]
    request = chat(**fields)
    whole = await say(office_of(alone), request, surface=True)
    office = office_of(prefill, decode)
    found = await say(office, request, surface=True)
    await office.settled()
    await limiter.close()
    assert prefill.status.num_steps > steps, "the prompt was computed there"
    assert decode.status.fetched_tokens - fetched > 100, "and read from there"
    assert RESUMED not in found and merged(found) == merged(whole)
