"""Simulate how many threads recorded kernels run on: the team's choice, all of them, and one.

Cores are shared with other processes. A core that so many others want is ours for a slice of time,
then theirs for a slice each; how long a slice is varies by the seed. A run is kernels one after the
other: each is cut into equal parts, one for each thread, and the next begins when the last part is
done. One thread runs on the core that the fewest others want, as the system would place it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kernels.choice.threads import Team

SLICE_S = 3e-3
KERNELS, KERNEL_S = 30, 1e-4
"""The kernels of a run, and how long one thread takes for each."""
BARRIER_S = 2e-6
"""Until all threads know that all are done."""
CORES = 2
POLICIES: dict[str, int | None] = {"team": None, "all threads": CORES, "one thread": 1}
"""The threads of every run; None: what the team chooses."""


@dataclass(frozen=True, slots=True)
class Phase:
    """So many runs, while so many others want each core."""

    runs: int
    others: tuple[int, ...]


LOADS: dict[str, tuple[Phase, ...]] = {
    "cores of its own": (Phase(1500, (0, 0)),),
    "one core that three others want": (Phase(1500, (3, 0)),),
    "both cores wanted by three others": (Phase(1500, (3, 3)),),
    "load that comes and goes": (
        Phase(1000, (0, 0)),
        Phase(1000, (3, 1)),
        Phase(1000, (0, 0)),
    ),
}


class Core:
    """Times at which it is ours."""

    def __init__(self, rng: random.Random) -> None:
        self.others = 0
        self._rng = rng
        self._is_ours = False
        self._end_s = 0.0

    def finish(self, at_s: float, work_s: float) -> float:
        """Return when work that begins at a time, later ones after earlier ones, is done."""
        while True:
            while self._end_s <= at_s:
                self._is_ours = not (self._is_ours and self.others)
                slices = 1 if self._is_ours else self.others
                self._end_s += slices * SLICE_S * self._rng.uniform(0.5, 1.5)
            if self._is_ours and at_s + work_s <= self._end_s:
                return at_s + work_s
            if self._is_ours:
                work_s -= self._end_s - at_s
            at_s = self._end_s


def simulate(phases: Sequence[Phase], fixed: int | None, seed: int = 1) -> float:
    """Return the seconds that all runs take, one after the other, on a fixed number of threads or
    on what the team chooses."""
    rng = random.Random(seed)
    cores = [Core(random.Random(rng.random())) for _ in range(CORES)]
    team, now_s = Team(CORES), 0.0
    for phase in phases:
        for core, others in zip(cores, phase.others, strict=True):
            core.others = others
        by_room = sorted(cores, key=lambda core: core.others)
        for _ in range(phase.runs):
            threads = team.choose("run") if fixed is None else fixed
            began_s, part_s = now_s, KERNEL_S / threads
            for _ in range(KERNELS):
                now_s = max(core.finish(now_s, part_s) for core in by_room[:threads])
                now_s += BARRIER_S if threads > 1 else 0.0
            if fixed is None:
                team.took("run", threads, now_s - began_s)
    return now_s


def compare(loads: dict[str, tuple[Phase, ...]] = LOADS) -> dict[str, dict[str, float]]:
    """Return the seconds by load and policy."""
    return {
        load: {name: simulate(phases, threads) for name, threads in POLICIES.items()}
        for load, phases in loads.items()
    }
