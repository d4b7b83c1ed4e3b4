"""Seconds to the first token, by what waits, what is cached and what a step costs."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fairness import LANE_RANKS
from engine.fake.engine import FakeCore
from engine.protocol import LaneStatus, ReplicaStatus, StepCosts
from gateway.fleet.predicted_time import (
    MOST_CORRECTED,
    STEADY_S,
    UNTOLD,
    ModelCosts,
    PredictionError,
    StepPrice,
    ahead,
)

COSTS = StepCosts(step_s=0.01, decode_s=1e-3, prompt_token_s=1e-4, pair_s=1e-8)
_STATUS = FakeCore().status()
TOKENS = st.integers(1, 100_000)
SECONDS = st.floats(0, 1_000)


def status_of(**fields: Any) -> ReplicaStatus:
    """Return a status of an idle engine, with these fields otherwise."""
    return msgspec.structs.replace(_STATUS, **fields)


def test_a_prompt_takes_its_tokens_its_pairs_and_its_steps() -> None:
    price = StepPrice.of(status_of(max_step_tokens=512), COSTS)
    assert price.is_learnt
    # Three steps of 512 tokens at most.
    expected = 1200 * 1e-4 + (1200 * 1201 / 2) * 1e-8 + 3 * 0.01
    assert price.own_seconds(1200) == pytest.approx(expected)


def test_decodes_share_each_step_and_leave_it_less_room() -> None:
    lanes = {"interactive": LaneStatus(num_running=100)}
    price = StepPrice.of(status_of(max_step_tokens=612, lanes=lanes), COSTS)
    assert price.chunk == 512 and price.beside_s == pytest.approx(0.01 + 100 * 1e-3)
    assert price.idle_seconds(512) < price.own_seconds(512)


@given(TOKENS, TOKENS, st.integers(0, 100_000))
def test_more_takes_longer_and_so_does_what_comes_behind_more(
    tokens: int, more: int, cached: int
) -> None:
    price = StepPrice.of(status_of(max_step_tokens=2048), COSTS)
    prompt = price.own_seconds(tokens, cached)
    assert price.own_seconds(tokens + more, cached) > prompt
    assert price.own_seconds(tokens, cached + more) > prompt
    # What is cached of a prompt is never computed for less than nothing.
    assert price.own_seconds(tokens + cached) >= prompt


def test_nothing_learnt_tells_prompts_apart_all_the_same() -> None:
    price = StepPrice.of(status_of(), UNTOLD)
    assert not price.is_learnt
    assert 0 < price.own_seconds(100) < price.own_seconds(10_000)


def test_other_lanes_come_first_as_far_as_their_weights_let_them() -> None:
    waiting, ranks = [2.0, 1.0, 100.0], LANE_RANKS
    assert [*ranks] == ["interactive", "agentic", "batch"]
    assert ahead(waiting, 0, 1.0) == pytest.approx(2.0 + 3.0 * 4 / 16 + 3.0 * 1 / 16)
    assert ahead(waiting, 2, 1.0) == pytest.approx(100.0 + 2.0 + 1.0), "all of them"


@given(st.lists(SECONDS, min_size=3, max_size=3), SECONDS)
def test_no_more_comes_first_than_there_is(waiting: list[float], own_s: float) -> None:
    for rank in LANE_RANKS.values():
        assert waiting[rank] <= ahead(waiting, rank, own_s) <= sum(waiting) + 1e-6


def test_an_engine_that_has_learnt_nothing_is_priced_as_its_siblings() -> None:
    costs, others = ModelCosts(), StepCosts(prompt_token_s=2e-3)
    assert costs.known(UNTOLD) == UNTOLD, "nobody knows"
    assert costs.known(others) == others
    assert costs.known(UNTOLD) == others
    assert costs.known(COSTS) == COSTS and costs.known(UNTOLD) == COSTS, "those that came last"


def test_an_error_that_lasts_is_corrected() -> None:
    error = PredictionError()
    assert error.factor == 1.0
    for _ in range(200):
        error.observe(1.0, 2.5)
    assert error.factor == pytest.approx((2.5 + STEADY_S) / (1.0 + STEADY_S), rel=0.01)
    for _ in range(200):
        error.observe(1e-6, 1e6)
    assert error.factor <= MOST_CORRECTED * (1 + 1e-9)
    assert math.isfinite(error.factor)
