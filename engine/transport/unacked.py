"""Holds what an engine offers to its gateways until one has it on disk, and bounds how much of that
it keeps.

Knows no socket.
"""

from __future__ import annotations

import logging
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class UnackedItems(dict[str, T]):
    """Things of one kind by id, oldest first; `what` names one in the log."""

    def __init__(self, what: str, most: int) -> None:
        super().__init__()
        self._what, self._most = what, most

    def offer(self, key: str, offered: T) -> list[str]:
        """Keep one more. The ids of those dropped for it, which are told in the log alone."""
        self[key] = offered
        dropped = []
        while len(self) > self._most:
            oldest = next(iter(self))
            log.error("%s of %s dropped unacknowledged: %s", self._what, oldest, self.pop(oldest))
            dropped.append(oldest)
        return dropped
