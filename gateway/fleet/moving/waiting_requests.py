"""Decides which requests that wait at one engine are better off at another one of their model.

Pure; the clock is given. A request is looked at when the engine at which it waits says something,
and is to move where another engine's prediction undercuts what is left of its wait by a factor and
by some seconds. Whether nothing of it has run the engine itself knows: it is asked to give it back.

Nothing moves in herds: what moves is counted at its new engine before the next one is looked at, by
all workers; each look takes at most one request of a tenant, in the order in which they would be
served; looks of several workers fall on different statuses, and a worker moves a bounded number a
second. A request moves once, so none goes back and forth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from engine.fairness import LANE_RANKS
from engine.protocol import Lane
from gateway.fleet.engine_view import EngineView

UNDERCUT = 2.0
"""A request moves if its wait will last more than so many times what another engine would take,"""
LEAST_GAIN_S = 0.25
"""and longer than it by so much: one that moves is told to two engines and two books."""
LOOK_S = 0.1
"""Between two looks of a worker at one engine, on average."""
MOST_ASKED = 8
"""Requests for which a look asks what another engine would take: each costs a prediction."""
MOVES_PER_S, MOST_SAVED = 20.0, 10.0
"""The moves of a worker, and how many may be saved up."""

K = TypeVar("K")


class WaitingRequest(Generic[K]):
    """A request that was sent to an engine at which others wait. `place`: as `EngineView.send`
    returned it."""

    __slots__ = ("is_asked", "key", "lane", "place", "tenant", "view")

    def __init__(self, key: K, view: EngineView, lane: Lane, tenant: str, place: float) -> None:
        self.key, self.view, self.lane, self.tenant = key, view, lane, tenant
        self.place = place
        self.is_asked = False
        """Its engine is asked to give it back, which happens once."""

    @property
    def left_s(self) -> float:
        """Return the seconds until its first token, as far as is known."""
        return self.view.left_s(LANE_RANKS[self.lane], self.place)


class WaitingRequests(Generic[K]):
    """The requests of one worker that wait at engines. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], rng: random.Random | None = None) -> None:
        self._clock, self._rng = clock, rng or random.Random()
        self._at: dict[EngineView, dict[WaitingRequest[K], None]] = {}
        """By the engine at which they wait, in the order in which they were sent."""
        self._looks_at: dict[EngineView, float] = {}
        self._saved, self._saved_at = MOST_SAVED, clock()

    def enter(self, waiting: WaitingRequest[K]) -> None:
        self._at.setdefault(waiting.view, {})[waiting] = None

    def leave(self, waiting: WaitingRequest[K]) -> None:
        """Forget a request: it waits no longer. Idempotent."""
        here = self._at.get(waiting.view)
        if here is None:
            return
        here.pop(waiting, None)
        if not here:
            del self._at[waiting.view]
            self._looks_at.pop(waiting.view, None)

    def look(
        self, view: EngineView, least_s: Callable[[WaitingRequest[K]], float]
    ) -> Iterator[WaitingRequest[K]]:
        """Yield requests that wait at an engine and may be better off elsewhere, if it is time for
        a look. Whoever moves one says so by `move` before it takes the next. `least_s`: returns
        the seconds in which no other engine says the first token of a request, whatever its
        prompt."""
        here, now_s = self._at.get(view), self._clock()
        if here is None or now_s < self._looks_at.get(view, 0.0):
            return
        self._looks_at[view] = now_s + self._rng.uniform(0.5, 1.5) * LOOK_S
        moved, num_asked = set[tuple[Lane, str]](), 0
        least: dict[Lane, float] = {}
        for waiting in sorted(here, key=lambda each: LANE_RANKS[each.lane]):
            lane = waiting.lane
            if waiting.is_asked or (lane, waiting.tenant) in moved:
                continue
            if lane not in least:
                least[lane] = least_s(waiting)
            if not undercuts(least[lane], waiting.left_s):
                continue
            if num_asked >= MOST_ASKED or not self._may_move():
                return
            num_asked += 1
            yield waiting
            if waiting.is_asked:
                moved.add((lane, waiting.tenant))
                least.clear()

    def move(self, waiting: WaitingRequest[K]) -> None:
        """Note that its engine is asked to give a request back."""
        waiting.is_asked = True
        self._saved -= 1.0

    def _may_move(self) -> bool:
        now_s = self._clock()
        more = MOVES_PER_S * (now_s - self._saved_at)
        self._saved, self._saved_at = min(MOST_SAVED, self._saved + more), now_s
        return self._saved >= 1.0


def undercuts(there_s: float, left_s: float) -> bool:
    """Tell whether a request that has so many seconds left where it waits is to move to an engine
    that would take `there_s`."""
    return left_s > UNDERCUT * there_s and left_s - there_s > LEAST_GAIN_S
