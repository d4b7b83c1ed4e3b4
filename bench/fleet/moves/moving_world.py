"""Simulates replicas among which requests that wait are moved, and that join, become slow or hang.

The moves are decided by the shipped code (`gateway.fleet.moving`), each worker by itself.
"""

from __future__ import annotations

import math
import random
from typing import cast

import msgspec

from bench.fleet.ours import PredictedTime
from bench.fleet.trace import BLOCK_TOKENS
from bench.fleet.world import NUM_WORKERS, FleetSetup, FleetWorld, RequestFate, Router
from engine.fairness import LANE_RANKS
from engine.protocol import Lane, ReplicaStatus
from gateway.fleet.moving.waiting_requests import (
    WaitingRequest,
    WaitingRequests,
    undercuts,
)
from gateway.fleet.predicted_time import Prompt
from gateway.fleet.routing import candidates_of, choose
from gateway.lanes import Slo

LANE: Lane = "interactive"
SLICE_S = 0.05
"""How often workers take in what replicas said."""
NUM_TENANTS = 8


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """The trouble of the last replica. Times are virtual seconds; infinity: it does not."""

    joins_s: float = 0.0
    slow_from_s: float = math.inf
    slow_until_s: float = math.inf
    times_slower: float = 4.0
    hangs_from_s: float = math.inf
    hangs_until_s: float = math.inf


class MovingWorld(FleetWorld):
    """Replicas of which the last one has some trouble."""

    def __init__(self, setup: FleetSetup, trouble: Trouble) -> None:
        super().__init__(setup)
        self.trouble = trouble

    def _run_until(self, now_s: float, router: Router) -> None:
        ours = cast("MovingRouter", router)
        while self._now_s < now_s:
            until_s = min(now_s, self._now_s + SLICE_S)
            if math.isinf(now_s) and not any(each.is_busy for each in self.replicas):
                return
            self._befall(ours)
            for replica in self.replicas:
                if replica is self.replicas[-1] and self._hangs:
                    continue
                replica.run(until_s)
                self._tell_begun(replica, router, until_s)
            self._now_s = until_s
            ours.move(until_s)

    @property
    def _hangs(self) -> bool:
        return self.trouble.hangs_from_s <= self._now_s < self.trouble.hangs_until_s

    def _befall(self, router: MovingRouter) -> None:
        trouble, last, now_s = self.trouble, self.replicas[-1], self._now_s
        is_there = now_s >= trouble.joins_s
        if is_there and last.number not in router.serving:
            router.serving.append(last.number)
            last.now_s = max(last.now_s, now_s)
            router.heard(last.number, last.status(), now_s)
        slow = trouble.slow_from_s <= now_s < trouble.slow_until_s
        last.times_slower = trouble.times_slower if slow else 1.0
        if self._hangs:
            last.now_s = max(last.now_s, trouble.hangs_until_s)


class MovingRouter(PredictedTime):
    """Routes as shipped, and moves what waits. `moves`: False: nothing is moved."""

    def __init__(
        self,
        world: MovingWorld,
        rng: random.Random,
        slo: Slo | None = None,
        *,
        moves: bool = True,
    ) -> None:
        super().__init__(world, rng, slo)
        self._moves, self.num_moved = moves, 0
        if world.trouble.joins_s:
            self.serving.remove(world.setup.num_replicas - 1)
        self.waiting = [
            WaitingRequests[RequestFate](lambda: self.now_s, rng) for _ in range(NUM_WORKERS)
        ]
        self._entries: dict[int, WaitingRequest[RequestFate]] = {}
        self._heard: set[int] = set()

    def heard(self, replica: int, status: ReplicaStatus, now_s: float) -> None:
        super().heard(replica, status, now_s)
        if self._moves:
            self._heard.add(replica)

    def choose(self, fate: RequestFate, now_s: float) -> int | None:
        chosen = super().choose(fate, now_s)
        view = None if chosen is None else self.views[fate.worker][chosen]
        if view is not None and self._moves and not view.is_free(LANE_RANKS[LANE]):
            tenant = str(hash(fate.asked.hash_ids[-1]) % NUM_TENANTS)
            entry = WaitingRequest(fate, view, LANE, tenant, fate.place)
            self._entries[id(fate)] = entry
            self.waiting[fate.worker].enter(entry)
        return chosen

    def began(self, fate: RequestFate) -> None:
        super().began(fate)
        if (entry := self._entries.pop(id(fate), None)) is not None:
            self.waiting[fate.worker].leave(entry)

    def move(self, now_s: float) -> None:
        self.now_s = max(self.now_s, now_s)
        heard, self._heard = self._heard, set()
        for number in sorted(heard):
            for worker in range(NUM_WORKERS):
                self._look(worker, number)

    def _look(self, worker: int, number: int) -> None:
        views, waiting = self.views[worker], self.waiting[worker]
        others = [at for at in self.serving if at != number]
        if not others:
            return

        def least_s(_: WaitingRequest[RequestFate]) -> float:
            return min(views[at].predict(0.0, LANE_RANKS[LANE], self.now_s) for at in others)

        for entry in waiting.look(views[number], least_s):
            fate = entry.key
            asked = fate.asked
            found = [views[at] for at in others]
            cached = [
                BLOCK_TOKENS * self.world.replicas[at].cache.cached_blocks(asked.hash_ids)
                for at in others
            ]
            candidates = candidates_of(found, asked.input_length, cached, LANE, fetches=False)
            best = choose(candidates).order[0]
            if not undercuts(candidates[best].predicted_s, entry.left_s):
                continue
            waiting.move(entry)
            prompt = Prompt.of(asked.input_length, candidates[best].cached)
            found[best].send(prompt, LANE)
            if not self.world.replicas[number].give_back(fate):
                continue
            waiting.leave(entry)
            self.num_moved += 1
            fate.replica, fate.came_s = others[best], self.now_s
            self.world.replicas[others[best]].add(fate)
