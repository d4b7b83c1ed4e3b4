"""A bound on each of many waits, for the price of one.

A timeout around each wait costs several times as much as a wait that is over at once; here one
timer looks now and then whether the wait under way has lasted too long.
"""

from __future__ import annotations

import asyncio


class Patience:
    """`async with`: raises TimeoutError once a wait between `begin` and `end` has lasted
    `timeout_s`, and at most half as long again; or when it is `cut` short."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._deadline = asyncio.timeout(None)
        self._since: float | None = None

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def cut(self) -> None:
        """End it now, whatever it waits for."""
        if not self._deadline.expired():
            self._deadline.reschedule(self._loop.time())

    async def __aenter__(self) -> Patience:
        await self._deadline.__aenter__()
        self._look_again()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._timer.cancel()
        await self._deadline.__aexit__(*error)  # type: ignore[arg-type]

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / 2, self._look)

    def _look(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= self._timeout_s:
            self.cut()
        else:
            self._look_again()
