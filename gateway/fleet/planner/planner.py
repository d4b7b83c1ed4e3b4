"""The planner of a home: looks at each model with a range of engines, decides how many it has
(`decision`, `packing`), and has them started and ended by who runs engines: this home, or the
StatefulSet whose pods they are (`pod_pool`).

It runs beside the supervisor's other work, on no request's path: while it fails or is late there
are as many engines as there were. Changes are under way side by side, and looking goes on: each
engine that starts serves once it is ready, whatever becomes of the others; one that is not needed
any more is broken off; and who gets fewer waits for nobody's start. `[fleet.planner]
starts_at_once` bounds how many start at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
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
from gateway.fleet.planner.scaling import EngineScaler, ScalingError
from gateway.fleet.planner.view import (
    MAX_CHANGES,
    GivenReason,
    PlannedChange,
    PlannedModel,
    PlannerView,
)
from gateway.fleet.sent_work import AskedWork
from gateway.home import Home
from gateway.settings.kubernetes import KubernetesConfig
from gateway.settings.load import Settings
from gateway.settings.models import ModelConfig
from gateway.settings.planner import PlannerConfig

log = logging.getLogger(__name__)

LOOK_FOR_SLEEPERS_S = 0.25
"""How often it is looked whether somebody asks for a model that is at zero."""
RETRY_MIN_S, RETRY_MAX_S = 30.0, 600.0
"""A model whose engine does not start is left alone for so long; each failure doubles it."""
KEEP_EVERY_S = 60.0
"""How often what was learnt is written, and the engines' memory measured."""
MEMORY_SHARE = 0.95
"""The part of the machine's memory that engines may take together."""

NOT_NEEDED = "it is not needed any more"
Note = Callable[[PlannedChange], Coroutine[Any, Any, None]]
"""Puts a change into the audit log."""


