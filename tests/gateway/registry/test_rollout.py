"""A rollout moves nobody back and forth, ends once, and grows by what was seen alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.registry import rollout as states
from gateway.registry.comparison import Outcomes
from gateway.registry.rollout import (
    ACTIVE,
    GROUPS,
    WATCHED,
    ModelRollout,
    Seen,
    check_steps,
    group_of,
    look,
)
from gateway.tenancy.errors import Conflict, InvalidField
from tests.budget import examples
from tests.gateway.registry import made
from tests.gateway.registry.made import rollout

ORGS = [f"org_{number}" for number in range(400)]


def ended(requests: int, **counts: int) -> Outcomes:
    return Outcomes(requests=requests, **counts)


class RolloutMachine(RuleBasedStateMachine):
    """Requests end, processes look and operators change their minds, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = rollout(steps=(5, 25, 100), watch=20, step=WATCHED)
        self.new, self.old = Outcomes(), Outcomes()
        self.seen: Seen = {}
        self.holders: set[str] = set()
        self.state, self.step = self.now.state, self.now.step

    @rule(
        new=st.integers(0, 60), old=st.integers(0, 60), bad=st.integers(0, 3), worse=st.booleans()
    )
    def requests_end(self, new: int, old: int, bad: int, worse: bool) -> None:
        self.new.add(ended(new, refused=new // 2 if worse else min(bad, new)))
        self.old.add(ended(old, refused=min(bad, old)))

    @rule(served=st.sampled_from([True] * 9 + [False]))
    def somebody_looks(self, served: bool) -> None:
        seen = (self.new.requests, self.old.requests)
        before = self.now
        needed = before.watch if before.step == WATCHED else before.least
        self.seen = made.seen(before, self.new, self.old, self.seen)
        self.now = look(before, self.seen, is_served=served)
        if self.now.step != before.step or self.now.state == "completed" != before.state:
            assert min(seen) >= needed and before.state == "running" and served
            self.new, self.old = Outcomes(), Outcomes()
        assert look(self.now, self.seen) is self.now

    @rule(change=st.sampled_from([states.paused, states.resumed]))
    def an_operator_pauses_or_resumes(self, change: Callable[[ModelRollout], ModelRollout]) -> None:
        wanted = "running" if change is states.paused else "paused"
        if self.now.state == wanted:
            changed = change(self.now)
            assert (changed.step, changed.percent) == (self.now.step, self.now.percent)
            self.now = changed
        else:
            with pytest.raises(Conflict):
                change(self.now)

    @precondition(lambda self: self.new.requests > 150)
    @rule(change=st.sampled_from([states.aborted, states.completed]))
    def an_operator_ends_it(self, change: Callable[[ModelRollout], ModelRollout]) -> None:
        if self.now.is_active:
            self.now = change(self.now)
            assert self.now.reason
        else:
            with pytest.raises(Conflict):
                change(self.now)

    @invariant()
    def it_ends_once_and_never_goes_back(self) -> None:
        if self.state not in ACTIVE:
            assert (self.now.state, self.now.step) == (self.state, self.step)
        assert self.now.step - self.step in (0, 1)
        self.state, self.step = self.now.state, self.now.step

    @invariant()
    def who_has_the_version_keeps_it(self) -> None:
        holders = {org for org in ORGS if group_of(org, self.now.id) < self.now.percent}
        assert self.holders <= holders if self.now.is_active else not holders
        self.holders = holders


RolloutMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestRolloutMachine = RolloutMachine.TestCase


def test_a_share_is_of_the_organizations_and_another_one_of_each_rollout() -> None:
    one = {org for org in ORGS if group_of(org, "mrol_1") < 25}
    other = {org for org in ORGS if group_of(org, "mrol_2") < 25}
    assert 70 < len(one) < 130 and 5 < len(one & other) < 60
    assert {group_of(org, "mrol_1") for org in ORGS} <= set(GROUPS)


@pytest.mark.parametrize("steps", [(), (0,), (5, 5), (25, 5), (5, 101), (100,), tuple(range(21))])
def test_steps_grow_from_a_share(steps: tuple[int, ...]) -> None:
    with pytest.raises(InvalidField, match="steps"):
        check_steps(steps)


def test_a_version_that_refuses_more_is_taken_back_also_while_it_is_paused() -> None:
    now, new, old = states.paused(rollout(steps=(5,))), Outcomes(), Outcomes()
    for _ in range(60):
        new.add(ended(20, refused=2))
        old.add(ended(380))
        now = look(now, made.seen(now, new, old))
    assert (now.state, now.percent) == ("taken_back", 0)
    assert now.reason.startswith("refused 10.0% of ")


def test_the_last_share_stays_until_an_operator_completes_it() -> None:
    now = rollout(steps=(5,), least=10)
    for count in range(1, 6):
        now = look(now, made.seen(now, ended(100 * count), ended(1000 * count)))
    assert (now.state, now.percent) == ("running", 5)
    assert states.completed(now).state == "completed"


def test_one_version_alone_takes_no_step() -> None:
    now = rollout()
    assert look(now, made.seen(now, ended(1000, refused=900), Outcomes())) is now
    assert look(now, made.seen(now, Outcomes(), ended(1000))) is now
