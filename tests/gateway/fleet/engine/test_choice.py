"""A request goes to the engine that is predicted to answer first, unless that is too late."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from engine.fairness import LANE_RANKS
from engine.fake.engine import FakeCore, FakeEngine
from engine.protocol import Lane, LaneStatus, StepCosts
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.engine_view import EngineView
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import Replica
from gateway.fleet.router import Fleet, Route
from gateway.fleet.routing import explain
from gateway.fleet.sent_work import SentWork
from gateway.lanes import Priority, Slo, latest_first_token_s, promised_first_token_s
from tests.engine.scheduling.scheduling import Clock
from tests.gateway.fleet.engine.test_replica import chat

COSTS = StepCosts(step_s=0.005, prompt_token_s=1e-3)
LONG = chat(messages=[{"role": "user", "content": "word " * 400}])
Make = Callable[[int], tuple[Fleet, Route]]
PRIORITY = Priority(tenant="org_a")


def engine_of(replica: Any) -> FakeEngine:
    assert isinstance(replica, EngineReplica) and isinstance(replica._client, FakeEngine)
    return replica._client


def hear(
    replicas: Sequence[Any],
    *waiting: int,
    costs: StepCosts = COSTS,
    lane: Lane = "interactive",
) -> None:
    """Let each say that so many tokens wait there."""
    for replica, tokens in zip(replicas, waiting, strict=True):
        lanes = {lane: LaneStatus(waiting_tokens=tokens)}
        replica.view.heard(
            msgspec.structs.replace(engine_of(replica).status, costs=costs, lanes=lanes)
        )


@pytest.fixture
def make(tokenizer: Tokenizer, template: ChatTemplate, threads: PrepareThreads) -> Make:
    def make_fleet(number: int) -> tuple[Fleet, Route]:
        clock = Clock()
        replicas = tuple(
            EngineReplica(
                name=f"m/{at}",
                model="m",
                client=FakeEngine(FakeCore(vocab_size=tokenizer.vocab_size)),
                tokenizer=tokenizer,
                template=template,
                threads=threads,
                view=EngineView(SentWork(), clock=clock),
            )
            for at in range(number)
        )
        route = Route(model="m", kind="engine", replicas=replicas)
        return Fleet([route], clock=clock, rng=random.Random(1)), route

    return make_fleet


async def test_one_engine_is_no_choice_and_is_predicted_all_the_same(make: Make) -> None:
    fleet, route = make(1)
    prepared = await route.replicas[0].prepare(LONG)
    found = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
    assert found.choice is None and found.soonest_s is None, "nothing is learnt"
    assert found.replicas == route.replicas
    hear(route.replicas, 1000)
    found = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
    own_s = found.idle_prefill_s
    assert own_s is not None and found.soonest_s == pytest.approx(1.0 + own_s, rel=0.02)


async def test_nobody_is_refused_while_an_engine_is_free(make: Make) -> None:
    """An engine that learnt nonsense would else never learn better."""
    fleet, route = make(2)
    prepared = await route.replicas[0].prepare(LONG)
    hear(route.replicas, 1000, 0, costs=StepCosts(prompt_token_s=100.0))
    assert fleet.choose(route, fleet.order(route), prepared, PRIORITY).is_one_free
    hear(route.replicas, 1000, 1, costs=StepCosts(prompt_token_s=100.0))
    found = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
    assert not found.is_one_free and (found.soonest_s or 0) > 100


async def test_an_engine_is_free_for_a_lane_whatever_waits_below_it(make: Make) -> None:
    fleet, route = make(1)
    prepared = await route.replicas[0].prepare(LONG)
    hear(route.replicas, 1000, lane="agentic")

    def is_free(lane: Lane) -> bool:
        priority = Priority(tenant="org_a", lane=lane)
        return fleet.choose(route, route.replicas, prepared, priority).is_one_free

    assert [is_free(lane) for lane in LANE_RANKS] == [True, False, False]


async def test_the_soonest_is_first_and_what_is_sent_counts_for_the_next(make: Make) -> None:
    fleet, route = make(3)
    hear(route.replicas, 2000, 0, 1000)
    prepared = await route.replicas[0].prepare(LONG)
    names = []
    for _ in range(6):
        found = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
        found.send()
        names.append(found.replicas[0].name)
    assert names[0] == "m/1" and "m/2" in names, names
    assert names.index("m/2") < (names.index("m/0") if "m/0" in names else len(names))
    assert found.choice is not None and len(found.choice.order) == 3
    told = explain(found.choice, [each.name for each in found.replicas])
    assert told.startswith(f"{found.choice.reason}, ") and told.count(" in ") == 3


async def test_a_replica_that_fails_comes_last_however_soon_it_would_be(make: Make) -> None:
    fleet, route = make(2)
    hear(route.replicas, 0, 5000)
    prepared = await route.replicas[0].prepare(LONG)
    fleet.report(route.replicas[0], ok=False)
    found = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
    assert [each.name for each in found.replicas] == ["m/1", "m/0"]
    engine_of(route.replicas[1]).lose()
    found = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
    assert len(found.replicas) == 2, "there is none better"


async def test_the_one_that_was_sent_the_prompt_is_asked_again(make: Make) -> None:
    fleet, route = make(2)
    hear(route.replicas, 0, 0)
    prepared = await route.replicas[0].prepare(LONG)
    async for _ in route.replicas[1].stream(
        prepared, attempt_id="a", cache_salt="", priority=PRIORITY
    ):
        continue
    found = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
    assert found.replicas[0] is route.replicas[1]
    assert found.choice is not None and found.choice.reason == "cached"
    assert " with " in explain(found.choice, [each.name for each in found.replicas])


async def test_a_clients_key_leads_to_its_engine(make: Make) -> None:
    fleet, route = make(3)
    hear(route.replicas, 0, 5000, 0)
    prepared = await route.replicas[0].prepare(LONG)
    names = set()
    for text in (b"a", b"b", b"c", b"d", b"e", b"f"):
        order = fleet.order(route, text)
        found = fleet.choose(route, order, prepared, PRIORITY, text)
        assert found.replicas == fleet.choose(route, order, prepared, PRIORITY, text).replicas
        names.add(found.replicas[0].name)
        assert found.choice is not None and len(found.replicas) == 3
    assert names == {"m/0", "m/2"}, "the second is busier than a key is worth"


async def test_a_key_is_worth_what_the_prompt_takes_and_no_deadline(make: Make) -> None:
    fleet, route = make(2)
    hear(route.replicas, 0, 0)
    prepared = await route.replicas[0].prepare(LONG)
    home = fleet.choose(route, route.replicas, prepared, PRIORITY, b"key").replicas[0]
    other = next(each for each in route.replicas if each is not home)
    own_s = home.view.price.own_seconds(prepared.input_tokens)  # type: ignore[attr-defined]

    def first(waits_s: float, latest_s: float | None) -> Replica:
        tokens = int(waits_s / COSTS.prompt_token_s)
        hear([home, other], tokens, 0)
        found = fleet.choose(
            route, route.replicas, prepared, PRIORITY, b"key", lambda _idle_s: latest_s
        )
        return found.replicas[0]

    assert first(0.8 * own_s, None) is home
    assert first(1.2 * own_s, None) is other, "a hit saves no more"
    assert first(0.8 * own_s, 2.0 * own_s) is home
    assert first(0.8 * own_s, 1.5 * own_s) is other, "it would come too late there"
    assert first(0.8 * own_s, 0.5 * own_s) is home, "it is late everywhere"
    fleet.report(home, ok=False)
    assert first(0.0, None) is other


async def test_predictions_are_corrected_by_how_they_turned_out(make: Make) -> None:
    fleet, route = make(2)
    hear(route.replicas, 1000, 1000)
    prepared = await route.replicas[0].prepare(LONG)
    first = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
    assert first.soonest_s is not None and first.predicted_s is not None
    for _ in range(100):
        found = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
        found.came(2 * first.predicted_s)
    found = fleet.choose(route, fleet.order(route), prepared, PRIORITY)
    assert found.soonest_s == pytest.approx(2 * first.soonest_s, rel=0.05)
    assert found.came(2 * first.predicted_s) == pytest.approx(0.0, abs=0.1)


async def test_what_comes_of_one_lane_says_nothing_of_another(make: Make) -> None:
    """A backlog of batches is overtaken: it comes later than predicted, and others do not."""
    fleet, route = make(2)
    hear(route.replicas, 1000, 1000)
    prepared, batch = await route.replicas[0].prepare(LONG), Priority(lane="batch")
    before = fleet.choose(route, route.replicas, prepared, PRIORITY).soonest_s
    for _ in range(100):
        found = fleet.choose(route, route.replicas, prepared, batch)
        found.came(3 * (found.predicted_s or 0.0))
    assert fleet.choose(route, route.replicas, prepared, PRIORITY).soonest_s == before
    other = msgspec.structs.replace(route, model="other")
    assert fleet.choose(other, route.replicas, prepared, batch).soonest_s == pytest.approx(
        found.predicted_s, rel=0.01
    ), "nor of another model"


def test_an_objective_that_grows_with_the_prompt_says_when_a_token_is_too_late() -> None:
    slo = Slo(ttft_s=1.0, ttft_per_prefill=2.0, tpot_s=0.05)
    within = Priority(deadline_s=30.0)
    assert latest_first_token_s(within, slo, 3.0, 0.5) == pytest.approx(1.0 + 6.0 - 0.5)
    assert latest_first_token_s(within, slo, 100.0, 0.5) == 30.0, "the deadline is sooner"
    assert latest_first_token_s(within, slo, None, 0.5) == 30.0, "nobody knows the prompt"
    assert latest_first_token_s(Priority(), slo, 3.0, 0.0) == 7.0
    assert latest_first_token_s(Priority(lane="batch"), slo, 3.0, 0.0) is None
    plain = Slo(ttft_s=1.0, tpot_s=0.05)
    assert latest_first_token_s(Priority(), plain, 3.0, 0.0) is None, "it refuses nothing"
    assert promised_first_token_s(Priority(), plain, 3.0, 0.25) == 0.75, "and promises all the same"
    assert promised_first_token_s(Priority(lane="batch"), plain, 3.0, 0.25) is None
    assert promised_first_token_s(Priority(deadline_s=0.5), None, None, 0.0) == 0.5
