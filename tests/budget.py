"""Sizes the suite: a small budget for every change, today's full one at night.

`SUITE_BUDGET=nightly` (or `make test-nightly`) runs tests that are marked `nightly`, and draws as
many examples as each test names; without it those tests are left out, and a test draws a part of
them. A test that is marked says in full what another one shows in small.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

RAY = os.environ.get("SUITE_RAY") == "1"
"""Whether tests run that start a Ray cluster (`make test-ray`)."""
NIGHTLY = os.environ.get("SUITE_BUDGET") == "nightly"
NIGHT = pytest.mark.nightly
PART = 4
FEWEST = 5


def examples(nightly: int) -> int:
    """Return how many examples to draw of those that a night has time for."""
    return nightly if NIGHTLY else min(nightly, max(FEWEST, nightly // PART))


def cycles(nightly: int, daily: int) -> int:
    """Return how often to repeat what is killed, flooded or left."""
    return nightly if NIGHTLY else daily


def part_of(cases: Iterable[str], part: int = PART) -> list[Any]:
    """Return the cases as parameters, of which all but one in `part` are for the night."""
    return [
        case if number % part == 0 else pytest.param(case, marks=NIGHT)
        for number, case in enumerate(cases)
    ]


def pairs(first: Sequence[str], second: Sequence[str], each: int = 2) -> list[Any]:
    """Return all pairs as parameters, of which the day runs `each` for every one of `first`: so
    that every one of `second` is run, too, where `first` is no shorter."""
    return [
        pytest.param(one, other, marks=() if (row - column) % len(second) < each else NIGHT)
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]
