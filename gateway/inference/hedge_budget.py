"""Bounds how many requests of a worker are hedged."""

from __future__ import annotations

MOST_SAVED = 4.0
"""As many may be hedged in a row, after a time in which none was."""


class HedgeBudget:
    """Lets a share of the requests that could be hedged be it: each of them adds the share, and
    each hedge takes one. `share`: 0: none is."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._left = 1.0 if share else 0.0

    def earn(self) -> None:
        """Note a request that could be hedged."""
        self._left = min(MOST_SAVED, self._left + self.share)

    def spend(self) -> bool:
        """Take one hedge, if one is left, and tell whether it was."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
