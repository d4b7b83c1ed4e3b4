"""Tells whether a version does worse than the one before it, at any moment and as often as one
looks: a sequential test whose false alarms are bounded for all looks together.
docs/decisions/043-rollout-evidence.md has the proof, and what was weighed.

What is counted is of how many requests something was so, such as a refusal: of organizations that
get the new version, and of others at the same time. A block is what came between two looks. Of a
block only this is used: how many of the requests that it was so of were of the new version, given
how many there were of both. How often it is so of anybody cancels out, so what happens to all says
nothing, however it drifts.

By how much more often it is so of these organizations than of the others by themselves is unknown:
the `gap`, a logarithm of odds. It is as for a random group of organizations, which it is: normal,
with the `spread` that groups of them have, and is learnt from blocks before the new version
(`watch`). The evidence is the likelihood ratio of a worse version to an equal one, both averaged
over the gap: a test martingale, as is a weighted mean of several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

WORSE = ((0.025, 0.06), (0.045, 0.24), (0.15, 0.06), (0.5, 0.04))
"""How much more of its requests a worse version has something so of, and the weight of that."""
HORIZON, HORIZON_WEIGHT = 500, 0.6
"""The last alternative aims at being beyond doubt after so many requests of the new version."""
WEIGHTS = (*(weight for _, weight in WORSE), HORIZON_WEIGHT)
PRIOR_REQUESTS, PRIOR_SO = 50.0, 1.0
"""The old version's share is taken from these before there are requests."""
LEAST, MOST = 1e-4, 0.999
"""The shares that an alternative names."""
GAPS = tuple(0.208 * math.sinh(0.24 * at) for at in range(-15, 16))
"""The gaps that are told apart, closer to each other about 0."""
NO_SPREAD = 0.01
MOST_EFFECT = 10.0
MOST_TERMS = 40
"""A count with more possible values is taken for so many about the likeliest."""


class Count(NamedTuple):
    """How many requests there were, and of how many something was so."""

    requests: int = 0
    so: int = 0

    def plus(self, other: Count) -> Count:
        return Count(self.requests + other.requests, self.so + other.so)

    @property
    def share(self) -> float:
        return self.so / self.requests if self.requests else 0.0


def none_yet() -> list[float]:
    return [0.0] * len(GAPS)


class Evidence(msgspec.Struct, kw_only=True):
    """The evidence that the new version does worse in one regard, of all blocks so far."""

    goal: float = 0.0
    """The logarithm of what the evidence has to reach."""
    spread: float = 0.0
    """The standard deviation of the gap, before there is anything to learn it from."""
    new: Count = Count()
    old: Count = Count()
    before: Count = Count()
    """How those fared who get the new version at this step, while they had the old one."""
    earlier: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(WEIGHTS))
    """The logarithms of the evidence of the steps before, for each way to be worse."""
    same: list[float] = msgspec.field(default_factory=none_yet)
    """The logarithms of the likelihood of all blocks by gap, if the version is no worse."""
    worse: list[list[float]] = msgspec.field(default_factory=lambda: [none_yet() for _ in WEIGHTS])
    """The same for each way to be worse."""

    @property
    def logs(self) -> list[float]:
        """Return the logarithms of the evidence for each way to be worse."""
        weights = gap_weights(self.spread)
        same = averaged(self.same, weights)
        return [
            earlier + averaged(each, weights) - same
            for earlier, each in zip(self.earlier, self.worse, strict=True)
        ]

    @property
    def log(self) -> float:
        """Return the natural logarithm of the evidence."""
        return log_sum(
            math.log(weight) + log for weight, log in zip(WEIGHTS, self.logs, strict=True)
        )

    def watch(self, new: Count, old: Count) -> None:
        """Learn from a block in which all had the old version."""
        block = CountedBlock(new, old)
        found = [block.log_likelihood(gap) for gap in GAPS]
        for each in (self.same, *self.worse):
            add_to(each, found)
        self.before = self.before.plus(new)

    def add(self, new: Count, old: Count) -> None:
        """Add what came since the last look."""
        if new.requests and old.requests and (new.so or old.so):
            block = CountedBlock(new, old)
            effects = self._effects()
            add_to(self.same, [block.log_likelihood(gap) for gap in GAPS])
            for each, effect in zip(self.worse, effects, strict=True):
                add_to(each, [block.log_likelihood(gap + effect) for gap in GAPS])
        self.new, self.old = self.new.plus(new), self.old.plus(old)

    def begin_step(self) -> None:
        """Go on with other organizations, whose gap is another one."""
        self.earlier, self.before = self.logs, Count()
        self.same, self.worse = none_yet(), [none_yet() for _ in WEIGHTS]

    def copy(self) -> Evidence:
        """Return one that goes on by itself."""
        return msgspec.structs.replace(
            self,
            earlier=list(self.earlier),
            same=list(self.same),
            worse=[list(each) for each in self.worse],
        )

    def _effects(self) -> list[float]:
        """Return the logarithm of the ratio of odds of each alternative, by the blocks so far."""
        of_all = (self.old.so + PRIOR_SO) / (self.old.requests + PRIOR_REQUESTS)
        share = (self.before.so + PRIOR_REQUESTS * of_all) / (self.before.requests + PRIOR_REQUESTS)
        share = bounded(share)
        found = [log_odds(bounded(share + more)) - log_odds(share) for more, _ in WORSE]
        left = HORIZON - self.new.requests
        part = math.log(HORIZON_WEIGHT) + self.logs[-1] - self.goal
        return [*found, effect_to_reach(part, left, share)]


