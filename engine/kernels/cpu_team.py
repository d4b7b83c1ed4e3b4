"""How many threads a recorded run of kernels is worth: all of them, or one.

Above: `cpu_program.py`. Below: nothing. Knows times, no kernels.

Threads of a team wait for each other after every kernel, some hundred times a step. On cores of
their own that halves a step; where anything else wants the cores, each wait may last as long as a
slice of the scheduler's, and a step takes several times what a single thread needs. Nobody can tell
the two machines apart but by the clock, so the other choice is tried now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

TRY_EVERY = 96
"""Runs between two tries of what was slower: on cores of its own, that costs a percent."""
FIRST_TRY = 3
"""Runs before one thread is tried: the first ones may be slow for reasons of their own."""
KEPT_RUNS = 5
"""Their median counts: a single run may meet anything."""


class Team:
    """Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seconds: dict[tuple[Hashable, int], deque[float]] = {}
        """Of the latest runs, by kind of work and number of threads."""
        self._num_runs: dict[Hashable, int] = {}

    def choose(self, work: Hashable) -> int:
        """Threads for the next run of this kind of work."""
        count = self._num_runs.get(work, 0)
        self._num_runs[work] = count + 1
        if self._size == 1:
            return 1
        seconds, alone = self._median(work, self._size), self._median(work, 1)
        if seconds is None or alone is None:
            return 1 if count == FIRST_TRY else self._size
        better, other = (1, self._size) if alone < seconds else (self._size, 1)
        return other if count % TRY_EVERY == 0 else better

    def took(self, work: Hashable, threads: int, seconds: float) -> None:
        """A run that `choose` chose for."""
        key = work, threads
        self._seconds.setdefault(key, deque(maxlen=KEPT_RUNS)).append(seconds)

    def _median(self, work: Hashable, threads: int) -> float | None:
        """Seconds; None where nothing was tried."""
        found = self._seconds.get((work, threads))
        return None if found is None else sorted(found)[len(found) // 2]

    def forget(self) -> None:
        """Of all kinds of work."""
        self._seconds.clear()
        self._num_runs.clear()
