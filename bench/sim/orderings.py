"""Orderings decide whose turn it is: by the engine's virtual token counters, and by two rules to
hold against it.

All three go through the one interface that the scheduler asks; what differs is what is said to it,
and what it answers.

  - fair: as served.
  - fcfs: one lane and one tenant for everybody. A tenant's requests go in order of arrival, so that
    is first come, first served.
  - strict: the higher lane first whatever it was served, lower ones give way to it; in a lane first
    come, first served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.fairness import LANE_RANKS, FairShare
from engine.protocol import Lane

EVERYBODY = "everybody"


class StrictPriority(FairShare):
    """Counters that never move: the rank of a lane alone decides."""

    def charge(self, lane: Lane, tenant: str, weight: float, tokens: float) -> None:
        pass  # whoever was served much comes first all the same

    def lane_counter(self, lane: Lane) -> float:
        return float(LANE_RANKS[lane])


@dataclass(frozen=True, slots=True)
class Ordering:
    name: str
    share: Callable[[], FairShare]
    has_lanes: bool
    has_tenants: bool

    def turn(self, lane: Lane, tenant: str) -> tuple[Lane, str]:
        """Return the lane and the tenant that the scheduler is told of a request."""
        return lane if self.has_lanes else "interactive", tenant if self.has_tenants else EVERYBODY


FAIR = Ordering("fair", FairShare, has_lanes=True, has_tenants=True)
FCFS = Ordering("fcfs", FairShare, has_lanes=False, has_tenants=False)
STRICT = Ordering("strict", StrictPriority, has_lanes=True, has_tenants=False)
ORDERINGS = (FAIR, FCFS, STRICT)
