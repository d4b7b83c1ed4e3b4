"""Bounds the notifications of one exchange, by number and by bytes: a storm of them must not keep
its own answer. Pure.

Both bounds refill: an hour of progress is no storm.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import Message

MAX_NOTIFICATIONS = 1000
NOTIFICATIONS_PER_S = 20
MAX_BYTES = 4 * 1024 * 1024
BYTES_PER_S = 256 * 1024


class NotificationBudget:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at = clock, clock()
        self._left, self._bytes_left = float(MAX_NOTIFICATIONS), float(MAX_BYTES)

    def take(self, message: Message) -> bool:
        """Return whether one more is passed on. False: it is dropped, and costs nothing."""
        now = self._clock()
        passed, self._at = max(0.0, now - self._at), now
        self._left = min(MAX_NOTIFICATIONS, self._left + passed * NOTIFICATIONS_PER_S)
        self._bytes_left = min(MAX_BYTES, self._bytes_left + passed * BYTES_PER_S)
        if self._left < 1:
            return False
        size = len(rpc.encode(message))
        if self._bytes_left < size:
            return False
        self._left -= 1
        self._bytes_left -= size
        return True
