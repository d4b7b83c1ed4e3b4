"""Costs of steps are learnt from their times."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import StepCosts
from engine.scheduling.step_costs import LEAST_STEPS, LearntCosts, StepWork

TRUE = StepCosts(
    step_s=4e-3,
    decode_s=2e-4,
    prompt_token_s=1e-4,
    context_token_s=3e-7,
    pair_s=1e-8,
    chunk_context_token_s=1e-7,
)


def mixed(rng: random.Random) -> StepWork:
    decodes, tokens = rng.randint(0, 64), rng.choice([0, rng.randint(1, 512)])
    start = rng.randint(0, 8192) if tokens else 0
    pairs = tokens * (start + (tokens + 1) / 2)
    return StepWork(decodes, tokens, decodes * rng.randint(16, 4096), pairs, start)


def learn(learnt: LearntCosts, seed: int, steps: int, *, noise: float = 0.0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        parts = mixed(rng)
        learnt.observe(parts, parts.seconds(TRUE) * (1 + noise * rng.random()))


def test_nothing_is_told_before_enough_prompts() -> None:
    learnt = LearntCosts()
    for _ in range(LEAST_STEPS - 1):
        learnt.observe(StepWork(0, 100, 0, 5050.0), 0.01)
        learnt.observe(StepWork(1, 0, 100, 0.0), 0.001)
    assert learnt.costs == StepCosts()
    learnt.observe(StepWork(0, 100, 0, 5050.0), 0.01)
    assert learnt.costs.prompt_token_s > 0


def test_what_steps_cost_is_found() -> None:
    learnt = LearntCosts()
    learn(learnt, 1, 600)
    found, known = msgspec.structs.astuple(learnt.costs), msgspec.structs.astuple(TRUE)
    assert found == pytest.approx(known, rel=1e-3)


@given(st.integers(0, 2**32), st.floats(0, 0.5))
def test_predictions_are_as_good_as_the_steps_are_steady(seed: int, noise: float) -> None:
    learnt = LearntCosts()
    learn(learnt, seed, 200, noise=noise)
    costs, rng = learnt.costs, random.Random(seed + 1)
    assert min(msgspec.structs.astuple(costs)) >= 0
    for parts in (mixed(rng) for _ in range(20)):
        assert parts.seconds(costs) == pytest.approx(parts.seconds(TRUE), rel=0.05 + noise)


def test_an_hour_of_decodes_leaves_what_a_prompt_takes() -> None:
    learnt = LearntCosts()
    learn(learnt, 3, 400)
    before = learnt.costs
    for number in range(20_000):
        decodes = StepWork(8, 0, 8 * (100 + number % 1000), 0.0)
        learnt.observe(decodes, decodes.seconds(TRUE))
    assert learnt.costs.prompt_token_s == pytest.approx(before.prompt_token_s, rel=0.02)
    assert learnt.costs.pair_s == pytest.approx(before.pair_s, rel=0.05)


def test_a_machine_that_slows_down_is_learnt_anew() -> None:
    learnt, rng = LearntCosts(), random.Random(4)
    learn(learnt, 4, 400)
    for _ in range(8_000):
        parts = mixed(rng)
        learnt.observe(parts, 2 * parts.seconds(TRUE))
    assert learnt.costs.prompt_token_s == pytest.approx(2 * TRUE.prompt_token_s, rel=0.05)
