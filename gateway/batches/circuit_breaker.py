"""A circuit breaker for batch lines, per org and model. A batch has thousands of lines; while an
engine is away each would ask it every few seconds. So the first that is refused speaks for all
lines of its org and model: none asks before a cool-down, which grows as long as nothing answers,
then one does, and the others wait for its outcome. By org, since a refusal may concern one tenant
alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from gateway.lru import Lru

COOL_DOWN_S = 1.0
MAX_COOL_DOWN_S = 30.0
MAX_DOUBLINGS = 5
MAX_KNOWN = 4096
"""The longest unused entry beyond this number is dropped, so its model is asked again at once."""
Scope = tuple[str, str]
"""Org and model."""


class ModelOutage(msgspec.Struct):
    """Refusals of one model, as the lines of one org met them."""

    in_a_row: int = 0
    """Refusals without an answer between them."""
    until: float = 0.0
    """Clock seconds."""
    is_tried: bool = False
    """True while a line tries the model."""


class CircuitBreakers:
    """The circuit breakers of one runner."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: Lru[Scope, ModelOutage] = Lru(MAX_KNOWN)

    def open_scopes(self) -> list[Scope]:
        """Return the scopes whose breaker is open: none of their lines may begin now."""
        now = self._clock()
        return [scope for scope, it in self._known.items() if it.is_tried or now < it.until]

    def open_models(self) -> Iterator[str]:
        """Yield the model of each breaker that is open: once for each org that it is open for."""
        return (model for _, model in self.open_scopes())

    def wait_s(self, scope: Scope) -> float:
        """Return how long a line has to wait; 0: it may ask, then reports that it did (`tried`) and
        the outcome (`answered`, `refused`)."""
        found = self._known.get(scope)
        if found is None:
            return 0.0
        if (left_s := found.until - self._clock()) > 0:
            return left_s
        if found.is_tried:
            return cool_down_s(found)
        found.is_tried = True
        return 0.0

    def tried(self, scope: Scope) -> None:
        """Note an attempt, whatever becomes of it; the next may ask once the cool-down is over."""
        found = self._known.get(scope)
        if found is not None:
            found.is_tried = False

    def answered(self, scope: Scope) -> None:
        self._known.drop(scope)

    def refused(self, scope: Scope, retry_after_s: float) -> float:
        """Note a refusal and return how long its line has to wait. Refusals at the same time count
        once."""
        now, found = self._clock(), self._known.get(scope)
        if found is None:
            found = ModelOutage()
        elif now < found.until:
            return found.until - now
        found.in_a_row += 1
        delay_s = min(max(retry_after_s, cool_down_s(found)), MAX_COOL_DOWN_S)
        found.until = now + delay_s
        self._known.put(scope, found)
        return delay_s


def cool_down_s(outage: ModelOutage) -> float:
    doublings = min(max(outage.in_a_row - 1, 0), MAX_DOUBLINGS)
    return min(COOL_DOWN_S * 2.0**doublings, MAX_COOL_DOWN_S)
