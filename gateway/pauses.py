"""Why a running attempt may not write on just now.

Its tenant's limits and its reader know nothing of each other: it rests while either wants it to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

Rest = Callable[[bool], Awaitable[None]]
"""True: stop writing, as soon as may be; False: go on."""


class PauseReasons:
    """Each of `for_limits` and `for_reader` is a `Rest`; `halt` is told when there is a first
    reason, and when there is none any more."""

    def __init__(self, halt: Rest) -> None:
        self._halt = halt
        self._by_limits = self._by_reader = False

    async def for_limits(self, resting: bool) -> None:
        before, self._by_limits = self._by_limits, resting
        if before != resting and not self._by_reader:
            await self._halt(resting)

    async def for_reader(self, resting: bool) -> None:
        before, self._by_reader = self._by_reader, resting
        if before != resting and not self._by_limits:
            await self._halt(resting)
