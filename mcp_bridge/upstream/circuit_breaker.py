"""Decides whether an upstream is worth asking now: one that fails rests, and is tried by one call
at first.

Pure but for the clock and the draw that are handed in. Words are those of the gateway's fleet:
failures in a row, a cool-down that doubles. Who asks says what is a failure: no connection, no
answer, an answer that is none. A tool that says no, or a server that refuses, is alive.

    closed    asked as usual; FAILURES_TO_REST in a row make it rest
    resting   nobody asks, for a cool-down that doubles with each failure behind it
    trying    one call is on its way; it decides. One that never reports is given up.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from mcp_bridge.errors import BridgeError

FAILURES_TO_REST = 3
COOL_DOWN_MIN_S = 1.0
COOL_DOWN_MAX_S = 60.0
JITTER = 0.25
"""A cool-down is drawn from this much above it, so that those that failed together do not come
back together."""
TRIAL_S = 120.0
"""For the call that tries; then another one may."""

State = Literal["closed", "resting", "trying"]


class UpstreamResting(BridgeError):
    """It failed, and is not asked again before `retry_after_s`."""

    code = "upstream_unavailable"

    def __init__(self, upstream: str, retry_after_s: float) -> None:
        super().__init__(f"{upstream}: does not answer; again in {retry_after_s:.0f} s")
        self.upstream = upstream
        self.retry_after_s = retry_after_s


class UpstreamHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an upstream's health, for people and for readiness."""

    upstream: str
    state: State
    failures_in_a_row: int
    retry_after_s: float
    """0 where it may be asked now."""
    last_failure: str | None
    """The code of the error that came last, where none came right since."""
    failing_s: float | None = None
    """Since the first failure after which nothing came right; None: the last one asked answered."""
    answered_s: float | None = None
    """Since it last answered; None: it has not, since this process asks it."""


class Attempt(msgspec.Struct, frozen=True, eq=False):
    """A call that may be made; `Breaker.report` wants it back."""

    era: int
    """Of those before it that has ended, the outcome says nothing any more."""


class Breaker:
    """The circuit breaker of one upstream, for one owner."""

    def __init__(
        self,
        upstream: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.upstream = upstream
        self._clock = clock
        self._rng = rng or random.Random()
        self._in_a_row = 0
        self._era = 0
        self._rests_until = -math.inf
        self._trial_until: float | None = None
        """Of the call that tries, while one is on its way."""
        self._last_failure: str | None = None
        self._failing_since: float | None = None
        self._answered_at: float | None = None

    @property
    def state(self) -> State:
        if self._in_a_row < FAILURES_TO_REST:
            return "closed"
        return "trying" if self._trying() else "resting"

    def attempt(self) -> Attempt:
        """Return a permission to call, to be reported, whatever comes. Raises: UpstreamResting."""
        if self._in_a_row >= FAILURES_TO_REST:
            if (wait_s := self._wait_s()) > 0:
                raise UpstreamResting(self.upstream, wait_s)
            self._trial_until = self._clock() + TRIAL_S
            self._era += 1
        return Attempt(self._era)

    def report(self, attempt: Attempt, *, failure: str | None) -> None:
        """failure: the code of what went wrong; None: it answered. Calls that were on their way
        before it rested, or whose trial was given up, change nothing."""
        if attempt.era != self._era:
            return
        now = self._clock()
        if failure is None:
            self._answered_at, self._failing_since = now, None
            self._in_a_row = 0
            self._last_failure = None
            self._trial_until = None
            return
        self._last_failure = failure
        self._failing_since = now if self._failing_since is None else self._failing_since
        self._in_a_row += 1
        if self._in_a_row >= FAILURES_TO_REST:
            self._era += 1
            self._trial_until = None
            self._rests_until = now + self._cool_down_s()

    def give_up(self, attempt: Attempt) -> None:
        """Release a call that nobody waits for any more: it said nothing about the upstream."""
        if attempt.era == self._era:
            self._trial_until = None

    def health(self) -> UpstreamHealth:
        return UpstreamHealth(
            upstream=self.upstream,
            state=self.state,
            failures_in_a_row=self._in_a_row,
            retry_after_s=self._wait_s() if self._in_a_row >= FAILURES_TO_REST else 0.0,
            last_failure=self._last_failure,
            failing_s=self._ago(self._failing_since),
            answered_s=self._ago(self._answered_at),
        )

    def _ago(self, at: float | None) -> float | None:
        return None if at is None else self._clock() - at

    def _trying(self) -> bool:
        return self._trial_until is not None and self._clock() < self._trial_until

    def _wait_s(self) -> float:
        now = self._clock()
        until = self._rests_until
        if self._trial_until is not None and self._trying():
            until = max(until, min(self._trial_until, now + COOL_DOWN_MIN_S))
        return max(0.0, until - now)

    def _cool_down_s(self) -> float:
        doublings = min(self._in_a_row - FAILURES_TO_REST, 32)
        bound_s: float = min(COOL_DOWN_MIN_S * 2**doublings, COOL_DOWN_MAX_S)
        return bound_s * (1 + JITTER * self._rng.random())