class CountedBlock:
    """Tells how likely a block's count of the new version is, by the ratio of the odds.

    Given how many requests there were of either version, and how many of both together something
    was so of, the new version's count is a noncentral hypergeometric variable. Of large blocks the
    binomial one stands for it, whose spread is larger.
    """

    def __init__(self, new: Count, old: Count) -> None:
        so = new.so + old.so
        self._new, self._old, self._so = new, old, so
        self._lowest = max(0, so - old.requests)
        self._ways: list[float] = []
        if min(new.requests, so) - self._lowest < MOST_TERMS:
            highest = min(new.requests, so)
            logs = [
                log_choose(new.requests, at) + log_choose(old.requests, so - at)
                for at in range(self._lowest, highest + 1)
            ]
            most = max(logs)
            self._ways = [math.exp(each - most) for each in logs]
            self._ways.reverse()

    def log_likelihood(self, log_ratio: float) -> float:
        """Return the logarithm of the likelihood, by that of the ratio of the odds, up to a
        constant of the block."""
        ratio = math.exp(log_ratio)
        if not self._ways:
            odds = ratio * self._new.requests / self._old.requests
            return self._new.so * log_ratio - self._so * math.log1p(odds)
        total = 0.0
        for ways in self._ways:
            total = total * ratio + ways
        return (self._new.so - self._lowest) * log_ratio - math.log(total)


def effect_to_reach(log_wealth: float, left: int, share: float) -> float:
    """Return the effect to bet on, for who has a part of a goal and wants the rest within `left`
    requests, as surely as can be.

    If nothing changed, the count of `left` requests reaches some number with a probability that is
    the part that is there: a bet on that alone is worth so much now, and the goal when it wins
    (Neyman and Pearson's test, seen as a game). The effect is by how much likelier winning makes it
    that the next request counts.
    """
    if log_wealth >= 0 or left < 2:
        return 0.0
    part = math.exp(log_wealth)
    tails = binomial_tails(left, share)
    needed = next((at for at, tail in enumerate(tails) if tail <= part), len(tails) - 1)
    rest = binomial_tails(left - 1, share)
    of_needed = effect_of(rest, needed)
    if needed < 1 or not 0 < tails[needed] < part:
        return of_needed
    above = math.log(part / tails[needed]) / math.log(tails[needed - 1] / tails[needed])
    return (1 - above) * of_needed + above * effect_of(rest, needed - 1)


def effect_of(tails: Sequence[float], needed: int) -> float:
    if needed < 1:
        return 0.0
    if needed >= len(tails):
        return MOST_EFFECT
    return min(MOST_EFFECT, math.log(tails[needed - 1] / tails[needed]))


@lru_cache(maxsize=64)
def binomial_tails(requests: int, share: float) -> tuple[float, ...]:
    """Return the probabilities that a count is at least 0, 1, 2, ..., until they hardly matter."""
    mean = requests * share
    highest = min(requests, int(mean + 10 * math.sqrt(mean) + 30))
    log_odds_ = math.log(share / (1 - share))
    start = requests * math.log1p(-share)
    found, total = [], 0.0
    for at in range(highest, -1, -1):
        total += math.exp(start + log_choose(requests, at) + at * log_odds_)
        found.append(total)
    found.reverse()
    return tuple(found)


@lru_cache(maxsize=64)
def gap_weights(spread: float) -> tuple[float, ...]:
    """Return the logarithms of the probabilities of `GAPS`."""
    scale = max(spread, NO_SPREAD) * math.sqrt(2)
    edges = [(one + other) / 2 for one, other in zip(GAPS, GAPS[1:], strict=False)]
    below = [0.0, *(0.5 * math.erfc(-edge / scale) for edge in edges), 1.0]
    return tuple(
        math.log(max(after - before, 1e-300))
        for before, after in zip(below, below[1:], strict=False)
    )


def averaged(logs: Sequence[float], weights: Sequence[float]) -> float:
    return log_sum(log + weight for log, weight in zip(logs, weights, strict=True))


def add_to(logs: list[float], more: Sequence[float]) -> None:
    for at, each in enumerate(more):
        logs[at] += each


def log_choose(of: int, chosen: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


def bounded(share: float) -> float:
    return min(max(share, LEAST), MOST)


def log_sum(terms: Iterable[float]) -> float:
    """Return the logarithm of a sum, of the logarithms of its terms."""
    found = list(terms)
    most = max(found)
    return most + math.log(sum(math.exp(each - most) for each in found))
