"""Checks what is worth reading, and how long a prompt waits for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tiers.policy import (
    LEARNT_FOR_S,
    MARGIN,
    MIN_LEARNT_BYTES,
    PATIENCE,
    LearntReads,
    PrefillCosts,
    ReadCosts,
    is_in_time,
    is_worth_reading,
    num_worth_keeping,
    patience_s,
)

SMALL_ON_CPU = PrefillCosts(1 / 1_830)
LLAMA_8B_ON_H200 = PrefillCosts(1 / 39_500, 2 * (131e3 / 2.3e9 - 1 / 39_500) / 65_536)
"""5.2 GB/s of KV at a prompt's start, 2.3 GB/s at a depth of 32 k tokens."""


def test_any_disk_is_worth_it_where_computing_is_slow() -> None:
    disk = ReadCosts(0.001, 0.2e9)
    assert is_worth_reading(SMALL_ON_CPU, disk, start=0, end=2_048, num_bytes=2_048 * 23_040)
    assert not is_worth_reading(SMALL_ON_CPU, disk, start=0, end=2_048, num_bytes=2**40)


def test_one_nvme_loses_early_blocks_and_wins_deep_ones() -> None:
    nvme = ReadCosts(0.001, 6e9)
    for start, is_worth in ((0, False), (200_000, True)):
        asked = {"start": start, "end": start + 2_048, "num_bytes": 2_048 * 131_072}
        assert is_worth_reading(LLAMA_8B_ON_H200, nvme, **asked) == is_worth


def test_nothing_is_read_while_nothing_is_known() -> None:
    assert not is_worth_reading(PrefillCosts(), ReadCosts(0, 1e12), start=0, end=99, num_bytes=1)


costs = st.builds(PrefillCosts, st.floats(1e-6, 1e-2), st.floats(0, 1e-6))


@given(costs, st.integers(0, 10_000), st.integers(1, 10_000), st.data())
def test_waiting_in_vain_costs_a_twentieth_at_most(
    prefill: PrefillCosts, start: int, num_tokens: int, data: st.DataObject
) -> None:
    end = start + num_tokens
    arrived = data.draw(st.integers(start, end))
    waited_s = patience_s(prefill, start=start, arrived=arrived, end=end)
    without_s = prefill.seconds(start, end)
    assert waited_s + prefill.seconds(arrived, end) <= (1 + PATIENCE) * without_s * (1 + 1e-9)


@given(
    costs, st.integers(0, 5_000), st.integers(1, 999), st.integers(1, 999), st.integers(1, 10**6)
)
def test_more_of_a_prefix_is_worth_reading_where_less_of_it_was(
    prefill: PrefillCosts, start: int, few: int, more: int, token_bytes: int
) -> None:
    read = ReadCosts(0.001, 1e9)

    def is_worth(num: int) -> bool:
        size = num * token_bytes
        return is_worth_reading(prefill, read, start=start, end=start + num, num_bytes=size)

    assert is_worth(few + more) or not is_worth(few)
    assert MARGIN < 1


def test_of_a_short_prompt_nothing_would_arrive_in_time() -> None:
    disk = ReadCosts(0.001, 0.7e9)
    assert not is_in_time(SMALL_ON_CPU, disk, start=0, end=64)
    assert is_worth_reading(SMALL_ON_CPU, disk, start=0, end=64, num_bytes=64 * 23_040)
    assert is_in_time(SMALL_ON_CPU, disk, start=0, end=128)


def test_costs_are_learnt_from_reads() -> None:
    costs = ReadCosts(0.001, 1e9).learn(100, 10.0, 0.011)
    assert costs == (pytest.approx(0.004), 1e9), "so small a read says nothing about a rate"
    for _ in range(50):
        costs = costs.learn(100_000_000, 1.0, 0.02)
    assert costs == (pytest.approx(0.02, rel=0.01), pytest.approx(1e8, rel=0.01))


def test_a_source_that_was_found_slow_is_tried_again_later() -> None:
    now_s = 0.0
    reads = LearntReads(ReadCosts(0.001, 1e9), lambda: now_s)
    for _ in range(50):
        reads.learn(MIN_LEARNT_BYTES, 1.0, 1.0)
    assert reads.costs == (pytest.approx(1.0), pytest.approx(MIN_LEARNT_BYTES))
    now_s += LEARNT_FOR_S
    assert reads.costs == (0.001, 1e9)
    for _ in range(50):
        reads.learn(4_000_000_000, 1.0, 0.002)
    now_s += LEARNT_FOR_S
    assert reads.costs == (0.001, pytest.approx(4e9, rel=0.01)), "and stays as quick as it was"


def test_the_second_use_is_worth_keeping() -> None:
    assert num_worth_keeping(0, 0, 16) == 0
    assert num_worth_keeping(33, 0, 16) == 2
    assert num_worth_keeping(0, 100, 16) == 6
