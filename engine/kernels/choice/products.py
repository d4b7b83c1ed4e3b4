"""Decides by measuring which product multiplies: our own tiles, or oneDNN's microkernel.

Asked for each shape of a weight and class of rows, and for attention over prompts. All questions of
an engine together take at most BUDGET_S, once on a machine. Layers ask for their row of the table
when they are made and read it at each call; before `choose_products`, and where a choice was
excluded (`--deterministic`), it says our own tiles.

Both products read the same weights. They sum in another order, so a row's bits may depend on how
many rows there are: what --deterministic excludes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.kernels.choice.machine import Machine
from engine.kernels.choice.microkernel import Microkernel, microkernel
from engine.kernels.choice.table import Times, fastest, read_times, write_times

OWN, LIBRARY = "own tiles", "oneDNN"
ROW_CLASSES = (1, 4, 8, 16, 32, 128, 512)
"""The most rows of each class; the last class has no end. A class is measured at that many."""
CLASS_OF = tuple(
    next(i for i, most in enumerate(ROW_CLASSES) if rows <= most)
    for rows in range(ROW_CLASSES[-2] + 1)
)
"""The class of so many rows; more are of the last."""
BUDGET_S = 0.5
ROUNDS, FEWEST_ROUNDS = 31, 2
"""The first call of a size compiles it; the least time counts, so two say something."""
MARGIN = 1.1
"""A library's product replaces ours where it is so many times as fast: less is noise."""
FEWEST_WEIGHTS = 1 << 18
"""A smaller weight is multiplied by our own tiles: a call costs as much as the product."""

Run = Callable[[], None]
WaysOf = Callable[["Shape", int], Mapping[str, Run]]
"""The ways to compute a shape at so many rows, ready to run."""
Uses = list[bool]
"""By class of rows: whether the library multiplies."""


class LinearShape(NamedTuple):
    outputs: int
    inputs: int

    def question(self, number: int) -> str:
        """Name what is asked of the class of rows with this number."""
        return f"linear {self.outputs}x{self.inputs}, {class_name(number)}"


class PromptShape(NamedTuple):
    """Attention over prompts."""

    heads: int
    kv_heads: int
    head_dim: int

    def question(self, number: int) -> str:
        return f"attention {self.heads}/{self.kv_heads}x{self.head_dim}, prompts"


Shape = LinearShape | PromptShape


class Choice(NamedTuple):
    """One answered question."""

    question: str
    way: str
    times: Times
    """Empty where nothing was measured."""
    came_from: str


_uses: dict[Shape, Uses] = {}
_choices: dict[str, Choice] = {}


def class_name(number: int) -> str:
    """Say which rows a class holds."""
    most = ROW_CLASSES[number]
    if number == len(ROW_CLASSES) - 1:
        return f"{ROW_CLASSES[number - 1] + 1}+ rows"
    fewest = ROW_CLASSES[number - 1] + 1 if number else 1
    return f"{most} row{'s' * (most > 1)}" if fewest == most else f"{fewest}-{most} rows"


def uses_library(shape: Shape) -> tuple[Uses, Microkernel] | None:
    """Return what a layer reads at each call, and what it then calls. None: our own tiles."""
    library = microkernel()
    if library is None:
        return None
    if isinstance(shape, LinearShape) and shape.outputs * shape.inputs < FEWEST_WEIGHTS:
        return None
    count = len(ROW_CLASSES) if isinstance(shape, LinearShape) else 1
    return _uses.setdefault(shape, [False] * count), library


def choose_products(
    machine: Machine,
    folder: Callable[[], Path],
    make_ways: Callable[[], WaysOf],
    clock: Callable[[], float] = time.thread_time,
) -> None:
    """Answer what layers have asked and nobody has answered. folder: where times are kept.
    make_ways: makes what is measured, where something is. clock: this thread's processor time, so
    that whoever else wants the processor does not decide."""
    asked = [
        (shape, number)
        for shape, uses in _uses.items()
        for number in range(len(uses))
        if shape.question(number) not in _choices
    ]
    if not asked:
        return
    place = folder()
    times = read_times(place, machine)
    known = set(times)
    ways_of = None if all(s.question(n) in known for s, n in asked) else make_ways()
    end = clock() + BUDGET_S
    for left, (shape, number) in zip(range(len(asked), 0, -1), asked, strict=True):
        question, now = shape.question(number), clock()
        if question not in times and ways_of is not None and now < end:
            ways = ways_of(shape, ROW_CLASSES[number])
            times[question] = _compare(ways, (end - now) / left, clock)
        found = times.get(question, {})
        source = "kept" if question in known else "measured" if found else "no time to measure"
        way = fastest(found, OWN, MARGIN) if found else OWN
        _choices[question] = Choice(question, way, found, source)
        _uses[shape][number] = way == LIBRARY
    if len(times) > len(known):
        write_times(place, machine, times)


def choices() -> list[Choice]:
    """Return what was chosen in this process, in the order of questions."""
    return list(_choices.values())


def _compare(ways: Mapping[str, Run], share_s: float, clock: Callable[[], float]) -> Times:
    """Return the least seconds of each way. Half of the share decides, unless it is against our own
    tiles: whatever else runs here may have been in their way, so the other half is for both."""
    began = clock()
    found = _measure(ways, began + share_s / 2, clock)
    if fastest(found, OWN, MARGIN) == OWN or clock() >= began + share_s:
        return found
    again = _measure(ways, began + share_s, clock)
    return {way: min(took, again[way]) for way, took in found.items()}


def _measure(ways: Mapping[str, Run], end: float, clock: Callable[[], float]) -> Times:
    """Return the least seconds of each way, which take turns."""
    least: Times = {}
    for number in range(ROUNDS):
        if number >= FEWEST_ROUNDS and clock() >= end:
            break
        for way, run in ways.items():
            began = clock()
            run()
            took = max(clock() - began, 1e-9)
            least[way] = min(took, least.get(way, took))
    return least
