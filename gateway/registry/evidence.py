"""Tells whether a version does worse than the one before it, at any moment and as often as one
looks: a sequential test whose false alarms are bounded for all looks together.

Requests of the new version are compared with those of the old one of the same time, so what happens
to both, such as an outage of what they share, says nothing. What is counted is of how many requests
something was so, such as a refusal. A block is what came between two looks. Under no change it is
so of each request of a block with one probability, which may be another one in the next block.

The evidence of a block against a fixed alternative is the likelihood ratio of the alternative to
its projection on the hypothesis of no change. Its expectation is 1 at most under every distribution
of that hypothesis (Turner, Ly, Grünwald, "Generic E-Variables for Exact Sequential k-Sample Tests
that allow for Optional Stopping", arXiv:2106.02693; with an allowance: Turner, Grünwald, "Exact
Anytime-valid Confidence Intervals for Contingency Tables and Beyond", arXiv:2203.09785). So the
product over blocks, each with an alternative chosen by the blocks before it, is a test martingale,
as is a weighted mean of such products, and by Ville's inequality it ever exceeds 1 / alpha in alpha
of all runs at most.

An alternative is the old version's share so far, and so many percentage points more. `WORSE` holds
how many more, with weights: most of it lies about 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

WORSE = ((0.025, 0.1), (0.045, 0.75), (0.15, 0.12), (0.5, 0.03))
"""How much more of its requests a worse version has something so of, and the weight of that."""
PRIOR_REQUESTS, PRIOR_SO = 50.0, 1.0
"""The old version's share is taken from these before there are requests."""
LEAST, MOST = 1e-4, 0.999
"""The shares that an alternative names."""
PROJECTION_STEPS = 40
"""The bisection halves so often: to 1e-12."""


class Count(NamedTuple):
    """How many requests there were, and of how many something was so."""

    requests: int = 0
    so: int = 0

    def plus(self, other: Count) -> Count:
        return Count(self.requests + other.requests, self.so + other.so)

    @property
    def share(self) -> float:
        return self.so / self.requests if self.requests else 0.0


class Evidence(msgspec.Struct, kw_only=True):
    """The evidence that the new version does worse in one regard, of all blocks so far."""

    allowance: float = 0.0
    """The new version's share may be so much larger: its organizations are others."""
    new: Count = Count()
    old: Count = Count()
    logs: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(WORSE))
    """The logarithms of the evidence for each of `WORSE`."""

    @property
    def log(self) -> float:
        """Return the natural logarithm of the evidence. Beyond `log(1 / alpha)` it is worse."""
        return log_sum(
            math.log(weight) + log for (_, weight), log in zip(WORSE, self.logs, strict=True)
        )

    def add(self, new: Count, old: Count) -> None:
        """Add what came since the last look. A block of one version alone says nothing."""
        if new.requests and old.requests:
            share = (self.old.so + PRIOR_SO) / (self.old.requests + PRIOR_REQUESTS)
            for at, (more, _) in enumerate(WORSE):
                of_new, of_old = bounded(share + self.allowance + more), bounded(share)
                if of_new - of_old > self.allowance:  # else it is no worse than what is allowed
                    self.logs[at] += log_of_block(new, old, of_new, of_old, self.allowance)
        self.new, self.old = self.new.plus(new), self.old.plus(old)


def log_of_block(
    new: Count, old: Count, share_of_new: float, share_of_old: float, allowance: float = 0.0
) -> float:
    """Return the logarithm of the likelihood ratio of an alternative, which has to be worse by more
    than the allowance, to its projection on no change."""
    of_old = projected(new.requests, old.requests, share_of_new, share_of_old, allowance)
    return log_ratio(new, share_of_new, of_old + allowance) + log_ratio(old, share_of_old, of_old)


def projected(
    new: int, old: int, share_of_new: float, share_of_old: float, allowance: float
) -> float:
    """Return the old version's share in the projection: of the pairs of shares that are `allowance`
    apart, the one with the least divergence of a block from it."""
    if not allowance:
        return (new * share_of_new + old * share_of_old) / (new + old)
    low, high = share_of_old, share_of_new - allowance
    for _ in range(PROJECTION_STEPS):
        middle = (low + high) / 2
        raised = middle + allowance
        slope = new * (raised - share_of_new) / (raised * (1 - raised))
        slope += old * (middle - share_of_old) / (middle * (1 - middle))
        low, high = (middle, high) if slope < 0 else (low, middle)
    return (low + high) / 2


def log_ratio(count: Count, share: float, other: float) -> float:
    """Return by how much likelier a count is with one share than with another, as a logarithm."""
    rest = count.requests - count.so
    return count.so * math.log(share / other) + rest * math.log((1 - share) / (1 - other))


def bounded(share: float) -> float:
    return min(max(share, LEAST), MOST)


def log_sum(terms: Iterable[float]) -> float:
    """Return the logarithm of a sum, of the logarithms of its terms."""
    found = list(terms)
    most = max(found)
    return most + math.log(sum(math.exp(each - most) for each in found))
