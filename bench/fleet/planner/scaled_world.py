"""Simulates replicas that come and go: a scaler looks now and then and says how many it wants.

A replica takes up a device from when it is started, serves `start_s` later with an empty cache, and
leaves once it has ended what it runs. Those that were started last leave first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.fleet.ours import PredictedTime
from bench.fleet.trace import TracedRequest
from bench.fleet.world import NUM_WORKERS, FleetSetup, FleetWorld, RequestFate, SimulatedReplica
from engine.protocol import ReplicaStatus
from gateway.fleet.predicted_time import Prompt
from gateway.fleet.sent_work import AskedWork
from gateway.lanes import Slo


class ScaledSetup(FleetSetup, frozen=True, kw_only=True):
    """The settings of replicas that come and go. `num_replicas`: there are so many at the begin."""

    slo: Slo
    start_s: float = 30.0
    most: int = 32
    """Devices there are."""


class Scaler(Protocol):
    """Decides how many replicas there are to be."""

    interval_s: float

    def wanted(self, now_s: float, world: ScaledWorld) -> int: ...


@dataclass(slots=True)
class Stay:
    """The time of a replica on its device."""

    began_s: float
    serves_at_s: float
    replica: SimulatedReplica | None = None
    """None: it starts."""
    left_s: float = math.inf


class CountedRouting(PredictedTime):
    """Routes as shipped, refuses what would come too late, and counts what is asked as gateways
    do."""

    def __init__(self, world: FleetWorld, slo: Slo) -> None:
        super().__init__(world, random.Random(1), slo)
        for views in self.views:  # it meets replicas as they come
            views.clear()
        self.serving.clear()
        self.asked = AskedWork()
        self.statuses: dict[int, ReplicaStatus] = {}
        """The last word of each replica that serves."""

    def heard(self, replica: int, status: ReplicaStatus, now_s: float) -> None:
        super().heard(replica, status, now_s)
        self.statuses[replica] = status

    def note(self, prompt: Prompt, prompt_s: float, *, is_late: bool) -> None:
        self.asked.note("interactive", prompt_s, tokens=prompt.missing, is_late=is_late)


class ScaledWorld(FleetWorld):
    """Replicas that a scaler has started and ended."""

    def __init__(self, setup: ScaledSetup) -> None:
        super().__init__(setup)
        self.scaled = setup
        self.stays: list[Stay] = []
        self.most_there = setup.num_replicas
        self._there: list[Stay] = []
        """Those that serve or start, in the order in which they were started."""
        self._leaving: list[Stay] = []
        self.routing = CountedRouting(self, setup.slo)

    @property
    def num_there(self) -> int:
        """Return how many serve or start."""
        return len(self._there)

    @property
    def num_serving(self) -> int:
        return sum(each.replica is not None for each in self._there)

    def run_scaled(self, requests: Sequence[TracedRequest], scaler: Scaler) -> list[RequestFate]:
        """Run a trace until all is answered."""
        for _ in range(self.scaled.num_replicas):
            self._start(0.0, 0.0)
        looks_at_s = 0.0
        for number, asked in enumerate(requests):
            while looks_at_s <= asked.arrival_s:
                self._advance_to(looks_at_s)
                self._resize(scaler.wanted(looks_at_s, self), looks_at_s)
                looks_at_s += scaler.interval_s
            self._advance_to(asked.arrival_s)
            fate = RequestFate(asked, number % NUM_WORKERS, came_s=asked.arrival_s)
            self.fates.append(fate)
            chosen = self.routing.choose(fate, asked.arrival_s)
            if chosen is not None:
                fate.replica = chosen
                self.replicas[chosen].add(fate)
        for replica in self.replicas:
            replica.run(math.inf)
        return self.fates

    @property
    def replica_s(self) -> float:
        """Return for how long devices were taken, all together, until the last request came."""
        end_s = self.fates[-1].asked.arrival_s
        return sum(max(0.0, min(each.left_s, end_s) - each.began_s) for each in self.stays)

    def _advance_to(self, now_s: float) -> None:
        for stay in self._there:
            if stay.replica is None and stay.serves_at_s <= now_s:
                self._serve(stay)
        for stay in [*self._there, *self._leaving]:
            if stay.replica is not None:
                stay.replica.run(now_s)
                self._tell_begun(stay.replica, self.routing, now_s)
        for stay in self._leaving:
            if stay.replica is not None and not stay.replica.is_busy:
                stay.left_s = max(stay.left_s, stay.replica.now_s)
        self._leaving = [each for each in self._leaving if each.replica and each.replica.is_busy]

    def _start(self, now_s: float, start_s: float) -> None:
        stay = Stay(now_s, now_s + start_s)
        self.stays.append(stay)
        self._there.append(stay)
        if start_s == 0:
            self._serve(stay)

    def _serve(self, stay: Stay) -> None:
        number = len(self.replicas)
        stay.replica = SimulatedReplica(number, self.setup, self.routing)
        stay.replica.now_s = stay.serves_at_s
        self.replicas.append(stay.replica)
        self.routing.meet(number)
        self.routing.heard(number, stay.replica.status(), stay.serves_at_s)

    def _resize(self, wanted: int, now_s: float) -> None:
        wanted = max(1, min(self.scaled.most, wanted))
        while self.num_there < wanted:
            self._start(now_s, self.scaled.start_s)
        self.most_there = max(self.most_there, self.num_there)
        while self.num_there > wanted:
            stay = self._there.pop()
            stay.left_s = now_s
            if stay.replica is not None:
                self.routing.serving.remove(stay.replica.number)
                self.routing.statuses.pop(stay.replica.number, None)
                self._leaving.append(stay)
