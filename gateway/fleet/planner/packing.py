"""Decides how many of the wanted replicas fit on one machine, in memory and in processors.

Pure. What the settings want at least comes first, then one replica of each model that is needed,
then those that are resident and needed, then growth, that of the busiest model first and of equals
that of the larger engine (first fit, decreasing), and last what only a cool-down keeps. So a
replica that runs is not ended to start another, unless nothing needs it; and a model that is asked
for takes the room of one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec


class Footprint(msgspec.Struct, frozen=True):
    """The room on a machine, or what of it a replica takes."""

    bytes: int
    threads: float
    """Processors that it keeps busy."""


class PoolClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Describes what one model wants."""

    model: str
    each: Footprint
    """The room that one replica takes."""
    least: int
    needed: int
    wanted: int
    """At least `needed`."""
    resident: int
    """Replicas that run."""
    load: float = 0.0
    """Replicas' work a second."""


class PoolShare(msgspec.Struct, frozen=True):
    replicas: int
    problem: str = ""
    """Why there are fewer than wanted."""


class _Room:
    def __init__(self, room: Footprint) -> None:
        self.bytes, self.threads = room.bytes, room.threads

    def lacks(self, each: Footprint) -> str:
        """Say what there is too little of for one more; empty: it fits."""
        if each.bytes > self.bytes:
            free, wanted = max(0, self.bytes) / 2**30, each.bytes / 2**30
            return f"it takes {wanted:.2f} GiB, {free:.2f} are free"
        if each.threads > self.threads + 1e-9:
            return f"it takes {each.threads:.1f} processors, {max(0.0, self.threads):.1f} are idle"
        return ""

    def take(self, each: Footprint) -> None:
        self.bytes -= each.bytes
        self.threads -= each.threads


def pack(claims: Sequence[PoolClaim], room: Footprint) -> dict[str, PoolShare]:
    """Return how many replicas each model gets. `room`: with all that resident replicas take."""
    left, given = _Room(room), dict.fromkeys((each.model for each in claims), 0)
    problems: dict[str, str] = {}

    def give(claim: PoolClaim, up_to: int, *, whatever: bool = False) -> None:
        while given[claim.model] < up_to:
            lack = left.lacks(claim.each)
            if lack and not whatever:
                problems.setdefault(claim.model, lack)
                return
            left.take(claim.each)
            given[claim.model] += 1

    by_size = sorted(claims, key=lambda each: (-each.each.bytes, each.model))
    for claim in by_size:
        give(claim, claim.least, whatever=True)  # the settings say it, whatever we guess
    rounds: Sequence[Callable[[PoolClaim], int]] = (
        lambda each: min(1, each.needed),
        lambda each: min(each.resident, each.needed),
    )
    for of in rounds:
        for claim in by_size:
            give(claim, of(claim))
    while growing := [
        each for each in by_size if given[each.model] < each.needed and each.model not in problems
    ]:
        busiest = max(growing, key=lambda each: each.load / max(1, given[each.model]))
        give(busiest, given[busiest.model] + 1)
    for claim in by_size:
        give(claim, min(claim.wanted, max(claim.resident, claim.needed)))
    return {
        each.model: PoolShare(
            given[each.model],
            problems.get(each.model, "") if given[each.model] < each.wanted else "",
        )
        for each in claims
    }
