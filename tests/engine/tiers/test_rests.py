"""Checks who leaves a late source alone: against a model, and on a clock on which disks come and
go."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tiers.policy import PATIENCE
from engine.tiers.rests import FIRST_REST_S, MAX_CLASS, MAX_REST_S, MIN_CLASS, SourceRests
from tests.budget import examples

waits = st.integers(-24, 24).flatmap(lambda power: st.floats(1, 2).map(lambda x: x * 2.0**power))
events = st.lists(
    st.tuples(st.sampled_from(["late", "late", "in time"]), waits, st.floats(0, 5.0)), max_size=20
)


def replay(told: Iterable[tuple[str, float, float]]) -> tuple[SourceRests, float]:
    rests, now_s = SourceRests(), 0.0
    for kind, wait_s, later_s in told:
        now_s += later_s
        if kind == "late":
            rests.was_late("disk", wait_s, now_s, now_s)
        elif kind == "in time":
            rests.was_in_time("disk", wait_s)
    return rests, now_s


@settings(max_examples=examples(400))
@given(events, waits)
def test_who_waits_longer_never_hears_that_who_waits_shorter_was_late(
    told: list[tuple[str, float, float]], wait_s: float
) -> None:
    """The defect that was: what short prompts lost made long ones rest."""
    rests, now_s = replay(told)
    without, _ = replay(
        ("nothing" if kind == "late" and each <= wait_s / 2 else kind, each, later_s)
        for kind, each, later_s in told
    )
    heard = [each.is_left_alone("disk", wait_s, now_s) for each in (rests, without)]
    assert heard[0] == heard[1] or wait_s / 2 in {each for _, each, _ in told}


@settings(max_examples=examples(400))
@given(events, waits)
def test_a_rest_ends(told: list[tuple[str, float, float]], wait_s: float) -> None:
    rests, now_s = replay(told)
    assert not rests.is_left_alone("disk", wait_s, now_s + MAX_REST_S)
    assert not rests.is_left_alone("peer", wait_s, now_s), "another source has its own"
    rests.was_in_time("disk", wait_s)
    for longer in (1, 2, 1e3):
        assert not rests.is_left_alone("disk", longer * wait_s, now_s)
    assert len(rests._rests["disk"]) <= MAX_CLASS - MIN_CLASS + 1


def test_one_that_is_late_again_and_again_rests_for_longer() -> None:
    rests, now_s, lengths = SourceRests(), 0.0, []
    for _ in range(7):
        rests.was_late("disk", 0.02, now_s, now_s)
        ends_s = now_s
        while rests.is_left_alone("disk", 0.02, ends_s):
            ends_s += 0.25
        lengths.append(ends_s - now_s)
        assert rests.is_left_alone("disk", 0.005, now_s) == (lengths[-1] > 0)
        assert not rests.is_left_alone("disk", 0.04, now_s)
        now_s = ends_s
    assert lengths == [0, FIRST_REST_S, 2, 4, MAX_REST_S, MAX_REST_S, MAX_REST_S]


def test_who_would_not_wait_at_all_says_nothing_about_others() -> None:
    rests = SourceRests()
    for now_s in (0.0, 1.0, 2.0):
        rests.was_late("disk", 0.0, now_s, now_s)
    assert rests.is_left_alone("disk", 0.0, 2.0) and not rests.is_left_alone("disk", 1e-5, 2.0)


def test_what_waits_at_the_same_time_is_late_once() -> None:
    rests = SourceRests()
    for number in range(20):
        rests.was_late("disk", 0.02, started_s=0.01 * number, now_s=1.0 + 0.01 * number)
    assert not rests.is_left_alone("disk", 0.02, 1.2), "all of them began before the first one lost"
    rests.was_late("disk", 0.02, started_s=1.0, now_s=2.0)
    assert rests.is_left_alone("disk", 0.02, 2.0)


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.05]))
def test_a_disk_that_comes_and_goes(seed: int, stalls: float) -> None:
    """Prompts of all lengths, one after the other, on a clock: waits in vain are few while it is
    slow, and whoever gains from it reads again soon after it has recovered."""
    rng = random.Random(seed)
    rests, now_s, is_slow, changed_s, changes_s = SourceRests(), 0.0, False, 0.0, 0.0
    in_vain: Counter[int] = Counter()
    while now_s < 600:
        if now_s >= changes_s:
            is_slow, changed_s, changes_s = not is_slow, now_s, now_s + rng.uniform(20, 100)
            in_vain.clear()
        prompt_s = 2.0 ** rng.uniform(-4, 2)  # to compute it
        wait_s = PATIENCE * prompt_s
        if rests.is_left_alone("disk", wait_s, now_s):
            assert stalls or is_slow or now_s < changed_s + MAX_REST_S, "it is well again"
            took_s = prompt_s
        elif is_slow or rng.random() < stalls:
            took_s = prompt_s + wait_s
            rests.was_late("disk", wait_s, now_s, now_s + wait_s)
            in_vain[math.frexp(wait_s)[1]] += is_slow
        else:
            took_s = prompt_s / 10
            rests.was_in_time("disk", wait_s)
        assert took_s <= 1.05 * prompt_s
        assert max(in_vain.values(), default=0) <= 5 + (now_s - changed_s) / MAX_REST_S
        now_s += took_s + rng.uniform(0, 0.5)
