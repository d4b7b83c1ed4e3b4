"""Decides how long a generation stays at an engine that is to be taken away: one that is drained,
or that the settings of its model name no more.

It ends there what it can within a time. What lasts longer goes on at another engine of its model,
lane by lane, batch last, and spread over some seconds, as each has to compute its prompt again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from engine.fairness import LANE_RANKS
from engine.protocol import Lane
from gateway.fleet.replica import HeardReplica, ResumingReplica, ViewedReplica, is_viewed
from gateway.fleet.router import Fleet, Route

STAGGER_S = 5.0
"""The generations of one lane leave within so many seconds, then those of the next lane."""


class HeldRoutes:
    """The routes that a generation holds: that of the replica at which it runs, and while it goes
    on elsewhere that of the one before, whose last word on what it used is still to come."""

    def __init__(self, route: Route) -> None:
        self._held: tuple[Route, ...] = (route,)

    @property
    def route(self) -> Route:
        return self._held[-1]

    def move_to(self, route: Route) -> None:
        """Hold a route as well, in which it is to go on."""
        if route is not self.route:
            self._held = (self.route, route)

    def settle_in(self, route: Route) -> None:
        """Hold this one alone."""
        self._held = (route,)


class EngineStay:
    """The stay of one attempt at an engine. `held`: the routes of its generation, of which those
    that it needs no more are let go here. `timeout_s`: how long it may stay from when it is seen
    that the engine is to be taken away. `clock`: monotonic seconds."""

    def __init__(
        self,
        fleet: Fleet,
        held: HeldRoutes,
        replica: ViewedReplica,
        lane: Lane,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._fleet, self._held, self._replica, self._clock = fleet, held, replica, clock
        turn = LANE_RANKS[lane] + (rng or random).random()
        self._longest_s = timeout_s + STAGGER_S * turn
        self._leaves_since: float | None = None

    def look(self) -> bool:
        """Look at what the engine is to its model now, and tell whether to go on elsewhere: its
        time is over, and another engine of the same model serves."""
        route = self._fleet.route_of(self._held.route.model)
        if route is None or not route.replicas:
            return False
        view, engines = self._replica.view, filter(is_viewed, route.replicas)
        here = next((each for each in engines if each.view is view), None)
        if here is not None:
            self._held.settle_in(route)
            if not here.is_drained:
                self._leaves_since = None
                return False
        now_s = self._clock()
        if self._leaves_since is None:
            self._leaves_since = now_s
        if now_s - self._leaves_since < self._longest_s:
            return False
        return any(map(self._may_take_it, self._fleet.others(route, view)))

    def _may_take_it(self, other: ViewedReplica) -> bool:
        if isinstance(other, HeardReplica) and other.is_silent:
            return False
        model, here = identity_of(other), self._replica
        return (
            model is not None and model == identity_of(here) and other.is_prefill == here.is_prefill
        )


def identity_of(replica: ViewedReplica) -> str | None:
    return replica.model_identity if isinstance(replica, ResumingReplica) else None
