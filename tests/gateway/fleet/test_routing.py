"""The replica that a request goes to, by predicted seconds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import LaneStatus, StepCosts
from gateway.fleet.engine_view import EngineView
from gateway.fleet.predicted_time import Prompt
from gateway.fleet.routing import (
    MOST_RECENT_SHARE,
    TIE_S,
    Candidate,
    candidates_of,
    choose,
    recent_share,
)
from gateway.fleet.sent_work import SentWork
from tests.engine.scheduling.scheduling import Clock
from tests.gateway.fleet.test_predicted_time import status_of

COSTS = StepCosts(step_s=5e-3, decode_s=1e-4, prompt_token_s=1e-4)
IDLE = status_of(costs=COSTS, max_step_tokens=512)
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        predicted_s=st.floats(0, 100),
        cached=st.integers(0, 100_000),
        beside_s=st.floats(0, 100),
        recent_s=st.floats(0, 100),
    ),
    min_size=1,
    max_size=8,
)


def views_of(sent: list[SentWork], clock: Clock) -> list[EngineView]:
    views = [EngineView(each, clock=clock) for each in sent]
    for view in views:
        view.heard(IDLE)
    return views


@given(CANDIDATES)
def test_each_replica_is_in_the_order_once_and_none_is_much_better_than_the_first(
    candidates: list[Candidate],
) -> None:
    choice = choose(candidates)
    assert sorted(choice.order) == [*range(len(candidates))]
    assert choice.least_s == min(each.predicted_s for each in candidates)
    share, first = recent_share(candidates), candidates[choice.order[0]]
    assert 0 < share <= MOST_RECENT_SHARE
    assert all(first.score_s(share) <= each.score_s(share) + TIE_S + 1e-9 for each in candidates)


@given(CANDIDATES, st.integers(0, 7))
def test_a_replica_with_less_to_do_never_loses_by_it(
    candidates: list[Candidate], which: int
) -> None:
    at = which % len(candidates)
    better = Candidate(0.0, candidates[at].cached)
    changed = [*candidates[:at], better, *candidates[at + 1 :]]
    share, first = recent_share(changed), choose(changed).order[0]
    assert first == at or changed[first].score_s(share) <= TIE_S


def test_the_one_with_the_prefix_is_asked_until_another_is_sooner() -> None:
    clock = Clock()
    views = views_of([SentWork(), SentWork()], clock)
    found = candidates_of(views, 4_000, [3_000, 0], "interactive")
    assert found[0].predicted_s < found[1].predicted_s
    assert choose(found).order == (0, 1) and choose(found).reason == "cached"
    lanes = {"interactive": LaneStatus(waiting_tokens=5_000)}
    views[0].heard(status_of(costs=COSTS, max_step_tokens=512, lanes=lanes))
    choice = choose(candidates_of(views, 4_000, [3_000, 0], "interactive"))
    assert choice.order == (1, 0) and choice.reason == "least_work"


def test_of_alike_ones_the_one_that_had_less_lately_is_asked() -> None:
    clock = Clock()
    views = views_of([SentWork(), SentWork(), SentWork()], clock)
    for at in (0, 2, 0):
        views[at].send(Prompt(100), "interactive")
    for view in views:
        view.heard(IDLE)
    choice = choose(candidates_of(views, 100, [0, 0, 0], "interactive"))
    assert choice.order == (1, 2, 0) and choice.reason == "spread"


def test_workers_that_hear_nothing_for_long_do_not_run_in_a_herd() -> None:
    """Four workers, four replicas, statuses frozen: what each sends the others count at once."""
    clock, rng = Clock(), random.Random(1)
    sent = [SentWork() for _ in range(4)]
    workers = [views_of(sent, clock) for _ in range(4)]
    work = [0.0] * 4
    for _ in range(400):
        views, tokens = rng.choice(workers), rng.randint(100, 4_000)
        chosen = choose(candidates_of(views, tokens, [0] * 4, "interactive")).order[0]
        views[chosen].send(Prompt(tokens), "interactive")
        work[chosen] += tokens
        clock.now += 0.01
    assert max(work) / (sum(work) / 4) <= 1.05


@pytest.mark.parametrize("cached", [0, 99, 100, 5_000])
def test_the_last_token_is_always_computed(cached: int) -> None:
    view = views_of([SentWork()], Clock())[0]
    (found,) = candidates_of([view], 100, [cached], "interactive")
    assert found.predicted_s > 0
