"""Compares a version with the one before it in every regard that is counted, and says when it is
worse: at most ALPHA of the rollouts of a version that is no worse are ever taken back for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

from gateway.registry.evidence import Count, Evidence, log_sum
from gateway.registry.spread import spread_of_groups

Regard = Literal["refused", "failed", "empty", "cut_off", "late"]
REGARDS: tuple[Regard, ...] = get_args(Regard)
WEIGHTS: Mapping[Regard, float] = {
    "refused": 0.8,
    "failed": 0.1,
    "empty": 0.03,
    "cut_off": 0.03,
    "late": 0.04,
}
"""The part of ALPHA that each may use."""
ALPHA = 0.0075


class Outcomes(msgspec.Struct, kw_only=True):
    """How many requests ended, and of how many what was so."""

    requests: int = 0
    refused: int = 0
    """The model declined, or a filter of an upstream did."""
    failed: int = 0
    """Ended in an error that is not the caller's."""
    empty: int = 0
    """Ended well, with neither text nor a call of a tool."""
    cut_off: int = 0
    """Ended at the most tokens that it may have."""
    late: int = 0
    """Its first token came later than its objective says."""

    def count(self, regard: Regard) -> Count:
        return Count(self.requests, getattr(self, regard))

    def since(self, before: Outcomes) -> Outcomes:
        """Return what came after `before`, which is a part of it."""
        return Outcomes(
            **{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__}
        )

    def add(self, more: Outcomes) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(more, name))


def total(several: Iterable[Outcomes]) -> Outcomes:
    found = Outcomes()
    for each in several:
        found.add(each)
    return found


def evidence_of(regard: Regard) -> Evidence:
    return Evidence(goal=-math.log(ALPHA) - math.log(WEIGHTS[regard]))


class Comparison(msgspec.Struct, kw_only=True):
    """The evidence in every regard, from the first look on."""

    evidence: dict[Regard, Evidence] = msgspec.field(
        default_factory=lambda: {regard: evidence_of(regard) for regard in REGARDS}
    )

    def watch(self, new: Outcomes, old: Outcomes) -> None:
        """Learn how those who get the new version fare beside the others, from what ended while
        all had the old one."""
        if new.requests and old.requests:
            for regard, evidence in self.evidence.items():
                evidence.watch(new.count(regard), old.count(regard))

    def learn_spread(self, old: Iterable[Outcomes], concentration: float) -> None:
        """Learn how unlike groups of organizations are, from how each fared with the old version.
        `concentration`: of the requests that are compared in as few groups
        (`gateway.registry.spread.concentration`)."""
        groups = list(old)
        for regard, evidence in self.evidence.items():
            spread = spread_of_groups([each.count(regard) for each in groups])
            evidence.spread = round(spread * math.sqrt(concentration), 3)

    def add(self, new: Outcomes, old: Outcomes) -> None:
        """Add what ended since the last look."""
        for regard, evidence in self.evidence.items():
            evidence.add(new.count(regard), old.count(regard))

    def begin_step(self) -> None:
        """Go on with other organizations."""
        for evidence in self.evidence.values():
            evidence.begin_step()

    def copy(self) -> Comparison:
        """Return one that goes on by itself."""
        return Comparison(evidence={regard: each.copy() for regard, each in self.evidence.items()})

    @property
    def log(self) -> float:
        """Return the natural logarithm of the evidence in all regards together."""
        return log_sum(math.log(WEIGHTS[it]) + each.log for it, each in self.evidence.items())

    @property
    def part_of_proof(self) -> float:
        """Return the part of the evidence that takes a version back, 0 to 1."""
        return min(1.0, math.exp(min(0.0, self.log + math.log(ALPHA))))

    @property
    def is_worse(self) -> bool:
        return self.log >= -math.log(ALPHA)

    @property
    def worst(self) -> Regard:
        """Return the regard with the most evidence."""
        return max(self.evidence, key=lambda it: math.log(WEIGHTS[it]) + self.evidence[it].log)
