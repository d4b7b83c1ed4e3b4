"""Compares a version with the one before it in every regard that is counted, and says when it is
worse: at most ALPHA of the rollouts of a version that is no worse are ever taken back for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from gateway.registry.evidence import Count, Evidence, log_sum

Regard = Literal["refused", "failed", "empty", "cut_off", "late"]
REGARDS: tuple[Regard, ...] = get_args(Regard)
WEIGHTS: Mapping[Regard, float] = {
    "refused": 0.7,
    "failed": 0.15,
    "empty": 0.05,
    "cut_off": 0.05,
    "late": 0.05,
}
"""The part of ALPHA that each may use."""
ALPHA = 0.005
MOST_ALLOWED = 0.5
PLAIN_ERRORS = 1.64
"""Organizations plainly differ where their shares are so many standard errors apart: 1 in 20 pairs
of equal ones is."""


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


class Comparison(msgspec.Struct, kw_only=True):
    """The evidence in every regard, from the first look on."""

    evidence: dict[Regard, Evidence] = msgspec.field(
        default_factory=lambda: {regard: Evidence() for regard in REGARDS}
    )

    @classmethod
    def allowing(cls, new: Outcomes, old: Outcomes) -> Comparison:
        """Return one that knows how the organizations of either version fared before, when the old
        version served both."""
        found = {
            each: Evidence(allowance=allowance(new.count(each), old.count(each)))
            for each in REGARDS
        }
        return cls(evidence=found)

    def add(self, new: Outcomes, old: Outcomes) -> None:
        """Add what ended since the last look."""
        for regard, evidence in self.evidence.items():
            evidence.add(new.count(regard), old.count(regard))

    def copy(self) -> Comparison:
        """Return one that goes on by itself."""
        evidence = {
            regard: msgspec.structs.replace(each, logs=list(each.logs))
            for regard, each in self.evidence.items()
        }
        return Comparison(evidence=evidence)

    def dilute(self, part: float) -> None:
        """Allow less: those that were seen before are only `part` of the new version's now."""
        for evidence in self.evidence.values():
            evidence.allowance *= part

    @property
    def log(self) -> float:
        """Return the natural logarithm of the evidence in all regards together."""
        return log_sum(math.log(WEIGHTS[it]) + each.log for it, each in self.evidence.items())

    @property
    def part_of_proof(self) -> float:
        """Return the part of the evidence that takes a version back, 0 to 1."""
        return min(1.0, math.exp(self.log) * ALPHA)

    @property
    def is_worse(self) -> bool:
        return self.log >= -math.log(ALPHA)

    @property
    def worst(self) -> Regard:
        """Return the regard with the most evidence."""
        return max(self.evidence, key=lambda it: math.log(WEIGHTS[it]) + self.evidence[it].log)


def allowance(new: Count, old: Count) -> float:
    """Return how much larger the share of some organizations is than that of others, and a standard
    error more, where it plainly is; else 0."""
    if not new.requests or not old.requests:
        return 0.0
    gap = new.share - old.share
    error = math.hypot(standard_error(new), standard_error(old))
    return min(gap + error, MOST_ALLOWED) if gap > PLAIN_ERRORS * error else 0.0


def standard_error(count: Count) -> float:
    """Return that of the share, which is not taken to be 0 or 1 where it was so of none or all."""
    share = (count.so + 1) / (count.requests + 2)
    return math.sqrt(share * (1 - share) / count.requests)
