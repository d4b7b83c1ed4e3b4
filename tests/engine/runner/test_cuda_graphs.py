"""Checks which decodes are recorded, and which graph a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.device.cuda_graphs import (
    LARGEST,
    CalledGraphs,
    Decode,
    DecodeGraphs,
    Graph,
    decodes_to_record,
    graph_sizes,
)


def nothing() -> None:
    pass


def one_program(decode: Decode) -> int:
    return 1


def captured(most: int, max_seq_len: int, programs: Callable[[Decode], int]) -> DecodeGraphs:
    graphs = DecodeGraphs(CalledGraphs(), decodes_to_record(most, max_seq_len, programs))
    graphs.capture(lambda decode: nothing)
    return graphs


@given(most=st.integers(1, 2000))
def test_padding_is_small(most: int) -> None:
    largest = graph_sizes(most)[-1]
    assert largest == min(most, LARGEST)
    graphs = captured(most, 131_072, one_program)
    for number in range(1, largest + 1):
        found = graphs.find(Decode(number, 131_072))
        assert found is not None
        assert number <= found.num_seqs <= max(2 * number, number + 7, number * 1.125)
    assert graphs.find(Decode(largest + 1, 1)) is None
    assert graphs.find(Decode(1, 131_073)) is None


@given(
    most=st.integers(1, 300),
    max_seq_len=st.sampled_from([100, 4096, 5000, 40_000, 131_072]),
    units=st.sampled_from([8, 264]),
    needed=st.tuples(st.integers(1, 300), st.integers(1, 131_072)),
)
def test_long_sequences_cost_short_ones_nothing(
    most: int, max_seq_len: int, units: int, needed: tuple[int, int]
) -> None:
    """A batch that fills the device splits keys by 4096 at most: then no graph for short sequences
    has programs for more, and one for long ones has at most twice as many as they need."""

    def programs(decode: Decode) -> int:
        if decode.num_seqs * 8 < units:
            return 33
        return -(-decode.max_seq_len // 4096)

    graphs = captured(most, max_seq_len, programs)
    step = Decode(min(needed[0], most), min(needed[1], max_seq_len))
    found = graphs.find(step)
    assert found is not None
    assert found.num_seqs >= step.num_seqs and found.max_seq_len >= step.max_seq_len
    if found.num_seqs * 8 >= units:
        assert programs(found) <= 2 * -(-step.max_seq_len // 4096)
        assert step.max_seq_len > 4096 or programs(found) == 1


class Slow(CalledGraphs):
    """A device that takes a while to record."""

    def __init__(self, now: list[float]) -> None:
        self._now = now

    def record(self, work: Callable[[], None]) -> Graph:
        self._now[0] += 1.0
        return super().record(work)


def test_a_start_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the largest down; when the time is up, powers of two alone."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    order: list[int] = []

    def prepare(decode: Decode) -> Callable[[], None]:
        order.append(decode.num_seqs)
        return nothing

    graphs = DecodeGraphs(Slow(now), decodes_to_record(64, 500, one_program))
    graphs.capture(prepare, budget_s=2.5)
    assert order == [64, 56, 48, 32, 16, 8, 4, 2, 1]
    found = [graphs.find(Decode(number, 500)) for number in (1, 3, 9, 33, 50, 64)]
    assert [decode and decode.num_seqs for decode in found] == [1, 4, 16, 48, 56, 64]


def test_what_verifies_guesses_has_graphs_of_its_own() -> None:
    """The one with the most tokens is recorded first; a plain decode takes no larger one."""
    order: list[Decode] = []

    def prepare(decode: Decode) -> Callable[[], None]:
        order.append(decode)
        return nothing

    recorded = [Decode(1, 9), Decode(8, 9), Decode(1, 9, queries=5), Decode(4, 9, queries=5)]
    graphs = DecodeGraphs(CalledGraphs(), recorded)
    graphs.capture(prepare)
    assert order == [recorded[3], recorded[1], recorded[2], recorded[0]]
    assert graphs.find(Decode(1, 9)) == recorded[0]
    assert graphs.find(Decode(2, 9)) == recorded[1]
    assert graphs.find(Decode(1, 9, queries=2)) == recorded[2]
    assert graphs.find(Decode(3, 9, queries=5)) == recorded[3]
    assert graphs.find(Decode(3, 9, queries=6)) is None
    assert graphs.find(Decode(5, 9, queries=5)) is None


def test_a_replay_does_what_was_recorded() -> None:
    done: list[Decode] = []
    recorded = [Decode(1, 9), Decode(4, 9), Decode(4, 9, True), Decode(4, 99)]
    graphs = DecodeGraphs(CalledGraphs(), recorded)
    graphs.capture(lambda decode: lambda: done.append(decode))
    assert done == []
    for needed in (Decode(1, 1), Decode(3, 9), Decode(1, 8, True), Decode(1, 10)):
        found = graphs.find(needed)
        assert found is not None
        graphs.replay(found)
    assert done == recorded
    assert graphs.find(Decode(4, 10, True)) is None
