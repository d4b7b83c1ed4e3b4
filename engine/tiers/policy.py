"""Decides which blocks are worth writing to a tier, and which to read instead of computing them.

A prompt costs more a token the deeper it is (each token is paired with all before it), a read costs
the same at any depth. What is gained by reading on therefore only grows with the number of blocks:
all that a tier has of a prefix is worth reading, or none of it is.

A read is not trusted to be as quick as was expected: it may go on for as long as what has arrived
of it saved, and for PATIENCE of what computing all of it takes besides. Whatever a disk does, a
prompt is there no later than 1 + PATIENCE times the time without a tier, as that is predicted
(`PrefillCosts`): a prediction that is too high is waited for. A read whose first block is not
expected within that is not begun: of a short prompt nothing would arrive, and the patience be lost
each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

MARGIN = 0.8
"""A read must be expected to take no longer than this part of the computation."""
PATIENCE = 0.03
"""The part of a computation that may be lost by waiting for a read in vain. It is of the predicted
time: while nothing arrives, 1.05 times the true one is kept to up to a prediction 1.6 times too
high."""
WEIGHT = 0.3
"""The weight of the newest read in the running average."""
MIN_LEARNT_BYTES = 1 << 20
"""Smaller reads say nothing about a rate."""
LEARNT_FOR_S = 10.0
"""A source that was found slow is tried again after so long."""


class PrefillCosts(NamedTuple):
    """The costs of computing a prompt, in seconds. Nothing is known while `token_s` is 0."""

    token_s: float = 0.0
    pair_s: float = 0.0
    """For a token and one before it."""

    def seconds(self, start: int, end: int) -> float:
        """Return the time for the tokens [start, end) of a prompt."""
        num_tokens = end - start
        return num_tokens * (self.token_s + self.pair_s * (start + end) / 2)


class ReadCosts(NamedTuple):
    """The costs of reading from a tier, or from another engine."""

    latency_s: float
    """Until the first block is there."""
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def learn(self, num_bytes: int, seconds: float, latency_s: float) -> ReadCosts:
        """Return the costs with what one more read took. latency_s: until its first block was
        there."""
        mean_s = self.latency_s + WEIGHT * (latency_s - self.latency_s)
        rate = self.bytes_per_s
        if num_bytes >= MIN_LEARNT_BYTES:
            rate = 1 / ((1 - WEIGHT) / rate + WEIGHT * max(seconds, 1e-6) / num_bytes)
        return ReadCosts(mean_s, rate)


class LearntReads:
    """Learns what reads from one source take. What was found slow is not asked, and so not found to
    be quick again: after LEARNT_FOR_S it is taken to be as quick as before anything was read.
    """

    def __init__(self, first: ReadCosts, clock: Callable[[], float]) -> None:
        """first: measured, or guessed, before the first read. clock: monotonic seconds."""
        self._first = self._learnt = first
        self._clock = clock
        self._learnt_s = clock()

    @property
    def costs(self) -> ReadCosts:
        learnt, first = self._learnt, self._first
        if self._clock() - self._learnt_s < LEARNT_FOR_S:
            return learnt
        return ReadCosts(
            min(learnt.latency_s, first.latency_s), max(learnt.bytes_per_s, first.bytes_per_s)
        )

    def learn(self, num_bytes: int, seconds: float, latency_s: float) -> None:
        """As `ReadCosts.learn`."""
        self._learnt = self.costs.learn(num_bytes, seconds, latency_s)
        self._learnt_s = self._clock()


def is_worth_reading(
    prefill: PrefillCosts, read: ReadCosts, *, start: int, end: int, num_bytes: int
) -> bool:
    """Whether the tokens [start, end) are there sooner by reading `num_bytes` than by computing."""
    return read.seconds(num_bytes) <= MARGIN * prefill.seconds(start, end)


def is_in_time(prefill: PrefillCosts, read: ReadCosts, *, start: int, end: int) -> bool:
    """Whether the first block of the tokens [start, end) is expected while a prompt waits for
    it."""
    return read.latency_s <= MARGIN * PATIENCE * prefill.seconds(start, end)


def patience_s(prefill: PrefillCosts, *, start: int, arrived: int, end: int) -> float:
    """Return how long after its begin a read of the tokens [start, end) may go on, where those
    before `arrived` have arrived."""
    return prefill.seconds(start, arrived) + PATIENCE * prefill.seconds(start, end)


def num_worth_keeping(cached_tokens: int, seen_tokens: int, block_size: int) -> int:
    """Return how many blocks of a prompt, from the first on, are used for the second time at least:
    found in the cache, or part of what an earlier prompt had, cached or not."""
    return max(cached_tokens, seen_tokens) // block_size
