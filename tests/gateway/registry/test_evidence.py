"""The evidence is 1 in the mean at most where a version is no worse, whatever the block is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.registry.comparison import ALPHA, Comparison, Outcomes, allowance
from gateway.registry.evidence import Count, Evidence, log_of_block
from tests.budget import examples

SHARES = st.floats(0.001, 0.95)


def probability(count: Count, share: float) -> float:
    ways = math.comb(count.requests, count.so)
    return ways * float(share**count.so * (1 - share) ** (count.requests - count.so))


@settings(max_examples=examples(400))
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    SHARES,
    SHARES,
    st.floats(0.001, 0.5),
    st.sampled_from([0.0, 0.01, 0.2]),
    st.floats(0, 1),
)
def test_no_block_has_more_evidence_than_one_in_the_mean(
    sizes: tuple[int, int],
    true_share: float,
    of_old: float,
    more: float,
    allowed: float,
    part: float,
) -> None:
    of_new = min(0.999, of_old + allowed + more)
    if of_new - of_old <= allowed:
        return
    new, old = sizes
    true_new = min(0.999, true_share + part * allowed)
    mean = 0.0
    for so_new in range(new + 1):
        for so_old in range(old + 1):
            block = Count(new, so_new), Count(old, so_old)
            likely = probability(block[0], true_new) * probability(block[1], true_share)
            mean += likely * math.exp(log_of_block(*block, of_new, of_old, allowed))
    assert mean <= 1 + 1e-6


def drawn(rng: random.Random, requests: int, refused: float) -> Outcomes:
    num_refused = sum(rng.random() < refused for _ in range(requests))
    return Outcomes(requests=requests, refused=num_refused)


@pytest.mark.parametrize("baseline", [0.0, 0.02])
def test_a_version_that_refuses_more_is_found_worse(baseline: float) -> None:
    rng, compared = random.Random(7), Comparison()
    for _ in range(250):
        compared.add(drawn(rng, 2, baseline + 0.05), drawn(rng, 38, baseline))
    assert compared.is_worse
    assert compared.worst == "refused"


def test_equal_versions_are_not_told_apart() -> None:
    rng = random.Random(11)
    for baseline in (0.0, 0.02, 0.05) * 4:
        compared = Comparison()
        for _ in range(100):
            compared.add(drawn(rng, 10, baseline), drawn(rng, 30, baseline))
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


def test_organizations_that_refused_more_before_may_do_so() -> None:
    before = Count(1000, 100), Count(10_000, 200)
    allowed = allowance(*before)
    evidence = Evidence(allowance=allowed)
    for _ in range(100):
        evidence.add(Count(100, 10), Count(1000, 20))
    assert 0.08 < allowed < 0.1
    assert evidence.log < 0.0


def test_an_allowance_beyond_which_nothing_is_says_nothing() -> None:
    evidence = Evidence(allowance=0.5)
    for _ in range(100):
        evidence.add(Count(10, 10), Count(10, 6))
    assert evidence.log < 1.0


def test_shares_that_are_alike_allow_nothing() -> None:
    assert allowance(Count(200, 5), Count(4000, 80)) == 0.0
    assert allowance(Count(), Count(4000, 80)) == 0.0
