"""A prompt whose first token is late is asked of another engine: one answer is delivered and
billed, whoever speaks first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from billing.events import UsageEvent
from engine.protocol import StepCosts
from engine.text.tokenizer import Tokenizer
from gateway.fleet import router
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.errors import FleetError
from gateway.fleet.predicted_time import MOST_LATE, PredictionError, Prompt
from gateway.inference.attempt import RESUMED
from gateway.inference.hedge_budget import MOST_SAVED, HedgeBudget
from gateway.lanes import Priority
from tests.gateway.inference.test_resuming import (
    LENGTH,
    MortalEngine,
    chat,
    core_of,
    of_kind,
    say,
)
from tests.gateway.inference.test_resuming import open_office as open_office
from tests.gateway.office import Office, read

COSTS = StepCosts(step_s=1e-4, prompt_token_s=1e-5)


class GatedEngine(MortalEngine):
    """Takes no step until its gate opens, as one that was stopped."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gate, self._sleep = asyncio.Event(), self._wait

    async def _wait(self, _seconds: float) -> None:
        await self.gate.wait()
        await asyncio.sleep(0)


OpenOffice = Callable[..., Office]
MakeGated = Callable[..., GatedEngine]


@pytest.fixture
def gated(tokenizer: Tokenizer) -> MakeGated:
    return lambda *deaths: GatedEngine(core_of(tokenizer), *deaths)


@pytest.fixture
def hedging(open_office: OpenOffice, monkeypatch: pytest.MonkeyPatch) -> OpenOffice:
    """An office whose engines have learnt that they are quick."""
    monkeypatch.setattr(router, "MIN_LATE_S", 0.0)

    def make(*engines: GatedEngine, share: float = 0.2) -> Office:
        office = open_office(*engines, hedges=HedgeBudget(share))
        for replica in office.services.fleet.routes[0].replicas:
            assert isinstance(replica, EngineReplica) and replica.status is not None
            replica.view.heard(msgspec.structs.replace(replica.status, costs=COSTS))
        return office

    return make


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def counted(office: Office, outcome: str) -> float:
    labels = {"model": "m", "outcome": outcome}
    return office.telemetry.registry.get_sample_value("tollgate_hedges_total", labels) or 0.0


async def billed(office: Office) -> list[UsageEvent]:
    """Return what came of this office's requests."""
    return [each for each in await office.billed() if each.attempt.org == office.org]


@pytest.fixture
async def whole(open_office: OpenOffice, gated: MakeGated) -> bytes:
    """The answer of an engine that nothing happens to."""
    engine = gated()
    engine.gate.set()
    return await say(open_office(engine), chat())


async def test_another_engine_answers_for_one_that_is_stuck(
    hedging: OpenOffice, gated: MakeGated, whole: bytes
) -> None:
    stuck, free = gated(), gated()
    free.gate.set()
    office = hedging(stuck, free)
    assert await say(office, chat()) == whole
    await office.settled()
    assert not stuck.core.has_work(), "it was left"
    (bill,) = await billed(office)
    assert (bill.id, bill.kind, bill.finish) == (free.asked[0].request_id, "usage", "done")
    assert bill.quantities.output == LENGTH
    assert stuck.asked[0].request_id != bill.id and free.acknowledged == [bill.id]
    settled = office.services.limiter.settled  # type: ignore[attr-defined]
    assert settled[-1] == bill.quantities.input_total + LENGTH
    assert counted(office, "won") == 1
    stuck.gate.set()
    assert await say(office, chat()) == whole, "who was late is asked again"


async def test_who_was_late_and_still_comes_first_answers(
    hedging: OpenOffice, gated: MakeGated, whole: bytes
) -> None:
    late, other = gated(), gated()
    office = hedging(late, other)
    answer = asyncio.create_task(say(office, chat()))
    await until(lambda: other.asked)
    late.gate.set()
    assert await answer == whole
    await office.settled()
    assert not other.core.has_work(), "it was left"
    (bill,) = await billed(office)
    assert (bill.id, bill.quantities.output) == (late.asked[0].request_id, LENGTH)
    assert counted(office, "lost") == 1


EVENTS = ("first speaks", "second speaks", "first dies", "second dies", "client leaves")


