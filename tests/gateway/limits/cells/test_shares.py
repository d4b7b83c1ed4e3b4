"""Shares follow what is asked for, within what may move."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits.cells.shares import (
    LEAST,
    ROUND_S,
    TAKEN_OVER_S,
    WHOLE,
    ShareDecision,
    decide,
    divided,
    equal_shares,
    wanted_shares,
)
from tests.budget import examples
from tests.gateway.limits.cells.world_of_cells import LIMIT, World

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.integers(0, WHOLE))
ASKED = st.dictionaries(st.sampled_from("abcde"), st.floats(0, 10), min_size=1)


@settings(max_examples=examples(400), deadline=None)
@given(asked=ASKED)
def test_all_is_given_and_nobody_gets_nothing(asked: dict[str, float]) -> None:
    shares = wanted_shares(asked)
    assert sum(shares.values()) == WHOLE
    least = min(LEAST, WHOLE // (2 * len(asked)))
    assert all(share >= least - len(asked) for share in shares.values())


def test_who_asks_for_little_gets_it_and_the_rest_is_for_who_asks_for_more() -> None:
    assert wanted_shares({"eu": 0.2, "us": 3.0}) == {"eu": 200_000, "us": 800_000}
    assert wanted_shares({"eu": 2.0, "us": 3.0}) == {"eu": 500_000, "us": 500_000}
    assert wanted_shares({"eu": 0.0, "us": 3.0}) == {"eu": LEAST, "us": WHOLE - LEAST}
    assert wanted_shares({"eu": 0.2, "us": 0.4}) == {"eu": 400_000, "us": 600_000}


@settings(max_examples=examples(400), deadline=None)
@given(amount=st.integers(0, 10**12), weights=WEIGHTS)
def test_parts_add_up_to_the_unit(amount: int, weights: dict[str, int]) -> None:
    parts = divided(amount, weights)
    assert sum(parts.values()) == (amount if any(weights.values()) else 0)
    assert all(parts[name] <= amount * weight for name, weight in weights.items())


def first(shares: dict[str, int], age_s: float = 1_000.0) -> ShareDecision:
    return ShareDecision(version=1, shares=shares, before=shares, moves_left=WHOLE, age_s=age_s)


@settings(max_examples=examples(400), deadline=None)
@given(rounds=st.lists(st.tuples(ASKED, st.floats(0, 900)), max_size=12))
def test_shares_stay_whole_and_move_no_more_than_they_may(
    rounds: list[tuple[dict[str, float], float]],
) -> None:
    last, moved, seconds, freed = first(equal_shares(dict.fromkeys("ab")), 0.0), 0, 0.0, 0
    for asked, age_s in rounds:
        following = decide(msgspec.structs.replace(last, age_s=last.age_s + age_s), asked)
        if following is None:
            last = msgspec.structs.replace(last, age_s=last.age_s + age_s)
            seconds += age_s
            continue
        seconds += age_s
        assert sum(following.shares.values()) == WHOLE
        assert following.before == last.shares
        names = {*following.shares, *last.shares}
        moved += sum(
            max(0, following.shares.get(name, 0) - last.shares.get(name, 0)) for name in names
        )
        freed += sum(share for name, share in last.shares.items() if name not in asked)
        freed += WHOLE * len(asked.keys() - last.shares.keys())
        last = following
    assert moved <= WHOLE + freed + seconds / 300 * WHOLE + len(rounds)


def test_no_decision_follows_before_everybody_knows_the_one_before() -> None:
    last = first(equal_shares(dict.fromkeys(["eu", "us"])), ROUND_S - 0.01)
    assert decide(last, {"eu": 0.0, "us": 2.0}) is None


def test_a_small_move_is_not_worth_it() -> None:
    last = first({"eu": 300_000, "us": 700_000})
    assert decide(last, {"eu": 0.26, "us": 5.0}) is None
    found = decide(last, {"eu": 0.26, "us": 5.0}, deadband=0)
    assert found is not None and found.shares == {"eu": 260_000, "us": 740_000}


def test_a_silent_cell_is_taken_over_in_time_and_gets_a_part_when_it_is_back() -> None:
    world = World()
    try:
        eu, us = world.add("eu"), world.add("us")
        run(world, 20)
        assert eu.limit == us.limit == LIMIT // 2
        world.kill(eu)
        died_s = world.now_s
        while us.limit < LIMIT:
            run(world, 0.25)
        assert world.now_s - died_s <= TAKEN_OVER_S
        eu = world.add("eu")
        run(world, 20)
        assert eu.limit == us.limit == LIMIT // 2
    finally:
        world.close()


def test_shares_go_where_requests_do_and_are_equal_again_when_none_come() -> None:
    world = World()
    try:
        eu, us = world.add("eu"), world.add("us")
        run(world, 10)
        for _ in range(120):
            while world.ask(us, 50):
                pass
            run(world, 0.25)
        assert us.limit == LIMIT - eu.limit == LIMIT * 95 // 100
        run(world, 400)
        assert us.limit == eu.limit == LIMIT // 2
        assert world.store.scopes == {""}
    finally:
        world.close()


def test_where_nobody_reaches_the_store_all_use_the_limit_once() -> None:
    world = World()
    try:
        eu, us = world.add("eu"), world.add("us")
        run(world, 10)
        for each in (eu, us):
            each.link.is_cut = True
        for _ in range(120):
            world.ask(us, 50)
            run(world, 0.25)
            assert eu.limit + us.limit <= LIMIT
        assert eu.limit == us.limit == LIMIT // 2
    finally:
        world.close()


def run(world: World, seconds: float) -> None:
    until = world.now_s + seconds
    while world.now_s < until:
        world.step()
