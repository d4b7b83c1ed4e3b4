"""Tracks what a running request may write: its reservation, then steps that are taken as it goes
on.

It knows no replica and no HTTP. A step is asked for before it is needed, so that a stream whose
tokens are there waits for nothing; while the answer is on its way no other step is asked for.

The bound on what passes in any 60 seconds, reservations counted at admission and what is written
beyond them when it is written (B: the burst, r: the rate):

  - of our engine, whose streams rest: 2 B + 60 r + MAX_AHEAD_TOKENS for each stream (`limiter`);
  - of upstreams, whose streams cannot: B + 60 r, and for each stream that is open at once what it
    may write beyond its reservation: B + 60 r + streams * max_tokens at most. For whatever is
    written beyond becomes debt, at the latest when it is settled; while there is debt nobody is
    admitted; so all of it was written by those that were open when the last one was. It is paid
    back in full before the next one. Where an upstream was told no `max_tokens`, that is what its
    model writes at most (`fleet.upstream.bounds`); what its input has beyond our estimate, up to
    the bound of the input, is debt, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from foundation.tasks import TaskSet
from gateway.limits.limiter import NOTHING, STEP_TOKENS, Extension, Limiter
from gateway.limits.outcomes import Admission, Units
from gateway.limits.redis.scripts import LimiterUnavailable

SetPaused = Callable[[bool], Awaitable[None]]
"""Pauses an attempt as soon as possible (True), or resumes it (False)."""
AHEAD_TOKENS = STEP_TOKENS // 2
"""How much of what was granted may be left when the next step is asked for."""
MIN_REST_S, MAX_REST_S = 0.005, 5.0
"""Between two looks at a debt: others may pay it sooner, or add to it."""


class Allowance:
    """The allowance of one admission. `sleep` is asyncio's, but for tests."""

    def __init__(
        self,
        limiter: Limiter,
        admission: Admission,
        tasks: TaskSet,
        *,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._limiter, self._admission, self._tasks = limiter, admission, tasks
        self._sleep = sleep
        self._granted = admission.reserved.output_tokens
        self._is_limited = admission.limits_tokens
        self._is_told = self._is_limited or admission.spending is not None
        self._used = NOTHING
        self._asking = False
        self._over = False

    def note(self, used: Units, set_paused: SetPaused) -> None:
        """Note what was used so far. `set_paused` is called when the stream must stop, and when it
        may go on."""
        self._used = used
        if self._is_told:
            self._limiter.progress(self._admission, used)
        if not self._is_limited:
            return
        if self._lacks_a_step() and not self._asking and not self._over:
            self._asking = True
            self._tasks.spawn(self._ask(set_paused), name="extend a reservation")

    def end(self) -> None:
        """Note that nothing more will be written."""
        self._over = True

    def _lacks_a_step(self) -> bool:
        wanted = self._used.output_tokens + AHEAD_TOKENS
        return self._granted < min(wanted, self._admission.max_output_tokens)

    async def _ask(self, set_paused: SetPaused) -> None:
        """Take steps until enough is granted. While Redis is away the stream goes on: what it
        writes is taken when it is settled."""
        try:
            while self._lacks_a_step() and not self._over:
                left = self._admission.max_output_tokens - self._granted
                given = await self._extend(min(STEP_TOKENS, left), resting=False)
                if not given.is_open:
                    self._over = True
                elif given.rest_s:
                    await self._pause(given, set_paused)
        except LimiterUnavailable:
            return
        finally:
            self._asking = False

    async def _pause(self, given: Extension, set_paused: SetPaused) -> None:
        await set_paused(True)
        try:
            while given.is_open and given.rest_s and not self._over:
                await self._sleep(min(MAX_REST_S, max(MIN_REST_S, given.rest_s)))
                given = await self._extend(0, resting=True)
        finally:
            await set_paused(False)

    async def _extend(self, output_tokens: int, *, resting: bool) -> Extension:
        self._granted += output_tokens
        return await self._limiter.extend(
            self._admission, output_tokens=output_tokens, used=self._used, resting=resting
        )


class PauseReasons:
    """The reasons to pause one attempt: its tenant's limits and its reader know nothing of each
    other. `for_limits` and `for_reader` are each a `SetPaused`; `set_paused` is called when a first
    reason comes, and when none is left."""

    def __init__(self, set_paused: SetPaused) -> None:
        self._set_paused = set_paused
        self._by_limits = self._by_reader = False

    def move_to(self, set_paused: SetPaused) -> bool:
        """Pause another attempt from now on, in the place of one that has ended. Return whether
        there is a reason to pause it at once."""
        self._set_paused = set_paused
        return self._by_limits or self._by_reader

    async def for_limits(self, paused: bool) -> None:
        before, self._by_limits = self._by_limits, paused
        if before != paused and not self._by_reader:
            await self._set_paused(paused)

    async def for_reader(self, paused: bool) -> None:
        before, self._by_reader = self._by_reader, paused
        if before != paused and not self._by_limits:
            await self._set_paused(paused)
