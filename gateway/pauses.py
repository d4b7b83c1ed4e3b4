"""Why a running attempt may not write on just now.

Its tenant's limits and its reader know nothing of each other: it pauses while either wants it to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

SetPaused = Callable[[bool], Awaitable[None]]
"""Pauses an attempt as soon as possible (True), or resumes it (False)."""


class PauseReasons:
    """The reasons to pause one attempt. `for_limits` and `for_reader` are each a `SetPaused`;
    `set_paused` is called when a first reason comes, and when none is left."""

    def __init__(self, set_paused: SetPaused) -> None:
        self._set_paused = set_paused
        self._by_limits = self._by_reader = False

    async def for_limits(self, paused: bool) -> None:
        before, self._by_limits = self._by_limits, paused
        if before != paused and not self._by_reader:
            await self._set_paused(paused)

    async def for_reader(self, paused: bool) -> None:
        before, self._by_reader = self._by_reader, paused
        if before != paused and not self._by_limits:
            await self._set_paused(paused)
