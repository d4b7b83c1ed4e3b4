"""How near what passed came to the stated bound, over every window there is. Pure.

Whole units and microseconds: a ratio of at most one is one, without rounding.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def worst_ratio(
    events: Iterable[tuple[int, int]], *, base: int, limit: int, longest_us: int, minute_us: int
) -> float:
    """`events`: (moment in microseconds, units). The largest share that any window of up to
    `longest_us` has of `base` units and what `limit` per `minute_us` lets come back meanwhile."""
    ordered = sorted(events)
    if not ordered:
        return 0.0
    moments = np.array([at for at, _ in ordered], dtype=np.int64)
    passed = np.concatenate(([0], np.cumsum([units for _, units in ordered], dtype=np.int64)))
    worst = 0.0
    for first in range(len(moments)):
        after = int(np.searchsorted(moments, moments[first] + longest_us, side="right"))
        # All at one moment are in the window together, the last of them with the largest sum.
        sums = (passed[first + 1 : after + 1] - passed[first]) * minute_us
        bounds = base * minute_us + limit * (moments[first:after] - moments[first])
        worst = max(worst, float(np.max(sums / bounds)))
    return worst


def most_at_once(spans: Iterable[tuple[int, int]]) -> int:
    """`spans`: (begin, end). One that ends when another begins is gone by then."""
    turns = sorted([(end, -1) for _, end in spans] + [(begin, 1) for begin, _ in spans])
    most = open_now = 0
    for _, turn in turns:
        open_now += turn
        most = max(most, open_now)
    return most
