"""The simulator admits by the gateway's own limits and early refusals, as its scripts do."""

from __future__ import annotations

import random

import msgspec
import pytest
from redis.asyncio import Redis

from bench.sim.admission import MODEL, Rules, SimulatedAdmission
from bench.sim.orderings import FAIR
from bench.sim.report import Report, report
from bench.sim.scenarios import OVERLOAD_DEADLINE_S, Scenario, budget, overload
from bench.sim.world import IDLE, Outcome, World
from engine.protocol import LaneStatus, StepCosts
from gateway.lanes import LaneDeadlines
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Refusal, burst
from gateway.principal import Plan, Principal
from tests.bench.test_sim import COST
from tests.engine.scheduling.scheduling import Clock
from tests.gateway.limits.limiter_oracle import CLOCK_KEY, move_clock

PLAN = Plan(name="p", tokens_per_minute=6000, input_tokens_per_minute=5000, requests_per_minute=40)


async def test_it_lets_in_what_the_scripts_let_in(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_clock(monkeypatch)
    clock, rng = Clock(), random.Random(5)
    gate, limiter = SimulatedAdmission(Rules({"org": PLAN}), clock), Limiter(redis)
    who = Principal(
        org_id="org", project_id="org", key_id="org", key_hint="", scopes=frozenset(), org_plan=PLAN
    )
    verdicts = []
    for number in range(200):
        clock.now += rng.choice([0.0, 0.25, 1.0, 4.0])
        await redis.set(CLOCK_KEY, 1_700_000_000_000_000 + round(clock.now * 1e6))
        prompt, answer = rng.choice([10, 100, 900, 1500, 6001]), rng.randint(1, 200)
        refused = gate.refuses(
            str(number), "org", "interactive", [1] * prompt, answer, salt=str(number)
        )
        verdict = await limiter.admit(
            who, MODEL, input_tokens=prompt, max_output_tokens=answer, lease_id=f"lease{number}"
        )
        verdicts.append((refused is None, not isinstance(verdict, Refusal)))
    assert all(ours == theirs for ours, theirs in verdicts)
    assert 20 < sum(ours for ours, _ in verdicts) < 180


def test_what_was_not_used_is_given_back_and_what_never_ran_wholly() -> None:
    clock = Clock()
    gate = SimulatedAdmission(Rules({"org": Plan(name="p", tokens_per_minute=600)}), clock)

    def passes(name: str, answer: int) -> bool:
        turn = ("org", "interactive", [1] * 50, answer)
        return gate.refuses(name, *turn, salt=name) is None  # type: ignore[arg-type]

    assert passes("a", 50) and not passes("b", 50), "a bucket holds 100"
    gate.settle("a", 50, 10)
    assert not passes("b", 50)
    gate.void("b")  # was not let in: nothing to give back
    assert not passes("b", 50)
    clock.now += 6.0
    assert passes("b", 50) and not passes("c", 1)
    gate.void("b")
    assert passes("c", 50)


def test_what_would_come_too_late_is_refused_before_it_takes_anything() -> None:
    plan = Plan(name="p", requests_per_minute=6)
    gate = SimulatedAdmission(Rules({"org": plan}, LaneDeadlines(interactive=2.0)), Clock())
    status = msgspec.structs.replace(IDLE, costs=StepCosts(prompt_token_s=0.01))

    def refuses(name: str) -> str | None:
        return gate.refuses(name, "org", "interactive", [1] * 10, 1, salt="s")

    waiting = {"interactive": LaneStatus(waiting_tokens=1000)}
    gate.heard(msgspec.structs.replace(status, lanes=waiting))
    assert refuses("a") == refuses("b") == "late"
    gate.heard(msgspec.structs.replace(status, lanes={"interactive": LaneStatus()}))
    assert refuses("c") is None
    assert refuses("d") == "limit"


def simulate(scenario: Scenario) -> tuple[Outcome, Report]:
    outcome = World(COST, FAIR, scenario.setup).run(scenario.sessions, scenario.horizon_s)
    return outcome, report(outcome)


def test_who_asks_for_more_than_their_plan_gets_no_more_and_takes_it_from_nobody() -> None:
    scenario = budget(COST, 1, 400)
    assert scenario.setup.rules is not None
    limit = scenario.setup.rules.plans["greedy"].tokens_per_minute
    assert limit is not None
    fates = simulate(scenario)[0].fates
    chats = [fate for fate in fates if fate.session.tenant != "greedy"]
    assert chats and not any(fate.was_refused for fate in chats)
    let_in = [f for f in fates if f.session.tenant == "greedy" and not f.was_refused]
    assert 0 < len(let_in) < len(fates) - len(chats)
    used = sum(fate.asked.prompt + fate.said for fate in let_in)
    assert used <= burst(limit) + limit / 60 * scenario.horizon_s + 2048


def test_early_refusals_keep_the_deadline_for_who_is_let_in() -> None:
    outcome, found = simulate(overload(COST, 1, 400))
    chats = found.lanes["interactive"]
    assert chats.refused > 20 and chats.done > 100
    assert chats.ttft_p99_s <= 1.25 * OVERLOAD_DEADLINE_S
    assert found.lanes["batch"].refused == 0, "batch has no deadline"
    begun = [fate for fate in outcome.fates if fate.first_s is not None]
    assert not any(fate.was_refused for fate in begun)
