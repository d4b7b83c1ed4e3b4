"""The evidence is 1 in the mean where a version is no worse, however often something is so."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.registry.comparison import ALPHA, Comparison, Outcomes
from gateway.registry.evidence import (
    GAPS,
    Count,
    CountedBlock,
    Evidence,
    binomial_tails,
    effect_to_reach,
    gap_weights,
)
from gateway.registry.spread import MOST_SPREAD, concentration, spread_of_groups
from tests.budget import examples

SHARES = st.floats(0.001, 0.95)


def probability(count: Count, share: float) -> float:
    ways = math.comb(count.requests, count.so)
    return ways * float(share**count.so * (1 - share) ** (count.requests - count.so))


def with_gap(share: float, gap: float) -> float:
    odds = share / (1 - share) * math.exp(gap)
    return odds / (1 + odds)


@settings(max_examples=examples(200))
@given(st.tuples(st.integers(1, 5), st.integers(1, 5)), SHARES, st.floats(-1, 1), st.floats(0, 4))
def test_a_block_has_the_evidence_of_one_in_the_mean(
    sizes: tuple[int, int], share: float, gap: float, effect: float
) -> None:
    new, old = sizes
    mean = 0.0
    for so_new in range(new + 1):
        for so_old in range(old + 1):
            block = Count(new, so_new), Count(old, so_old)
            likely = probability(block[0], with_gap(share, gap)) * probability(block[1], share)
            found = CountedBlock(*block)
            mean += likely * math.exp(
                found.log_likelihood(gap + effect) - found.log_likelihood(gap)
            )
    assert mean == pytest.approx(1.0)


@settings(max_examples=examples(30))
@given(st.integers(50, 90), st.integers(50, 400), SHARES, st.floats(0, 2))
def test_a_large_block_has_no_more_than_one_in_the_mean(
    new: int, old: int, share: float, effect: float
) -> None:
    so = max(41, round((new + old) * share))
    if so >= old:
        return
    ways = [math.comb(new, at) * math.comb(old, so - at) for at in range(min(new, so) + 1)]
    mean = 0.0
    for at, many in enumerate(ways):
        block = CountedBlock(Count(new, at), Count(old, so - at))
        ratio = block.log_likelihood(effect) - block.log_likelihood(0.0)
        mean += many / math.comb(new + old, so) * math.exp(ratio)
    assert mean <= 1 + 1e-9


def drawn(rng: random.Random, requests: int, share: float) -> Count:
    return Count(requests, sum(rng.random() < share for _ in range(requests)))


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_evidence_is_one_in_the_mean_over_gaps_that_are_as_the_spread_says(spread: float) -> None:
    """The martingale as a whole, with the bets that depend on what came before."""
    rng, values = random.Random(3), []
    weights = [math.exp(each) for each in gap_weights(spread)]
    for _ in range(examples(300)):
        evidence = Evidence(goal=5.0, spread=spread)
        [gap] = rng.choices(GAPS, weights)
        for share in (0.05, 0.1, 0.02):
            evidence.watch(drawn(rng, 10, with_gap(share, gap)), drawn(rng, 30, share))
        for share in (0.03, 0.2, 0.1):
            evidence.add(drawn(rng, 5, with_gap(share, gap)), drawn(rng, 15, share))
        values.append(math.exp(evidence.log))
    error = math.sqrt(sum((each - 1) ** 2 for each in values)) / len(values)
    assert sum(values) / len(values) == pytest.approx(1.0, abs=4 * error)


def outcomes(rng: random.Random, requests: int, refused: float) -> Outcomes:
    return Outcomes(requests=requests, refused=drawn(rng, requests, refused).so)


@pytest.mark.parametrize("baseline", [0.0, 0.02])
def test_a_version_that_refuses_more_is_found_worse(baseline: float) -> None:
    rng, compared = random.Random(7), Comparison()
    for _ in range(250):
        compared.add(outcomes(rng, 2, baseline + 0.05), outcomes(rng, 38, baseline))
    assert compared.is_worse
    assert compared.worst == "refused"


def test_equal_versions_are_not_told_apart() -> None:
    rng = random.Random(11)
    for baseline in (0.0, 0.02, 0.05):
        compared = Comparison()
        for _ in range(60):
            compared.add(outcomes(rng, 10, baseline), outcomes(rng, 30, baseline))
            assert not compared.is_worse


def test_one_version_alone_says_nothing() -> None:
    compared = Comparison()
    compared.add(Outcomes(requests=500, refused=400), Outcomes())
    compared.add(Outcomes(), Outcomes(requests=500))
    assert compared.log == pytest.approx(0.0)


def test_a_version_that_does_better_is_not_worse() -> None:
    compared = Comparison()
    for _ in range(100):
        compared.add(Outcomes(requests=10), Outcomes(requests=10, refused=1, failed=1))
    assert compared.log < 0.0 < -math.log(ALPHA)


@pytest.mark.parametrize("so, is_found", [(20, False), (70, True)])
def test_organizations_are_compared_with_what_they_were(so: int, is_found: bool) -> None:
    """They refused 10 of 100 before, where others did 2: it is what they do now that counts. What
    drifts alike for all says nothing."""
    evidence = Evidence(goal=5.0, spread=1.0)
    for _ in range(10):
        evidence.watch(Count(100, 10), Count(1000, 20))
    for _ in range(10):
        evidence.add(Count(100, so), Count(1000, 44))
    assert (evidence.log > 5.0) == is_found


def test_other_organizations_have_another_gap_and_the_evidence_goes_on() -> None:
    evidence = Evidence(goal=5.0, spread=0.2)
    evidence.add(Count(50, 10), Count(500, 20))
    before = evidence.log
    evidence.begin_step()
    assert evidence.log == pytest.approx(before)
    evidence.watch(Count(100, 40), Count(100, 5))
    assert evidence.log == pytest.approx(before)


def test_groups_that_are_alike_have_a_small_spread() -> None:
    rng = random.Random(5)
    alike = [drawn(rng, 200, 0.05) for _ in range(60)]
    unlike = [drawn(rng, 200, with_gap(0.05, rng.gauss(0, 0.6))) for _ in range(60)]
    assert spread_of_groups(alike) < 0.3 < spread_of_groups(unlike) <= MOST_SPREAD
    assert spread_of_groups(alike[:1]) == spread_of_groups([]) == MOST_SPREAD
    assert spread_of_groups([Count(10, 0)] * 5) == MOST_SPREAD
    assert concentration([10, 10, 0]) == pytest.approx(0.5) and concentration([]) == 1.0


@settings(max_examples=examples(60))
@given(st.floats(-20, 0), st.integers(0, 500), st.floats(1e-4, 0.999))
def test_a_bet_is_never_against_the_version_being_worse(
    wealth: float, left: int, share: float
) -> None:
    assert 0.0 <= effect_to_reach(wealth, left, share) <= 10.0


def test_tails_are_those_of_the_binomial() -> None:
    tails = binomial_tails(20, 0.3)
    assert tails[0] == pytest.approx(1.0)
    assert tails[20] == pytest.approx(0.3**20)
    assert tails[6] == pytest.approx(sum(probability(Count(20, at), 0.3) for at in range(6, 21)))
