"""Decides what a gateway may let pass under hard caps by itself, while Redis is away.

Only where what was left when it last heard is comfortable: of N gateways each may spend the N-th
part of a tenth of it, all it lets pass meanwhile together, and only if that was heard lately. So
all of them exceed a cap by at most a tenth of what any of them last saw left of it, whatever the
others spent since. Everybody else is refused: a hard cap fails closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from gateway.lru import Lru

COMFORT = 10
"""The allowance is used only if this many times what all gateways may admit is left."""
HEARD_S = 300.0
"""Before that, what was left says nothing."""
MAX_COUNTERS = 65_536


class _KnownCounter(msgspec.Struct):
    left_nano: int
    heard_at: float
    taken_nano: int = 0
    """The part that this gateway has taken since then."""


class OutageSpending:
    """The spending that a gateway may let pass by itself. Counters are known by their keys in
    Redis. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: Lru[str, _KnownCounter] = Lru(MAX_COUNTERS)

    def note(self, keys: Sequence[str], left_nano: Sequence[int]) -> None:
        """Note what is left, as Redis says."""
        now = self._clock()
        for key, left in zip(keys, left_nano, strict=True):
            self._known.put(key, _KnownCounter(left, now))

    def allows(self, keys: Sequence[str], nano: int, num_gateways: int) -> bool:
        """Tell whether so much more is comfortable under each of them."""
        return all(self._allows(key, nano, num_gateways) for key in keys)

    def _allows(self, key: str, nano: int, num_gateways: int) -> bool:
        known = self._known.get(key)
        if known is None or self._clock() - known.heard_at > HEARD_S:
            return False
        return COMFORT * max(1, num_gateways) * (known.taken_nano + nano) <= known.left_nano

    def take(self, keys: Sequence[str], nano: int) -> None:
        """Take what passes. What it does not use in the end is not given back: that is heard of
        Redis."""
        for key in keys:
            known = self._known.get(key)
            assert known is not None, "only what is known is comfortable"
            known.taken_nano += nano
