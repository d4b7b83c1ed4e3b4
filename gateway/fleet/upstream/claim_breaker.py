"""Rests an upstream that claims too much in one answer after the other: who pays for it decides
whether to go on with it, and meanwhile another replica is asked.

Pure but for its clock; one for each upstream and process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_CLAIMS_IN_A_ROW = 10
REST_S = 60.0


class ClaimBreaker:
    """`max_in_a_row`: so many answers with disputed usage rest the upstream for `rest_s`, and so
    does each further one until an answer is in order. 0: it never rests."""

    def __init__(
        self,
        max_in_a_row: int = MAX_CLAIMS_IN_A_ROW,
        rest_s: float = REST_S,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_in_a_row, self._rest_s, self._clock = max_in_a_row, rest_s, clock
        self.num_in_a_row = 0
        self._until = clock()

    @property
    def rests_for_s(self) -> float:
        """Return how long it is left alone; 0: it is asked as usual."""
        return max(0.0, self._until - self._clock())

    def note(self, *, is_disputed: bool) -> bool:
        """Note a whole answer. Return whether a rest begins with it."""
        if not is_disputed:
            self.num_in_a_row = 0
            return False
        self.num_in_a_row += 1
        if not self._max_in_a_row or self.num_in_a_row < self._max_in_a_row:
            return False
        was_resting = self.rests_for_s > 0
        self._until = self._clock() + self._rest_s
        return not was_resting