@pytest.mark.parametrize("both_at_once", [False, True])
@pytest.mark.parametrize("then", EVENTS)
@pytest.mark.parametrize("happens", EVENTS)
async def test_at_most_one_answer_is_delivered_and_billed(
    happens: str,
    then: str,
    both_at_once: bool,
    hedging: OpenOffice,
    gated: MakeGated,
    whole: bytes,
) -> None:
    """This holds whatever happens once both are asked, and whatever next."""
    first, second = gated(), gated()
    first.comes_back = second.comes_back = True
    office = hedging(first, second)
    delivery = office.begin(request=chat())
    answer = asyncio.create_task(read(delivery))
    await until(lambda: second.asked)

    def die(engine: GatedEngine) -> None:
        engine.lose()
        engine.restore()

    acts: dict[str, Callable[[], object]] = {
        "first speaks": first.gate.set,
        "second speaks": second.gate.set,
        "first dies": partial(die, first),
        "second dies": partial(die, second),
        "client leaves": delivery.abandon,
    }
    acts[happens]()
    if not both_at_once:
        await asyncio.sleep(0.01)
    acts[then]()
    await asyncio.sleep(0.01)
    for engine in (first, second):
        engine.gate.set()  # whoever still has something to do ends
    try:
        found = (await answer).replace(RESUMED, b"")
    except FleetError:
        found = b""
    await office.settled()
    assert found == whole or (delivery.failure or delivery.abandoned and whole.startswith(found))
    events = await billed(office)
    bills = of_kind(events, "usage")
    prompts = [each.quantities.input_total for each in bills if each.quantities.input_total]
    assert len(prompts) <= 1, "the prompt is billed once"
    assert sum(each.quantities.output for each in bills) <= LENGTH
    if found == whole:
        assert len(prompts) == 1
        assert sum(each.quantities.output for each in bills) == LENGTH
    assert not first.core.has_work() and not second.core.has_work()
    assert not office.services.spool._open


async def test_nobody_is_asked_twice_while_the_others_are_busy(
    hedging: OpenOffice, gated: MakeGated, whole: bytes
) -> None:
    late, busy = gated(), gated()
    office = hedging(late, busy)
    _, second = office.services.fleet.routes[0].replicas
    assert isinstance(second, EngineReplica)
    answer = asyncio.create_task(say(office, chat()))
    await until(lambda: late.asked)
    second.view.send(Prompt(10**9), "interactive")
    await until(lambda: counted(office, "withheld"))
    late.gate.set()
    assert await answer == whole
    assert busy.asked == []


@pytest.mark.parametrize(("share", "lane"), [(0.0, "interactive"), (0.2, "batch")])
async def test_who_is_not_to_be_hedged_is_not(
    share: float, lane: Any, hedging: OpenOffice, gated: MakeGated
) -> None:
    late, other = gated(), gated()
    office = hedging(late, other, share=share)
    delivery = office.begin(request=chat(), priority=Priority(lane=lane))
    answer = asyncio.create_task(read(delivery))
    await until(lambda: late.asked)
    await asyncio.sleep(0.1)
    late.gate.set()
    await answer
    assert other.asked == []
    assert counted(office, "withheld") == 0


def test_a_share_of_requests_is_hedged_at_most() -> None:
    budget = HedgeBudget(0.02)
    hedged = 0
    for _ in range(10_000):
        budget.earn()
        hedged += budget.spend()
    assert 195 <= hedged <= 201
    for _ in range(10_000):
        budget.earn()
    assert [budget.spend() for _ in range(6)] == [True] * int(MOST_SAVED) + [False] * 2
    assert not HedgeBudget(0.0).spend()


def test_late_is_what_one_of_twenty_is() -> None:
    error = PredictionError()
    before_s = error.late_s(1.0)
    for number in range(4000):
        error.observe(1.0, 6.0 if number % 10 == 0 else 1.0)
    assert 5.0 < error.late_s(1.0) < 8.0 and before_s < 3.0
    for _ in range(4000):
        error.observe(1.0, 1.0)
    assert error.late_s(1.0) < 3.0
    for _ in range(4000):
        error.observe(0.001, 1000.0)
    assert error.late_s(1.0) <= (error.factor + 1) * MOST_LATE
