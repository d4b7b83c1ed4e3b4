"""The circuit breaker of an upstream: one that fails gets no requests for a while, then one trial.

Pure but for the clock and the random generator. The caller reports failures: no connection, no
answer, an invalid answer. A tool error or a refusal by the server is no failure.

    closed    requests pass; FAILURES_TO_REST failures in a row open the breaker
    resting   no requests, for a cool-down that doubles with each failure
    trying    one request is under way and decides; after TRIAL_S another one may try
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
"""A cool-down is lengthened at random by up to this share, so that retries spread out."""
TRIAL_S = 120.0

State = Literal["closed", "resting", "trying"]


class UpstreamResting(BridgeError):
    """The upstream failed, and gets no requests before `retry_after_s`."""

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
    """0 if requests pass now."""
    last_failure: str | None
    """The code of the last failure, if no answer came since."""
    failing_s: float | None = None
    """Seconds since the first failure after the last answer; None: no failure since then."""
    answered_s: float | None = None
    """Seconds since the last answer; None: there was none in this process."""


class Attempt(msgspec.Struct, frozen=True, eq=False):
    """A permitted request, to be given to `Breaker.report`."""

    era: int
    """Changes when the breaker opens or a trial begins; outcomes of earlier eras are ignored."""


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
        """The end of the current trial, if there is one."""
        self._last_failure: str | None = None
        self._failing_since: float | None = None
        self._answered_at: float | None = None

    @property
    def state(self) -> State:
        if self._in_a_row < FAILURES_TO_REST:
            return "closed"
        return "trying" if self._trying() else "resting"

    def attempt(self) -> Attempt:
        """Permit a request, whose outcome must be reported. Raises: UpstreamResting."""
        if self._in_a_row >= FAILURES_TO_REST:
            if (wait_s := self._wait_s()) > 0:
                raise UpstreamResting(self.upstream, wait_s)
            self._trial_until = self._clock() + TRIAL_S
            self._era += 1
        return Attempt(self._era)

    def report(self, attempt: Attempt, *, failure: str | None) -> None:
        """Report an outcome. `failure`: its code; None: there was an answer."""
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
        """Release an attempt that was abandoned without an outcome."""
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
