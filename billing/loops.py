"""A loop that serves for as long as its process goes on whatever one round meets.

A loop names what it expects (that Postgres is away, say) and handles it; what nobody foresaw would
end its task without a word, and with it all the rounds that were to come. It knows no round's work,
and waits for nothing: the interval is the loop's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

LOG_AGAIN_S = 60.0
"""At least so long between two tracebacks of one loop."""


class Unforeseen:
    """Around each round of one loop: an `Exception` that comes this far is logged with its
    traceback, and the round is over. Cancellation, and what ends a process, passes. `what`: what
    did not happen, for the log. `clock`: monotonic seconds."""

    def __init__(
        self, log: logging.Logger, what: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._what, self._clock = log, what, clock
        self._log_from = clock()
        self._unsaid = 0
        """Rounds that failed since the last traceback."""

    def __enter__(self) -> None:
        """A round begins."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        now = self._clock()
        if now < self._log_from:
            self._unsaid += 1
            return True
        said = f" ({self._unsaid} more since the last)" if self._unsaid else ""
        self._log.error("%s%s: %r", self._what, said, error, exc_info=error)
        self._log_from, self._unsaid = now + LOG_AGAIN_S, 0
        return True
