"""Which decodes are recorded, and which graph a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.cuda_graphs import LARGEST, CalledGraphs, DecodeGraphs, Graph, graph_sizes


def nothing() -> None:
    pass


@given(most=st.integers(1, 2000))
def test_padding_is_small(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, LARGEST)
    graphs = DecodeGraphs(CalledGraphs(), sizes)
    graphs.capture(lambda size: nothing)
    for number in range(1, sizes[-1] + 1):
        padded = graphs.padded(number)
        assert padded in sizes and number <= padded <= max(2 * number, number + 7, number * 1.125)
    assert graphs.padded(sizes[-1] + 1) is None


class Slow(CalledGraphs):
    """A device that takes a while to record."""

    def __init__(self, now: list[float]) -> None:
        self.recorded = 0
        self._now = now

    def record(self, work: Callable[[], None]) -> Graph:
        self.recorded += 1
        self._now[0] += 1.0
        return super().record(work)


def test_a_start_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the largest down; when the time is up, powers of two alone."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    order: list[int] = []

    def prepare(size: int) -> Callable[[], None]:
        order.append(size)
        return nothing

    graphs = DecodeGraphs(Slow(now), graph_sizes(64))
    graphs.capture(prepare, budget_s=2.5)
    assert order == [64, 56, 48, 32, 16, 8, 4, 2, 1]
    assert [graphs.padded(number) for number in (1, 3, 9, 33, 50, 64, 65)] == [
        *(1, 4, 16, 48, 56, 64, None)
    ]


def test_a_replay_does_what_was_recorded() -> None:
    done: list[int] = []
    graphs = DecodeGraphs(CalledGraphs(), [1, 4])
    graphs.capture(lambda size: lambda: done.append(size))
    assert done == []
    for number in (1, 2, 4):
        size = graphs.padded(number)
        assert size is not None
        graphs.replay(size)
    assert done == [1, 4, 4]
