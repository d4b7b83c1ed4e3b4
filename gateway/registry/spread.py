"""Estimates how unlike groups of organizations are in how often something is so of their requests.

The estimate is that of DerSimonian and Laird ("Meta-analysis in clinical trials", 1986) for shares:
what the groups' counts differ more than chance has them. A standard error is added, since too small
a spread takes versions back that are no worse, and too large a one only later those that are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gateway.registry.evidence import Count

STANDARD_ERRORS = 1.0
MOST_SPREAD = 1.0
"""Without a word from the groups themselves they are taken to differ by so much."""


def spread_of_groups(groups: Sequence[Count]) -> float:
    """Return the standard deviation of the log odds of groups, and an error of it more; at most
    MOST_SPREAD."""
    counts = [each for each in groups if each.requests]
    requests = sum(each.requests for each in counts)
    if len(counts) < 2:
        return MOST_SPREAD
    share = (sum(each.so for each in counts) + 0.5) / (requests + 1)
    chance = share * (1 - share)
    seen = sum((it.so - it.requests * share) ** 2 / (it.requests * chance) for it in counts)
    freedom = len(counts) - 1
    rarity = sum(max(0.0, 1 - 6 * chance) / (it.requests * chance) for it in counts)
    error = max(math.sqrt(2 * len(counts) + rarity), seen * math.sqrt(2 / freedom))
    excess = max(0.0, seen - freedom + STANDARD_ERRORS * error)
    effective = requests - sum(each.requests**2 for each in counts) / requests
    return min(MOST_SPREAD, math.sqrt(excess / (effective * chance)))


def concentration(groups: Iterable[int]) -> float:
    """Return 1 over the number of groups of one size that differ as much in the mean as these, by
    the requests of each."""
    found = list(groups)
    requests = sum(found)
    return sum(each**2 for each in found) / requests**2 if requests else 1.0
