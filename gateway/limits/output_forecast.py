"""Forecasts how much a key usually writes with a model: the p95 of its last answers, remembered by
this process alone.

Too low a guess becomes debt when the lease is settled, too high a one is refunded, so a rough
figure does no harm.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort

from gateway.lru import Lru

SAMPLES = 64
MIN_SAMPLES = 8
MAX_WRITERS = 16_384
"""Pairs of key and model, of at most 1 KB; the one unused for longest is forgotten first."""
MAX_NOTED = 2**32 - 1
UNKNOWN_OUTPUT_TOKENS = 512
"""Expected of a pair with fewer than MIN_SAMPLES answers."""
QUANTILE = 0.95


class _Samples:
    """The last ones, as they came and by their size."""

    __slots__ = ("_by_size", "_newest_last")

    def __init__(self) -> None:
        self._newest_last = array("I")
        self._by_size = array("I")

    def add(self, output_tokens: int) -> None:
        if len(self._newest_last) == SAMPLES:
            del self._by_size[bisect_left(self._by_size, self._newest_last.pop(0))]
        self._newest_last.append(output_tokens)
        insort(self._by_size, output_tokens)

    def quantile(self) -> int | None:
        """Return the quantile by the nearest rank; None: there are too few."""
        number = len(self._by_size)
        if number < MIN_SAMPLES:
            return None
        return self._by_size[math.ceil(QUANTILE * number) - 1]


class ExpectedOutput:
    def __init__(self) -> None:
        self._written: Lru[tuple[str, str], _Samples] = Lru(MAX_WRITERS)

    def note(self, key_id: str, model: str, output_tokens: int) -> None:
        writer = (key_id, model)
        samples = self._written.get(writer)
        if samples is None:
            samples = _Samples()
            self._written.put(writer, samples)
        samples.add(min(output_tokens, MAX_NOTED))

    def expected(self, key_id: str, model: str) -> int:
        """Return the tokens that an answer is expected to have."""
        samples = self._written.get((key_id, model))
        found = None if samples is None else samples.quantile()
        return UNKNOWN_OUTPUT_TOKENS if found is None else found
