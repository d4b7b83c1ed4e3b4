"""Threads are used where they pay, by the clock alone."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.kernels.choice.threads import FIRST_TRY, TRY_EVERY, Team


class Machine:
    """Runs take so long with all threads, and with one."""

    def __init__(self, together: float, alone: float) -> None:
        self.together, self.alone = together, alone
        self.team = Team(2)

    def run(self, count: int, work: str = "step") -> Counter[int]:
        chosen: Counter[int] = Counter()
        for _ in range(count):
            threads = self.team.choose(work)
            self.team.took(work, threads, self.alone if threads == 1 else self.together)
            chosen[threads] += 1
        return chosen


def test_cores_of_its_own_are_used() -> None:
    chosen = Machine(together=0.01, alone=0.02).run(10 * TRY_EVERY)
    assert 1 <= chosen[1] <= 11


def test_busy_cores_are_left_and_found_again() -> None:
    machine = Machine(together=0.01, alone=0.02)
    machine.run(2 * TRY_EVERY)
    machine.together = 0.08
    machine.run(5)
    assert machine.run(TRY_EVERY)[2] <= 1
    machine.together = 0.01
    machine.run(4 * TRY_EVERY)
    assert machine.run(TRY_EVERY)[1] <= 1


def test_a_single_slow_run_changes_nothing() -> None:
    machine = Machine(together=0.01, alone=0.02)
    machine.run(2 * FIRST_TRY)
    machine.team.took("step", machine.team.choose("step"), 1.0)
    assert machine.run(20) == {2: 20}


def test_what_is_learned_from_one_kind_of_work_holds_for_another() -> None:
    machine = Machine(together=0.01, alone=0.02)
    machine.run(20, "large")
    machine.together, machine.alone = 0.001, 0.002
    assert machine.run(20, "small") == {2: 20}
    machine.together = 0.004
    machine.run(5, "small")
    machine.together = 0.04
    assert machine.run(20, "large") == {1: 20}


def test_work_that_grows_keeps_its_threads() -> None:
    """As contexts do: every run takes a little longer than the one before."""
    machine = Machine(together=0.01, alone=0.018)
    chosen: Counter[int] = Counter()
    for _ in range(6 * TRY_EVERY):
        machine.together *= 1.002
        machine.alone *= 1.002
        chosen += machine.run(1)
    assert chosen[1] <= 10


@pytest.mark.parametrize("seconds", [0.01, 1.0])
def test_one_core_has_no_choice(seconds: float) -> None:
    team = Team(1)
    for _ in range(2 * TRY_EVERY):
        assert team.choose("step") == 1
        team.took("step", 1, seconds)
