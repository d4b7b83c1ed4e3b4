"""Finds another engine for requests that wait at one, whenever that one says something.

Who decides is `gateway.fleet.moving`; here it meets the fleet as it is then: a request may move to
an engine that was not there when it came. What is to move its engine is asked for, which alone
knows whether anything of it has run, and whoever runs the request (`moving`) sends it on.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable

from engine.fairness import LANE_RANKS
from gateway.fleet.engine_view import EngineView
from gateway.fleet.moving.waiting_requests import WaitingRequest, WaitingRequests, undercuts
from gateway.fleet.replica import (
    HeardReplica,
    PreparedRequest,
    RepeatableReplica,
    Replica,
    is_viewed,
)
from gateway.fleet.router import Fleet, Route, RoutedRequest
from gateway.fleet.routing import Candidate, Choice, explain
from gateway.lanes import Priority

log = logging.getLogger(__name__)


class MovableRequest:
    """A request that waits at a replica. `served_by`: the model that its route serves."""

    __slots__ = (
        *("asked_at_s", "attempt_id", "left_s", "prepared", "priority", "replica"),
        *("route", "served_by", "target"),
    )

    def __init__(
        self,
        served_by: str,
        replica: RepeatableReplica,
        attempt_id: str,
        prepared: PreparedRequest,
        priority: Priority,
    ) -> None:
        self.served_by, self.replica, self.attempt_id = served_by, replica, attempt_id
        self.prepared, self.priority = prepared, priority
        self.route: Route | None = None
        """Held for as long as a replica of it is to be used."""
        self.target: RoutedRequest | None = None
        """The request as it would go elsewhere, once its engine was asked to give it back."""
        self.left_s = self.asked_at_s = 0.0
        """The seconds that it had left then where it waited, and the clock of its engine's view."""


Waiting = WaitingRequest[MovableRequest]


class RequestMover:
    """Moves requests of one process that wait at engines. `clock`: monotonic seconds."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._fleet = fleet
        self._waiting: WaitingRequests[MovableRequest] = WaitingRequests(clock, rng)

    def watch(
        self,
        route: Route,
        routed: RoutedRequest,
        attempt_id: str,
        prepared: PreparedRequest,
        priority: Priority,
    ) -> Waiting | None:
        """Look out for another engine for a request that was just sent to the first replica, until
        `forget`. None: nothing waits there before it, or it has to stay."""
        first = routed.replicas[0]
        if route.has_roles or not is_viewed(first) or first.view.is_free(LANE_RANKS[routed.lane]):
            return None
        if first.cell is not None:
            return None
        if not isinstance(first, RepeatableReplica) or not first.may_repeat(prepared):
            return None
        request = MovableRequest(route.model, first, attempt_id, prepared, priority)
        waiting = WaitingRequest(request, first.view, routed.lane, priority.tenant, routed.place)
        self._waiting.enter(waiting)
        first.view.on_heard = self._heard
        return waiting

    def forget(self, waiting: Waiting) -> None:
        """Idempotent."""
        self._waiting.leave(waiting)

    def _heard(self, view: EngineView) -> None:
        """Look for requests that wait at an engine which has said something. What goes wrong there
        is no matter of its connection, which all of its requests share."""
        try:
            for waiting in self._waiting.look(view, self._least_s):
                self._consider(waiting)
        except Exception:
            log.exception("cannot look where requests could move")

    def _least_s(self, waiting: Waiting) -> float:
        route = self._fleet.route_of(waiting.key.served_by)
        others = () if route is None else self._fleet.others(route, waiting.view)
        rank, now_s = LANE_RANKS[waiting.lane], waiting.view.clock()
        return min((each.view.predict(0.0, rank, now_s) for each in others), default=math.inf)

    def _consider(self, waiting: Waiting) -> None:
        """Ask for a request back if another engine would say its first token much sooner."""
        request, left_s = waiting.key, waiting.left_s
        route = self._fleet.route_of(request.served_by)
        others = () if route is None else self._fleet.others(route, waiting.view)
        there = [each for each in others if not is_silent(each)]
        if route is None or route.has_roles or not there:
            return
        found = self._fleet.choose(route, there, request.prepared, request.priority)
        if found.predicted_s is None or not undercuts(found.predicted_s, left_s):
            return
        request.route, request.target, request.left_s = route, found, left_s
        request.asked_at_s = waiting.view.clock()
        self._waiting.move(waiting)
        found.send()
        request.replica.take_back(request.attempt_id)


def is_silent(replica: Replica) -> bool:
    return isinstance(replica, HeardReplica) and replica.is_silent


def explain_move(source: str, request: MovableRequest) -> str:
    """Say where a request moves and why, as `gateway.fleet.routing.explain` does of a choice.
    `source`: the name of the replica at which it waited."""
    found = request.target
    assert found is not None and found.error is not None and found.predicted_s is not None
    factor = found.error.factor
    choice = found.choice
    if choice is None:
        cached = 0 if found.prompt is None else found.prompt.cached
        choice = Choice((0,), "least_work", (Candidate(factor * found.predicted_s, cached),))
    there = explain(choice, [each.name for each in found.replicas]).partition(", ")[2]
    number = source.rpartition("/")[2]
    return f"moved, from {number} with {factor * request.left_s:.3g} s left, {there}"
