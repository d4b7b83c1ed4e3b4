"""Keeps what requests saw of an upstream: whether it is reachable, whether it accepts this
gateway's credentials, and what went wrong last. It asks nobody.

What one worker saw, the others learn (`gateway.health.readiness`): the latest holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import msgspec

ContactState = Literal["unknown", "ok", "unreachable", "unauthorised", "failing"]
"""`unknown`: no request has been there yet. `failing`: it answers, with errors or with nothing that
can be read."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what was last seen of an upstream. Times are Unix seconds."""

    state: ContactState = "unknown"
    since: float | None = None
    seen_at: float = 0.0
    """When something else was seen than before."""
    last_error: str | None = None
    """The error in our words: without an address, a credential or anything that the upstream wrote.
    """
    last_error_at: float | None = None

    @property
    def reachable(self) -> bool | None:
        """None: it is not known."""
        return None if self.state == "unknown" else self.state != "unreachable"

    @property
    def authorised(self) -> bool | None:
        """None: it is not known. An upstream that fails did not say whether it accepts us."""
        return {"ok": True, "unauthorised": False}.get(self.state)


class Contact:
    """Keeps what this process knows of one upstream. `clock`: Unix seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.observation = Observation()

    def accepted(self) -> None:
        """Note that it took a request, whose answer is yet to come."""
        if self.observation.state not in ("ok", "failing"):
            self.served()

    def served(self) -> None:
        """Note that it answered as it should."""
        if self.observation.state != "ok":
            self._see("ok", self.observation.last_error, self.observation.last_error_at)

    def failed(self, state: ContactState, error: str) -> None:
        self._see(state, error, self._clock())

    def was_busy(self, error: str) -> None:
        """Note that it took no request for now, which says nothing against it."""
        state: ContactState = "ok" if self.observation.state != "failing" else "failing"
        self._see(state, error, self._clock())

    def heard(self, observation: Observation) -> None:
        """Learn what another worker saw, if it was later."""
        if observation.seen_at > self.observation.seen_at:
            self.observation = observation

    def _see(self, state: ContactState, error: str | None, error_at: float | None) -> None:
        now, before = self._clock(), self.observation
        since = now if state != before.state else before.since
        self.observation = Observation(
            state=state, since=since, seen_at=now, last_error=error, last_error_at=error_at
        )
