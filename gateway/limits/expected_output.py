"""How much a key usually writes with a model: the p95 of its last answers, remembered by this
process alone.

Above: `limiter`, which reserves it. Below: nothing. Too low a guess becomes debt when the lease is
settled, too high a one is refunded, so a rough figure does no harm.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

SAMPLES = 64
MIN_SAMPLES = 8
MAX_WRITERS = 4096
"""Pairs of key and model; the one unused for longest is forgotten first."""
UNKNOWN_OUTPUT_TOKENS = 512
"""Expected of a pair with fewer than MIN_SAMPLES answers."""
QUANTILE = 0.95


class ExpectedOutput:
    def __init__(self) -> None:
        self._written: OrderedDict[tuple[str, str], deque[int]] = OrderedDict()

    def note(self, key_id: str, model: str, output_tokens: int) -> None:
        samples = self._written.setdefault((key_id, model), deque(maxlen=SAMPLES))
        samples.append(output_tokens)
        self._written.move_to_end((key_id, model))
        if len(self._written) > MAX_WRITERS:
            self._written.popitem(last=False)

    def expected(self, key_id: str, model: str) -> int:
        """Tokens; nearest-rank quantile."""
        samples = self._written.get((key_id, model), ())
        if len(samples) < MIN_SAMPLES:
            return UNKNOWN_OUTPUT_TOKENS
        return sorted(samples)[math.ceil(QUANTILE * len(samples)) - 1]
