"""How many threads a recorded run of kernels is worth: all of them, or one.

Knows times, no kernels.

Threads of a team wait for each other after every kernel, some hundred times a step. On cores of
their own that nearly halves a step; where anything else wants the cores, each wait may last as long
as a slice of the scheduler's, and a step takes several times what a single thread needs. Nobody can
tell the two machines apart but by the clock, so the other choice is tried now and then. Kinds of
work differ in what they take, and share how much slower than at its best each choice makes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

FIRST_TRY = 16
"""Runs before one thread is tried: the first ones may be slow for reasons of their own."""
TRY_EVERY = 128
"""Runs between two tries of what was slower: on cores of its own, that costs half a percent."""
KEPT_RUNS = 5
"""Their median counts: a single run may meet anything."""
AGEING = 1.01
"""The factor by which the best time ages at every run, since contexts grow."""


class Team:
    """Not thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._best_s: dict[Hashable, float] = {}
        """The best time with all threads, by kind of work."""
        self._slowdowns: dict[int, deque[float]] = {}
        """Seconds over the best of the same work, of the latest runs by number of threads."""
        self._num_runs = 0

    def choose(self, work: Hashable) -> int:
        """Threads for the next run of this kind of work."""
        if self.size == 1 or work not in self._best_s:
            return self.size
        self._num_runs += 1
        alone, together = self._slowdown(1), self._slowdown(self.size)
        if alone is None or together is None:
            return 1 if self._num_runs >= FIRST_TRY else self.size
        better, other = (1, self.size) if alone < together else (self.size, 1)
        return other if self._num_runs % TRY_EVERY == 0 else better

    def took(self, work: Hashable, threads: int, seconds: float) -> None:
        """A run that `choose` chose for."""
        if threads == self.size:
            self._best_s[work] = min(AGEING * self._best_s.get(work, seconds), seconds)
        runs = self._slowdowns.setdefault(threads, deque(maxlen=KEPT_RUNS))
        runs.append(seconds / self._best_s[work])

    def forget(self) -> None:
        """All kinds of work: their names may mean others from now on."""
        self._best_s.clear()

    def _slowdown(self, threads: int) -> float | None:
        """None where nothing was tried."""
        runs = self._slowdowns.get(threads)
        return None if runs is None else sorted(runs)[len(runs) // 2]
