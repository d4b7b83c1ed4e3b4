"""Counts latencies in buckets that are the same everywhere, so that counts add up.

Buckets grow by 2^(1/8), from half a millisecond to 65 seconds; the last one has what took longer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

LEAST_US = 500
BUCKETS_PER_OCTAVE = 8
NUM_OCTAVES = 17

BOUNDS_US = tuple(
    round(LEAST_US * 2 ** (number / BUCKETS_PER_OCTAVE))
    for number in range(NUM_OCTAVES * BUCKETS_PER_OCTAVE + 1)
)
"""Bucket n holds what took less than the n-th of these, and no less than the one before it."""
NUM_BUCKETS = len(BOUNDS_US) + 1
_BOUNDS_S = tuple(bound / 1_000_000 for bound in BOUNDS_US)


class TokenGaps:
    """The times between the output tokens of a request, over all its generations.

    Tokens come in steps. One that brought n tokens, so many seconds after the one before it, counts
    as n gaps of the n-th part of that: their mean is the time per output token. The tokens of an
    upstream that does not count them as they come are estimated, as its usage is.
    """

    __slots__ = ("counts", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds, self.tokens = 0.0, 0
        self.counts: list[int] | None = None
        """The gaps of each bucket; None: there are none."""

    def add(self, seconds: float, tokens: int) -> None:
        """Note a step. `tokens` is less than zero where the upstream told of fewer than were
        estimated; then they are fewer in all, and no gap."""
        self.seconds += seconds
        self.tokens += tokens
        if tokens > 0:
            counts = self.counts
            if counts is None:
                counts = self.counts = [0] * NUM_BUCKETS
            gap_s = seconds if tokens == 1 else seconds / tokens
            counts[bisect_right(_BOUNDS_S, gap_s)] += tokens

    @property
    def mean_s(self) -> float | None:
        return self.seconds / self.tokens if self.tokens else None


def spread(counts: Sequence[int]) -> tuple[int, int]:
    """Return the first bucket that is not empty, and the one behind the last; (0, 0): all are."""
    filled = [number for number, count in enumerate(counts) if count]
    return (filled[0], filled[-1] + 1) if filled else (0, 0)