class _Start:
    """An engine that is started. `is_ready`: it is being put in force, and no longer broken off."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.is_ready = self.is_given_up = False
        self.task: asyncio.Task[None] | None = None

    def give_up(self) -> None:
        assert self.task is not None
        self.is_given_up = True
        self.task.cancel()


class _Pool:
    """Keeps what the planner knows of one model. `asked`: what is asked of it in this home.
    `running`: replicas that it has, which count as needed until now: nobody knows yet."""

    def __init__(self, asked: AskedWork, now_s: float, running: int, learnt: Learnt | None) -> None:
        self.asked = asked
        self.watch = ModelWatch(now_s, learnt)
        self.past: tuple[PastNeed, ...] = (PastNeed(now_s, running),)
        self.starts: list[_Start] = []
        """Those that are under way, the latest last."""
        self.queued = 0
        """So many more are to start once others have."""
        self.changing: asyncio.Task[None] | None = None
        """Has fewer engines asked, or another number of pods wanted."""
        self.failures = 0
        self.failed_at_s = self.not_before_s = -math.inf
        self.problem = ""
        self.shown: int | None = None
        """The number that a dry run said last."""
        self.is_counted = False
        """The number of its pods has counted as needed until then."""
        self.growing: tuple[float, int] | None = None
        """The time since which so many pods are wanted, some of which have not joined yet."""

    @property
    def is_changing(self) -> bool:
        return self.changing is not None and not self.changing.done()

    def note_failure(self, problem: str, began_s: float, now_s: float) -> None:
        """Leave it alone for a while. Starts that were under way together fail as one."""
        self.problem = problem
        if began_s <= self.failed_at_s:
            return
        self.failed_at_s = now_s
        self.not_before_s = now_s + min(RETRY_MAX_S, RETRY_MIN_S * 2**self.failures)
        self.failures = min(self.failures + 1, 16)

    def note_success(self) -> None:
        self.problem, self.failures, self.not_before_s = "", 0, -math.inf


class Planner:
    """`settings`: those in force now. `scale_api`: how a StatefulSet is scaled. `clock`: Unix
    seconds."""

    def __init__(
        self,
        home: Home,
        settings: Callable[[], Settings],
        scaler: EngineScaler,
        note: Note,
        machine: Machine,
        *,
        scale_api: Callable[[KubernetesConfig], ScaleApi] = ScaleApi,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._home, self._settings, self._clock = home, settings, clock
        self._scaler, self._note, self._machine = scaler, note, machine
        self._scale_api = scale_api
        self._pools: dict[str, _Pool] = {}
        self._pods: dict[str, PodPool] = {}
        self._marks: DrainMarks | None = None
        self._clients: dict[str, EngineClient] = {}
        self._learnt = _read_learnt(home.planner_learnt)
        self._kept_at_s = -math.inf
        self._changes: deque[PlannedChange] = deque(maxlen=MAX_CHANGES)
        self._tasks = TaskSet()
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
        """Look once, decide, and begin what is to change."""
        settings, now_s = self._settings(), self._clock()
        config = settings.fleet.planner
        models = [each for each in settings.models if each.planned_range is not None]
        await self._follow(models if config.mode != "off" else [], now_s)
        if config.mode == "off" or not models:
            self._show(config, [])
            await self._wake_all(models)
            return
        models = [each for each in models if self._is_known(each, now_s)]
        seen = {each.name: self._observe(each, now_s) for each in models}
        decisions = {
            each.name: self._decide(each, seen[each.name], settings, config) for each in models
        }
        packed = self._pack(models, decisions, seen, settings.models)
        self._keep(models, now_s)
        if config.mode == "dry-run":
            self._tell_changes(models, decisions, packed)
        else:
            self._begin_changes(config, models, decisions, packed, now_s)
        planned = [self._planned(each, config, decisions, seen, packed) for each in models]
        self._show(config, planned)

    async def until_done(self) -> None:
        """Wait for the changes that are under way."""
        await self._tasks.wait()

    async def _wake_all(self, models: Sequence[ModelConfig]) -> None:
        """Start an engine of each model that has none: nobody else would."""
        for model in models:
            if model.is_asleep:
                try:
                    await (await self._scaler.start(model.name))()
                except ScalingError as error:
                    log.error("%s stays without an engine: %s", model.name, error)

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
        for name in self._pools.keys() - names:
            pool = self._pools.pop(name)
            self._give_up(pool, len(pool.starts))
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
        """Return how many engines it has: of pods, those wanted."""
        pods = self._pods.get(model.name)
        if pods is None:
            return len(model.started)
        return self._num_connected(model) if pods.replicas is None else pods.replicas

    def _coming_of(self, model: ModelConfig) -> int:
        """Return how many it has, those that start counted."""
        return self._running_of(model) + len(self._pools[model.name].starts)

    def _observe(self, model: ModelConfig, now_s: float) -> PoolObservation:
        pool = self._pools[model.name]
        statuses: list[ReplicaStatus] = [
            client.status
            for address in (model.started if model.kubernetes is None else model.joined)
            if (client := self._clients.get(address)) is not None and client.connected
        ]
        return pool.watch.observe(now_s, self._coming_of(model), pool.asked.by_column(), statuses)

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
        claims, resident_bytes = [], machine.growing_bytes()
        elsewhere = {name: PoolShare(decisions[name].wanted) for name in self._pods.keys() & seen}
        for model in models:
            if model.replica_range is None:
                continue
            decision, size = decisions[model.name], self._size_of(model, beside)
            resident_bytes += len(model.started) * size
            work = seen[model.name].load.work_s
            busy = min(1.0, work / decision.wanted) if decision.wanted else 0.0
            claims.append(
                PoolClaim(
                    model=model.name,
                    each=Footprint(size, busy * machine.num_threads(model, beside)),
                    least=model.replica_range.least,
                    needed=decision.needed,
                    wanted=decision.wanted,
                    resident=self._coming_of(model),
                    load=work,
                )
            )
        room = 2**62 if available is None else int(MEMORY_SHARE * (available + resident_bytes))
        return elsewhere | pack(claims, Footprint(room, float(machine.num_cores)))

    def _size_of(self, model: ModelConfig, beside: Sequence[ModelConfig]) -> int:
        """Return the memory that an engine of it takes, as measured or guessed."""
        measured = self._pools[model.name].watch.engine_bytes
        return measured or self._machine.expected_bytes(model, beside)

    def _tell_changes(
        self,
        models: Sequence[ModelConfig],
        decisions: Mapping[str, Decision],
        packed: Mapping[str, PoolShare],
    ) -> None:
        """Say what would change, once for each number that is wanted anew."""
        for model in models:
            pool, after = self._pools[model.name], packed[model.name].replicas
            self._give_up(pool, len(pool.starts))
            before, why = self._running_of(model), decisions[model.name].why
            if after == before:
                pool.shown = None
            elif pool.shown != after:
                pool.shown = after
                work = self._tell(model.name, before, after, why, is_done=False)
                self._tasks.spawn(work, name="note a decision")

    def _begin_changes(
        self,
        config: PlannerConfig,
        models: Sequence[ModelConfig],
        decisions: Mapping[str, Decision],
        packed: Mapping[str, PoolShare],
        now_s: float,
    ) -> None:
        """Begin what is to change: who gets fewer makes room, so those first."""
        growing: dict[str, int] = {}
        makes_room = False
        for model in models:
            pool, after = self._pools[model.name], packed[model.name].replicas
            running, more = self._running_of(model), after - self._coming_of(model)
            pool.shown, pool.queued, why = None, 0, decisions[model.name].why
            if after == running:
                pool.problem = ""
            if model.kubernetes is not None:
                if after != running and now_s >= pool.not_before_s:
                    self._begin_change(model, after, why)
                continue
            if more < 0:
                self._give_up(pool, -more)
            if after < running:
                self._begin_change(model, after, why)
            elif more > 0 and now_s >= pool.not_before_s:
                growing[model.name] = more
            makes_room |= pool.is_changing
        self._begin_starts(config, models, decisions, growing, makes_room=makes_room)

    def _give_up(self, pool: _Pool, number: int) -> None:
        """Break off so many starts, the latest first; not those of engines that are ready."""
        open_ = [each for each in pool.starts if not each.is_ready and not each.is_given_up]
        for each in reversed(open_[len(open_) - min(number, len(open_)) :]):
            each.give_up()

    def _begin_change(self, model: ModelConfig, after: int, why: str) -> None:
        pool = self._pools[model.name]
        if not pool.is_changing:
            work = self._resize(model, pool, after, why)
            pool.changing = self._tasks.spawn(work, name=f"scale {model.name}")

    def _begin_starts(
        self,
        config: PlannerConfig,
        models: Sequence[ModelConfig],
        decisions: Mapping[str, Decision],
        more: dict[str, int],
        *,
        makes_room: bool,
    ) -> None:
        """Begin starts, of `more` for each model, as many as may be under way. Those come first
        that have nobody, then those that have the smallest part of what they are to have.
        `makes_room`: some are ending; until they have, there is only the room that is free."""
        by_name = {each.name: each for each in models}
        free = self._most_starts(config) - sum(len(pool.starts) for pool in self._pools.values())
        while free > 0 and any(more.values()):
            name = min(
                (each for each, number in more.items() if number),
                key=lambda each: (
                    (has := self._coming_of(by_name[each])) / (has + more[each]),
                    each,
                ),
            )
            if makes_room and not self._has_room_now(by_name[name], models):
                more[name] = 0  # it is looked at again
                continue
            more[name] -= 1
            free -= 1
            self._begin_start(by_name[name], decisions[name].why)
        for name, number in more.items():
            self._pools[name].queued = number

    def _most_starts(self, config: PlannerConfig) -> int:
        return config.starts_at_once or self._machine.num_cores

    def _has_room_now(self, model: ModelConfig, models: Sequence[ModelConfig]) -> bool:
        """Tell whether one more of its engines fits beside all that are there, those that start
        counted in full."""
        available = self._machine.available_bytes()
        if available is None:
            return True
        missing = sum(
            len(self._pools[each.name].starts) * self._size_of(each, models)
            for each in models
            if each.kubernetes is None
        )
        left = available - max(0, missing - self._machine.growing_bytes())
        return self._size_of(model, models) <= MEMORY_SHARE * left

    def _begin_start(self, model: ModelConfig, why: str) -> None:
        pool, start = self._pools[model.name], _Start(self._clock())
        pool.starts.append(start)
        pool.watch.grew(start.began_s)
        work = self._grow(model.name, pool, start, why)
        start.task = self._tasks.spawn(work, name=f"start {model.name}")

    async def _grow(self, name: str, pool: _Pool, start: _Start, why: str) -> None:
        """Start one more engine here, and have it asked."""
        problem = ""
        try:
            log.info("%s: one more is started, %s", name, why)
            put_in_force = await self._scaler.start(name)
            start.is_ready = True
            await put_in_force()
        except ScalingError as error:
            problem = str(error)
            if not error.is_outdated:
                pool.note_failure(problem, start.began_s, self._clock())
        except asyncio.CancelledError:
            if not start.is_given_up:
                raise
            problem = NOT_NEEDED
        finally:
            pool.starts.remove(start)
        now_s = self._clock()
        if not problem:
            pool.note_success()
            pool.watch.start_s = now_s - start.began_s
            pool.watch.grew(now_s)
        model = next((each for each in self._settings().models if each.name == name), None)
        running = 0 if model is None else len(model.started)
        before = running if problem else running - 1
        await self._tell_outcome(name, before, before + 1, why, problem)

    async def _resize(self, model: ModelConfig, pool: _Pool, after: int, why: str) -> None:
        """Have fewer engines here, or another number of pods."""
        pods, began_s, before = self._pods.get(model.name), self._clock(), self._running_of(model)
        problem = ""
        log.info("%s: %d -> %d, %s", model.name, before, after, why)
        if pods is None:
            try:
                await self._scaler.shrink(model.name, after, pool.watch.start_s)
            except ScalingError as error:
                problem = str(error)
        else:
            if after > before:
                pool.watch.grew(began_s)
            drain_s = self._settings().drain_timeout_s
            problem = await pods.scale(model, before, after, drain_s)
            if not problem:
                pool.growing = (began_s, after) if after > before else None
        if problem:
            pool.note_failure(problem, began_s, self._clock())
        else:
            pool.note_success()
        await self._tell_outcome(model.name, before, after, why, problem)

    async def _tell_outcome(
        self, model: str, before: int, after: int, why: str, problem: str
    ) -> None:
        if problem:
            why = f"{why}; not done: {problem}"
            level = logging.INFO if problem == NOT_NEEDED else logging.ERROR
            log.log(level, "%s stays at %d: %s", model, before, problem)
        await self._tell(model, before, after, why, is_done=not problem)

    async def _tell(self, model: str, before: int, after: int, why: str, *, is_done: bool) -> None:
        """Keep a change that was made, or was not, for operators, and put it into the audit log."""
        change = PlannedChange(
            at=int(self._clock()),
            model=model,
            before=before,
            after=after,
            why=why,
            is_done=is_done,
        )
        self._changes.appendleft(change)
        await self._note(change)

    def _show(self, config: PlannerConfig, planned: list[PlannedModel]) -> None:
        """Write what operators are told; nothing where nothing is decided and no engine placed."""
        engines = self._machine.placed()
        if not planned and not engines:
            self._home.planner_view.unlink(missing_ok=True)
            return
        view = PlannerView(
            mode=config.mode,
            at=int(self._clock()),
            models=planned,
            changes=[*self._changes],
            engines=engines,
        )
        view.write(self._home.planner_view)

    def _planned(
        self,
        model: ModelConfig,
        config: PlannerConfig,
        decisions: Mapping[str, Decision],
        seen: Mapping[str, PoolObservation],
        packed: Mapping[str, PoolShare],
    ) -> PlannedModel:
        """Return what operators are told of a model."""
        decision, of, pool = decisions[model.name], seen[model.name], self._pools[model.name]
        assert model.planned_range is not None
        return PlannedModel(
            model=model.name,
            least=model.planned_range.least,
            most=model.planned_range.most,
            running=self._running_of(model),
            starting=len(pool.starts),
            wanted=packed[model.name].replicas,
            reasons=[given(each) for each in decision.reasons],
            rate=of.rate,
            expected_rate=of.expected_rate,
            work=of.load.work_s,
            start_s=pool.watch.start_s,
            problem=packed[model.name].problem or self._problem_of(model, config),
        )

    def _problem_of(self, model: ModelConfig, config: PlannerConfig) -> str:
        """Say what keeps a model from having as many as wanted, beside the room; empty: nothing."""
        pool, pods = self._pools[model.name], self._pods.get(model.name)
        if pool.problem:
            return pool.problem
        if pool.queued:
            most = self._most_starts(config)
            return f"{pool.queued} more start once others have: starts_at_once is {most}"
        if pods is None or pods.problem or pods.replicas is None:
            return "" if pods is None else pods.problem
        number = self._num_connected(model)
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
