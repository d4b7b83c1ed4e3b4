"""Decide how many replicas there are to be: the shipped planner, and those that it is held
against."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from bench.fleet.planner.scaled_world import ScaledSetup, ScaledWorld
from bench.fleet.trace import TracedRequest
from bench.sim.cost import Cost
from gateway.fleet.planner.decision import Decision, PastNeed, PoolBounds, decide
from gateway.fleet.planner.model_watch import Learnt, ModelWatch

PLAN_EVERY_S = 5.0
"""`[fleet.planner] interval_s`."""
SYNC_S = 15.0
"""Kubernetes' horizontal pod autoscaler looks so often."""
STABLE_S = 300.0
"""Its window of stabilization before it takes pods away."""
MOST_GROWTH = 4
"""It starts so many pods at a look, or as many as there are."""


class FixedNumber:
    """Wants as many always."""

    interval_s = math.inf

    def __init__(self, number: int) -> None:
        self._number = number

    def wanted(self, now_s: float, world: ScaledWorld) -> int:
        return self._number


class ShippedPlanner:
    """`gateway.fleet.planner` but for what it does with processes: forecast, sizing and decision.
    As there each replica that starts is a change of its own, those that are not needed any more are
    broken off first, and a replica takes as long to start as the last one did. `learnt`: of a day
    before."""

    interval_s = PLAN_EVERY_S

    def __init__(self, bounds: PoolBounds, begin: int, learnt: Learnt | None = None) -> None:
        self.watch = ModelWatch(0.0, learnt)
        self.decisions: list[Decision] = []
        self._bounds = bounds
        self._starting: list[float] = []
        """When each of those was begun that do not serve yet."""
        self._past: tuple[PastNeed, ...] = (PastNeed(0.0, begin),)

    def wanted(self, now_s: float, world: ScaledWorld) -> int:
        there = world.num_there
        while len(self._starting) > there - world.num_serving:
            self.watch.start_s = now_s - self._starting.pop(0)
            self.watch.grew(now_s)
        routing = world.routing
        asked, statuses = routing.asked.by_column(), [*routing.statuses.values()]
        seen = self.watch.observe(now_s, there, asked, statuses)
        decision = decide(seen, self._bounds, self._past)
        self._past = decision.past
        self.decisions.append(decision)
        if decision.wanted > there:
            self._starting += [now_s] * (decision.wanted - there)
            self.watch.grew(now_s)
        else:
            del self._starting[max(0, decision.wanted - world.num_serving) :]
        return decision.wanted


class ReactiveScaler:
    """Kubernetes' horizontal pod autoscaler on requests in flight for each replica, by its
    published rules: at every look as many pods as bring the metric to its target, at once more,
    fewer by the largest wish of the last five minutes."""

    interval_s = SYNC_S

    def __init__(self, target: float) -> None:
        self._target = target
        self._wishes: deque[tuple[float, int]] = deque()

    def wanted(self, now_s: float, world: ScaledWorld) -> int:
        statuses = world.routing.statuses.values()
        in_flight = sum(each.num_running + each.num_waiting for each in statuses)
        wish = max(1, math.ceil(in_flight / self._target))
        there = world.num_there
        if abs(in_flight / self._target / there - 1) <= 0.1:
            wish = there
        self._wishes.append((now_s, wish))
        while self._wishes[0][0] <= now_s - STABLE_S:
            self._wishes.popleft()
        stable = max(number for _, number in self._wishes)
        return min(wish, there + max(MOST_GROWTH, there)) if wish > there else min(there, stable)


class Clairvoyant:
    """Knows the work of each window of the trace, and starts replicas so that they serve when it
    begins. `busy`: the part of their time that it lets them work. A window counts with all that an
    infinite cache would have of its prompts."""

    interval_s = 1.0

    def __init__(
        self, requests: Sequence[TracedRequest], setup: ScaledSetup, window_s: float, busy: float
    ) -> None:
        self._window_s, self._start_s = window_s, setup.start_s
        works = work_by_window(requests, setup.cost, window_s)
        self._numbers = [max(1, math.ceil(each / (window_s * busy))) for each in works]

    def wanted(self, now_s: float, world: ScaledWorld) -> int:
        return self.number(now_s)

    def number(self, now_s: float) -> int:
        first = int(now_s // self._window_s)
        last = int((now_s + self._start_s) // self._window_s)
        return max(self._numbers[first : last + 1], default=1)


def work_by_window(requests: Sequence[TracedRequest], cost: Cost, window_s: float) -> list[float]:
    """Return the seconds of one replica's work that come in each window."""
    works = [0.0] * (int(requests[-1].arrival_s // window_s) + 1)
    known = set[int]()
    for each in requests:
        found = 0
        for block in each.hash_ids[:-1]:
            if block not in known:
                break
            found += 512
        known.update(each.hash_ids)
        work_s = cost.request_s(each.input_length, each.output_length, cached=found)
        works[int(each.arrival_s // window_s)] += work_s
    return works
