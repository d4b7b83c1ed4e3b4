"""The planner of a home: looks at each model with a range of engines, decides how many it has
(`decision`, `packing`), and has them started and ended by who runs engines: this home, or the
StatefulSet whose pods they are (`pod_pool`).

It runs beside the supervisor's other work, on no request's path: while it fails or is late there
are as many engines as there were. One change is under way at a time; looking goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.protocol import ReplicaStatus
from engine.transport.client import EngineClient
from foundation.periodic import Periodic
from foundation.tasks import TaskSet
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.planner.decision import (
    Decision,
    PastNeed,
    PoolBounds,
    PoolObservation,
    Reason,
    decide,
)
from gateway.fleet.planner.machine import Machine
from gateway.fleet.planner.model_watch import Learnt, ModelWatch
from gateway.fleet.planner.packing import Footprint, PoolClaim, PoolShare, pack
from gateway.fleet.planner.pod_pool import PodPool
from gateway.fleet.planner.scale_api import ScaleApi
from gateway.fleet.planner.view import (
    MAX_CHANGES,
    GivenReason,
    PlannedChange,
    PlannedModel,
    PlannerView,
)
from gateway.fleet.sent_work import AskedWork
from gateway.home import Home
from gateway.settings.file import PlannerConfig
from gateway.settings.kubernetes import KubernetesConfig
from gateway.settings.load import Settings
from gateway.settings.models import ModelConfig

log = logging.getLogger(__name__)

LOOK_FOR_SLEEPERS_S = 0.25
"""How often it is looked whether somebody asks for a model that is at zero."""
RETRY_MIN_S, RETRY_MAX_S = 30.0, 600.0
"""A model whose engine does not start is left alone for so long; each failure doubles it."""
KEEP_EVERY_S = 60.0
"""How often what was learnt is written, and the engines' memory measured."""
MEMORY_SHARE = 0.95
"""The part of the machine's memory that engines may take together."""

Scale = Callable[[Mapping[str, int], Mapping[str, float | None]], Awaitable[str]]
"""Has models have so many engines; of those that get none, how long a start takes. Returns why it
cannot be; empty: it is done."""
Note = Callable[[PlannedChange], Coroutine[Any, Any, None]]
"""Puts a change into the audit log."""


class _Pool:
    """Keeps what the planner knows of one model. `asked`: what is asked of it in this home.
    `running`: replicas that it has, which count as needed until now: nobody knows yet."""

    def __init__(self, asked: AskedWork, now_s: float, running: int, learnt: Learnt | None) -> None:
        self.asked = asked
        self.watch = ModelWatch(now_s, learnt)
        self.past: tuple[PastNeed, ...] = (PastNeed(now_s, running),)
        self.failures = 0
        self.not_before_s = -math.inf
        self.problem = ""
        self.shown: int | None = None
        """The number that a dry run said last."""
        self.is_counted = False
        """The number of its pods has counted as needed until then."""
        self.growing: tuple[float, int] | None = None
        """The time since which so many pods are wanted, some of which have not joined yet."""


