"""An upstream that fails rests alone, and comes back."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mcp_bridge.upstream.circuit_breaker import (
    COOL_DOWN_MAX_S,
    COOL_DOWN_MIN_S,
    FAILURES_TO_REST,
    JITTER,
    TRIAL_S,
    Attempt,
    Breaker,
    UpstreamResting,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def failing(breaker: Breaker, times: int, clock: Clock) -> None:
    for _ in range(times):
        clock.now += breaker.health().retry_after_s
        breaker.report(breaker.attempt(), failure="timeout")


def test_it_rests_after_failures_in_a_row_and_says_until_when() -> None:
    clock = Clock()
    breaker = Breaker("github", clock=clock, rng=random.Random(1))
    failing(breaker, FAILURES_TO_REST - 1, clock)
    breaker.report(breaker.attempt(), failure=None)
    failing(breaker, FAILURES_TO_REST - 1, clock)
    assert breaker.state == "closed"
    failing(breaker, 1, clock)
    with pytest.raises(UpstreamResting, match="github: does not answer") as refused:
        breaker.attempt()
    assert COOL_DOWN_MIN_S <= refused.value.retry_after_s <= COOL_DOWN_MIN_S * (1 + JITTER)
    health = breaker.health()
    assert (health.state, health.last_failure) == ("resting", "timeout")


def test_cool_downs_double_up_to_a_bound() -> None:
    clock = Clock()
    breaker = Breaker("x", clock=clock, rng=random.Random(1))
    failing(breaker, FAILURES_TO_REST, clock)
    waits = []
    for _ in range(40):
        waits.append(breaker.health().retry_after_s)
        failing(breaker, 1, clock)
    for number, wait_s in enumerate(waits):
        bound_s = min(COOL_DOWN_MIN_S * 2**number, COOL_DOWN_MAX_S)
        assert bound_s <= wait_s <= bound_s * (1 + JITTER) + 1e-6


def test_one_call_tries_and_what_it_brings_counts() -> None:
    clock = Clock()
    breaker = Breaker("x", clock=clock)
    before = breaker.attempt()
    failing(breaker, FAILURES_TO_REST, clock)
    clock.now += COOL_DOWN_MAX_S
    trial = breaker.attempt()
    assert breaker.state == "trying"
    with pytest.raises(UpstreamResting):
        breaker.attempt()
    breaker.report(before, failure=None)
    assert breaker.state == "trying", "one that was on its way before says nothing"
    breaker.report(trial, failure=None)
    assert breaker.state == "closed"
    assert breaker.health().last_failure is None


def test_a_trial_that_is_given_up_or_never_heard_of_lets_the_next_one_try() -> None:
    clock = Clock()
    breaker = Breaker("x", clock=clock)
    failing(breaker, FAILURES_TO_REST, clock)
    clock.now += COOL_DOWN_MAX_S
    breaker.give_up(breaker.attempt())
    lost = breaker.attempt()
    clock.now += TRIAL_S
    trial = breaker.attempt()
    breaker.report(lost, failure=None)
    assert breaker.state == "trying"
    breaker.report(trial, failure=None)
    assert breaker.state == "closed"


def test_health_says_since_when_it_fails_and_when_it_answered_last() -> None:
    clock = Clock()
    breaker = Breaker("github", clock=clock)
    assert (breaker.health().failing_s, breaker.health().answered_s) == (None, None)
    breaker.report(breaker.attempt(), failure=None)
    clock.now += 5
    breaker.report(breaker.attempt(), failure="timeout")
    clock.now += 2
    breaker.report(breaker.attempt(), failure="status_503")
    health = breaker.health()
    assert (health.failing_s, health.answered_s, health.last_failure) == (2, 7, "status_503")
    breaker.report(breaker.attempt(), failure=None)
    assert (breaker.health().failing_s, breaker.health().answered_s) == (None, 0)


class Machine(RuleBasedStateMachine):
    """Calls that overlap, in any order, on virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker("x", clock=self.clock, rng=random.Random(7))
        self.open: list[Attempt] = []

    @rule()
    def ask(self) -> None:
        resting = self.breaker.state != "closed"
        wait_s = self.breaker.health().retry_after_s
        try:
            attempt = self.breaker.attempt()
        except UpstreamResting as refused:
            assert resting
            assert 0 < refused.retry_after_s == wait_s
            return
        assert wait_s == 0
        if resting:
            assert self.breaker.state == "trying"
        self.open.append(attempt)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(["fine", "failed", "given up"]))
    def end(self, data: st.DataObject, outcome: str) -> None:
        at = data.draw(st.integers(0, len(self.open) - 1))
        attempt = self.open.pop(at)
        if outcome == "given up":
            self.breaker.give_up(attempt)
        else:
            self.breaker.report(attempt, failure=None if outcome == "fine" else "timeout")

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def it_is_always_tried_again(self) -> None:
        assert self.breaker.health().retry_after_s <= COOL_DOWN_MAX_S * (1 + JITTER)

    @invariant()
    def nobody_waits_for_a_healthy_one(self) -> None:
        if self.breaker.state == "closed":
            assert self.breaker.health().retry_after_s == 0


TestBreaker = Machine.TestCase