class Planner:
    """`settings`: those in force now. `scale_api`: how a StatefulSet is scaled. `clock`: Unix
    seconds."""

    def __init__(
        self,
        home: Home,
        settings: Callable[[], Settings],
        scale: Scale,
        note: Note,
        machine: Machine,
        *,
        scale_api: Callable[[KubernetesConfig], ScaleApi] = ScaleApi,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._home, self._settings, self._clock = home, settings, clock
        self._scale, self._note, self._machine = scale, note, machine
        self._scale_api = scale_api
        self._pools: dict[str, _Pool] = {}
        self._pods: dict[str, PodPool] = {}
        self._marks: DrainMarks | None = None
        self._clients: dict[str, EngineClient] = {}
        self._learnt = _read_learnt(home.planner_learnt)
        self._kept_at_s = -math.inf
        self._changes: deque[PlannedChange] = deque(maxlen=MAX_CHANGES)
        self._tasks = TaskSet()
        self._acting: asyncio.Task[None] | None = None
        self._looking = Periodic(
            "planner", self._until_next, self.round, log=log, failure="nothing is planned"
        )

    async def run(self) -> None:
        """Plan until cancelled."""
        try:
            await self._looking.run()
        finally:
            await self._tasks.close()
            await asyncio.gather(*(client.close() for client in self._clients.values()))
            if self._marks is not None:
                self._marks.close()

    async def round(self) -> None:
        """Look once, decide, and begin one change."""
        settings, now_s = self._settings(), self._clock()
        config = settings.fleet.planner
        models = [each for each in settings.models if each.planned_range is not None]
        await self._follow(models if config.mode != "off" else [], now_s)
        if config.mode == "off" or not models:
            self._home.planner_view.unlink(missing_ok=True)
            for model in models:
                if model.is_asleep:  # nobody would wake it
                    await self._scale({model.name: 1}, {})
            return
        models = [each for each in models if self._is_known(each, now_s)]
        seen = {each.name: self._observe(each, now_s) for each in models}
        decisions = {
            each.name: self._decide(each, seen[each.name], settings, config) for each in models
        }
        packed = self._pack(models, decisions, seen, settings.models)
        self._show(config, models, decisions, seen, packed)
        self._keep(models, now_s)
        if self._acting is None or self._acting.done():
            self._begin_change(config, models, decisions, packed, now_s)

    async def until_done(self) -> None:
        """Wait for the change that is under way, if one is."""
        if self._acting is not None:
            await asyncio.wait({self._acting})

    def _until_next(self) -> float:
        interval_s = self._settings().fleet.planner.interval_s
        sleeps = any(each.is_asleep for each in self._settings().models)
        return min(interval_s, LOOK_FOR_SLEEPERS_S) if sleeps else interval_s

    async def _follow(self, models: Sequence[ModelConfig], now_s: float) -> None:
        """Hear the engines of these models, and of no others."""
        for model in models:
            if model.name not in self._pools:
                asked = AskedWork(self._home.asked_of(model.name), adds=False)
                self._pools[model.name] = _Pool(
                    asked, now_s, len(model.started), self._learnt.get(model.name)
                )
        names = {each.name for each in models}
        self._pools = {name: pool for name, pool in self._pools.items() if name in names}
        self._follow_pods(models)
        wanted = {address for each in models for address in each.started}
        wanted |= {
            address
            for each in models
            if each.kubernetes is not None
            for address in each.joined
            if Path(address.removeprefix("unix:")).exists()  # somebody has joined there
        }
        for address in wanted - self._clients.keys():
            client = self._clients[address] = EngineClient(address)
            client.start()
        gone = [self._clients.pop(address) for address in self._clients.keys() - wanted]
        await asyncio.gather(*(client.close() for client in gone))

    def _follow_pods(self, models: Sequence[ModelConfig]) -> None:
        """Look after the pods of these models, and of no others."""
        pods = {}
        for model in models:
            if (config := model.kubernetes) is None:
                continue
            found = self._pods.get(model.name)
            if found is None or found.config != config:
                if self._marks is None:
                    self._marks = DrainMarks(self._home.drain_marks)
                api, folder = self._scale_api(config), self._home.join
                found = PodPool(config, api, folder, self._marks, self._is_idle)
                self._pools[model.name].is_counted = False
            pods[model.name] = found
            if found.is_due:
                self._tasks.spawn(found.look(model), name=f"look at pods of {model.name}")
        for name, each in self._pods.items():
            if pods.get(name) is not each:
                each.release()
        self._pods = pods

    def _is_known(self, model: ModelConfig, now_s: float) -> bool:
        """Tell whether anything can be decided: of pods it has to be known how many there are, or
        why that is not known."""
        pods, pool = self._pods.get(model.name), self._pools[model.name]
        if pods is None:
            return True
        if pods.replicas is not None and not pool.is_counted:
            pool.past, pool.is_counted = (PastNeed(now_s, pods.replicas),), True
        if pool.growing is not None and self._num_connected(model) >= pool.growing[1]:
            pool.watch.start_s = now_s - pool.growing[0]
            pool.watch.grew(now_s)
            pool.growing = None
        return pods.has_looked

    def _is_idle(self, address: str) -> bool:
        client = self._clients.get(address)
        if client is None or not client.connected:
            return True
        return not (client.status.num_running or client.status.num_waiting)

    def _num_connected(self, model: ModelConfig) -> int:
        found = (self._clients.get(each) for each in model.engines)
        return sum(client is not None and client.connected for client in found)

    def _running_of(self, model: ModelConfig) -> int:
        """Return how many engines it has, those that start counted: of pods, those wanted."""
        pods = self._pods.get(model.name)
        if pods is None:
            return len(model.started)
        return self._num_connected(model) if pods.replicas is None else pods.replicas

    def _observe(self, model: ModelConfig, now_s: float) -> PoolObservation:
        pool = self._pools[model.name]
        statuses: list[ReplicaStatus] = [
            client.status
            for address in (model.started if model.kubernetes is None else model.joined)
            if (client := self._clients.get(address)) is not None and client.connected
        ]
        return pool.watch.observe(now_s, self._running_of(model), pool.asked.by_column(), statuses)

    def _decide(
        self, model: ModelConfig, seen: PoolObservation, settings: Settings, config: PlannerConfig
    ) -> Decision:
        assert model.planned_range is not None
        bounds = PoolBounds(
            least=model.planned_range.least,
            most=model.planned_range.most,
            slo=settings.slos.of(model.name, "interactive"),
            target=settings.slo.target,
            cooldown_s=config.cooldown_s,
            idle_s=config.idle_s,
        )
        pool = self._pools[model.name]
        decision = decide(seen, bounds, pool.past)
        pool.past = decision.past
        return decision

    def _pack(
        self,
        models: Sequence[ModelConfig],
        decisions: Mapping[str, Decision],
        seen: Mapping[str, PoolObservation],
        beside: Sequence[ModelConfig],
    ) -> dict[str, PoolShare]:
        """Decide how many fit on this machine, of which pods take nothing."""
        machine, available = self._machine, self._machine.available_bytes()
        claims, resident_bytes = [], 0
        elsewhere = {name: PoolShare(decisions[name].wanted) for name in self._pods.keys() & seen}
        for model in models:
            if model.replica_range is None:
                continue
            watch = self._pools[model.name].watch
            running, decision = len(model.started), decisions[model.name]
            size = watch.engine_bytes or machine.expected_bytes(model, beside)
            resident_bytes += running * size
            work = seen[model.name].load.work_s
            busy = min(1.0, work / decision.wanted) if decision.wanted else 0.0
            claims.append(
                PoolClaim(
                    model=model.name,
                    each=Footprint(size, busy * machine.num_threads(model, beside)),
                    least=model.replica_range.least,
                    needed=decision.needed,
                    wanted=decision.wanted,
                    resident=running,
                    load=work,
                )
            )
        room = 2**62 if available is None else int(MEMORY_SHARE * (available + resident_bytes))
        return elsewhere | pack(claims, Footprint(room, float(machine.num_cores)))

    def _begin_change(
        self,
        config: PlannerConfig,
        models: Sequence[ModelConfig],
        decisions: Mapping[str, Decision],
        packed: Mapping[str, PoolShare],
        now_s: float,
    ) -> None:
        """Begin the change of one model: those that get fewer first, which makes room."""
        changes = []
        for model in models:
            before, after = self._running_of(model), packed[model.name].replicas
            pool = self._pools[model.name]
            makes_room = after < before and model.kubernetes is None
            if after == before:
                pool.shown, pool.problem = None, ""
            elif makes_room or now_s >= pool.not_before_s:
                changes.append((after - before, model, decisions[model.name]))
        if config.mode == "dry-run":
            for number, model, decision in changes:
                pool = self._pools[model.name]
                before = self._running_of(model)
                if pool.shown != before + number:
                    pool.shown = before + number
                    change = self._change(model, before + number, decision, is_done=False)
                    self._changes.appendleft(change)
                    self._tasks.spawn(self._note(change), name="note a decision")
            return
        if changes:
            number, model, decision = min(changes, key=lambda each: (each[0], each[1].name))
            after = self._running_of(model) + number
            change = self._change(model, after, decision, is_done=True)
            self._acting = self._tasks.spawn(self._act(model, change), name=f"scale {model.name}")

    def _change(
        self, model: ModelConfig, after: int, decision: Decision, *, is_done: bool
    ) -> PlannedChange:
        return PlannedChange(
            at=int(self._clock()),
            model=model.name,
            before=self._running_of(model),
            after=after,
            why=decision.why,
            is_done=is_done,
        )

    async def _act(self, model: ModelConfig, change: PlannedChange) -> None:
        pool, pods = self._pools[change.model], self._pods.get(change.model)
        began_s = self._clock()
        if change.after > change.before:
            pool.watch.grew(began_s)
        log.info("%s: %d -> %d, %s", change.model, change.before, change.after, change.why)
        if pods is None:
            wakes_in_s = {name: each.watch.start_s for name, each in self._pools.items()}
            pool.problem = await self._scale({change.model: change.after}, wakes_in_s)
        else:
            drain_s = self._settings().drain_timeout_s
            pool.problem = await pods.scale(model, change.before, change.after, drain_s)
        now_s = self._clock()
        if pool.problem:
            log.error("%s stays at %d: %s", change.model, change.before, pool.problem)
            pool.not_before_s = now_s + min(RETRY_MAX_S, RETRY_MIN_S * 2**pool.failures)
            pool.failures = min(pool.failures + 1, 16)
            why = f"{change.why}; not done: {pool.problem}"
            change = msgspec.structs.replace(change, why=why, is_done=False)
        else:
            pool.failures, pool.not_before_s = 0, -math.inf
            if pods is not None:
                grows = change.after > change.before
                pool.growing = (began_s, change.after) if grows else None
            elif change.after > change.before:
                pool.watch.start_s = now_s - began_s
                pool.watch.grew(now_s)
        self._changes.appendleft(change)
        await self._note(change)

    def _show(
        self,
        config: PlannerConfig,
        models: Sequence[ModelConfig],
        decisions: Mapping[str, Decision],
        seen: Mapping[str, PoolObservation],
        packed: Mapping[str, PoolShare],
    ) -> None:
        planned = []
        for model in models:
            decision, of, pool = decisions[model.name], seen[model.name], self._pools[model.name]
            assert model.planned_range is not None
            planned.append(
                PlannedModel(
                    model=model.name,
                    least=model.planned_range.least,
                    most=model.planned_range.most,
                    running=of.running,
                    wanted=packed[model.name].replicas,
                    reasons=[given(each) for each in decision.reasons],
                    rate=of.rate,
                    expected_rate=of.expected_rate,
                    work=of.load.work_s,
                    start_s=pool.watch.start_s,
                    problem=packed[model.name].problem or pool.problem or self._problem_of(model),
                )
            )
        view = PlannerView(
            mode=config.mode, at=int(self._clock()), models=planned, changes=[*self._changes]
        )
        view.write(self._home.planner_view)

    def _problem_of(self, model: ModelConfig) -> str:
        """Say what of a model's pods is not as it should be; empty: nothing, or it has none."""
        pods, number = self._pods.get(model.name), self._num_connected(model)
        if pods is None or pods.problem or pods.replicas is None:
            return "" if pods is None else pods.problem
        return f"{number} of {pods.replicas} have joined" if number < pods.replicas else ""

    def _keep(self, models: Sequence[ModelConfig], now_s: float) -> None:
        """Measure the engines and write what was learnt, now and then."""
        if now_s - self._kept_at_s < KEEP_EVERY_S:
            return
        self._kept_at_s = now_s
        for model in models:
            measured = [
                size
                for address in model.started
                if (size := self._machine.engine_bytes(address)) is not None
            ]
            if measured:
                self._pools[model.name].watch.engine_bytes = max(measured)
        self._learnt |= {name: pool.watch.learnt for name, pool in self._pools.items()}
        fresh = self._home.planner_learnt.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(self._learnt))
        fresh.replace(self._home.planner_learnt)


def given(reason: Reason) -> GivenReason:
    return GivenReason(reason.cause, reason.replicas, reason.text)


def _read_learnt(path: Path) -> dict[str, Learnt]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Learnt])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s is not read, all is learnt anew: %s", path, error)
        return {}
