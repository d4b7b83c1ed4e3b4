"""The engines that `tollgate up` runs: as many for each in-repo model as it has replicas, and while
settings change, the new ones beside those that they replace; and what stands beside engines
(`beside_engines`).

An engine that is replaced ends once no worker may ask it anything any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import count
from pathlib import Path

import msgspec

from engine.errors import EngineUnavailable
from engine.options import EngineOptions
from engine.transport.client import EngineClient
from foundation.tasks import TaskSet, end_tasks
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.planner.machine import (
    Machine,
    available_memory,
    memory_of,
    weights_bytes,
)
from gateway.fleet.planner.view import PlacedEngine
from gateway.home import Home, engine_number, peer_address
from gateway.installation.model_versions import (
    MAX_PROBLEM_CHARS,
    ModelVersion,
    State,
    version_of,
    weights_of,
)
from gateway.logs import last_error
from gateway.processes.beside_engines import ConductorPlace, LenderPlace, RayPlace, RelayPlace
from gateway.processes.child_processes import Child, spawn
from gateway.processes.engine_devices import EngineDevice, devices_of, options_on, variables_on
from gateway.processes.restarter import Restarter, StartError, together
from gateway.processes.start_view import IMPORTING, SERVING, WARMING, EngineStages
from gateway.processes.watchdog import Watchdog
from gateway.secret import Secret, SecretError
from gateway.settings.child_environment import engine_environment
from gateway.settings.load import Settings, own_environment
from gateway.settings.models import ModelConfig, options_beside

log = logging.getLogger(__name__)

ENGINE_CANNOT_START = 2
"""Exit status of an engine that cannot start as configured: trying again is of no use."""
READY_TIMEOUT_S = 900.0
"""Loading a large model's weights is part of it."""
READY_POLL_S = 0.05
PROBE_TIMEOUT_S = 5.0
ENGINE_STOP_S = 10.0
"""The workers are gone by then, so there is nothing for an engine to finish."""
RETIRE_S = 60.0
"""An engine that nobody asks any more has nothing to finish, but to write down what it counted."""
OUTDATED = "the settings have become others while it started"
TIER_PURPOSE = "kv-disk"
"""The purpose of the key that engines encrypt their disk tiers under."""


class StartOutdated(StartError):
    """An error of an engine that the settings have no place for any more."""


class RunningEngine:
    """An engine of this process tree. The number in its address names its socket and its log,
    `record` the file of what it counts: no two that live at a time share one. `options`: those that
    its next process gets; `start`: starts that."""

    def __init__(
        self,
        model: ModelConfig,
        address: str,
        record: int,
        options: EngineOptions,
        start: Callable[[RunningEngine], Awaitable[Child]],
    ) -> None:
        assert model.path is not None
        self.model, self.address, self.record, self.options = model, address, record, options
        self.restarter = Restarter(f"engine-{engine_number(address)}", lambda: start(self))
        self.is_ready, self.is_retired = False, False
        self.is_outdated = False
        """It starts, and the settings that came into force meanwhile have no place for it."""
        self.device: EngineDevice | None = None
        """None: it is not placed on any, and takes the one that it finds."""
        self._stages = EngineStages(model.path, address)
        self._version: ModelVersion | None = None
        self.restarter.is_final = self._is_vain

    @property
    def name(self) -> str:
        """Return the name of the replica that it is of its model."""
        return self.model.replica_name(self.address)

    def stage(self) -> tuple[str, int, int]:
        """Return what its process does until it serves, as `EngineStages.look`."""
        child = self.restarter.child
        return (IMPORTING, 0, 0) if child is None else self._stages.look(child.pid)

    def _is_vain(self, status: int) -> bool:
        """Return whether an engine that left so is not started again. Once it was ready it is tried
        again and again: what it lacks, a mounted folder say, may come back, and other models are
        being served."""
        return status == ENGINE_CANNOT_START and not self.is_ready

    @property
    def failure(self) -> str | None:
        """Return why it left, if it left."""
        left = self.restarter.last_exit
        if left is None:
            return None
        return f"{self.restarter.name}: {last_error(left.log, left.log_start)}"

    def look(self, problem: str = "") -> ModelVersion:
        """Look at its process, and tell how far it is and since when. `problem`: why it never came
        to serve."""
        state: State = "failed" if problem else self._state()
        digest, before = version_of(self.model), self._version
        if before is None or (before.state, before.version) != (state, digest):
            self._version = ModelVersion(
                model=self.model.name,
                version=digest,
                weights=weights_of(self.model),
                place=self.restarter.name,
                state=state,
                since=int(time.time()),
                problem=problem[:MAX_PROBLEM_CHARS],
            )
        assert self._version is not None
        return self._version

    def _state(self) -> State:
        if self.is_retired:
            return "draining"
        step = self.stage()[0]
        if self.is_ready:
            return "serving" if step == SERVING else "restarting"
        return "ready" if step == SERVING else "warming" if step == WARMING else "starting"

    @property
    def will_never_start(self) -> bool:
        left = self.restarter.last_exit
        return left is not None and left.poll() == ENGINE_CANNOT_START


class EngineSet:
    """The engines, by their addresses."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._conductor, self._relay = ConductorPlace(home), RelayPlace(home)
        self._ray, self._lender = RayPlace(home), LenderPlace(home)
        self._settings: Settings | None = None
        """The settings with which engines were begun last."""
        self._engines: dict[str, RunningEngine] = {}
        self._growing: dict[str, RunningEngine] = {}
        """Those that start and that no settings name yet."""
        self._named: set[str] = set()
        """The addresses that models were given last, by settings that may not be in force yet."""
        self._retiring: dict[str, RunningEngine] = {}
        self._dropped: dict[str, RunningEngine] = {}
        """Those that end and that nobody was told of."""
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._failed: list[ModelVersion] = []
        self._tasks = TaskSet()
        self.on_change: Callable[[], None] = lambda: None
        """Called when `versions` tells something else, but for the steps of a start."""

    @cached_property
    def _drain_marks(self) -> DrainMarks:
        return DrainMarks(self._home.drain_marks)

    @property
    def all(self) -> list[RunningEngine]:
        return [*self._told, *self._dropped.values()]

    @property
    def _told(self) -> list[RunningEngine]:
        """Return those that people are told of."""
        return [*self._engines.values(), *self._growing.values(), *self._retiring.values()]

    @property
    def restarters(self) -> list[Restarter]:
        places = (self._conductor, self._relay, self._ray, self._lender)
        beside = (each.restarter for each in places)
        return [*(each.restarter for each in self.all), *(each for each in beside if each)]

    def machine(self) -> Machine:
        """Return what a planner asks of the machine and of the engines that run on it."""

        def bytes_of(engine: RunningEngine | None) -> int | None:
            child = None if engine is None else engine.restarter.child
            return None if child is None else memory_of(child.pid)

        return Machine(
            available_bytes=available_memory,
            engine_bytes=lambda address: bytes_of(self._engines.get(address)),
            growing_bytes=lambda: sum(bytes_of(each) or 0 for each in self._growing.values()),
            expected_bytes=expected_memory,
            num_threads=lambda model, models: (
                shared_options(model, models).num_threads or len(os.sched_getaffinity(0))
            ),
            num_cores=len(os.sched_getaffinity(0)),
            placed=self._placed,
        )

    def _placed(self) -> list[PlacedEngine]:
        """Return the engines that people are told of and that have a device."""
        shown = (each.device.shown(each.name) for each in self._told if each.device is not None)
        return [each for each in shown if each is not None]

    def _place_on_devices(self, fresh: Sequence[RunningEngine], settings: Settings) -> None:
        """Give engines that are begun their devices, beside those that all others are on."""
        others = (each.device for each in self.all if each not in fresh)
        models = {each.address: each.model for each in fresh}
        devices = devices_of(models, others, settings.fleet.planner)
        for each in fresh:
            each.device = devices.get(each.address)

    def versions(self) -> list[ModelVersion]:
        """Return the version that each engine has of its model, and those that did not start when
        engines were begun last."""
        return [*(each.look() for each in self._told), *self._failed]

    def place(self, models: Sequence[ModelConfig]) -> tuple[ModelConfig, ...]:
        """Give each model the engines that run as it wants them, those of the lowest numbers first
        and drained ones last, and for those that are missing the addresses of ones that will. An
        engine that would only get another share of the machine stays as it runs: its next start
        gives it its new share."""
        taken = {engine_number(each.address) for each in self.all}
        taken |= {engine_number(each) for model in models for each in model.joined}
        placed: list[ModelConfig] = []
        for model in models:
            if model.starts_engine:
                kept = self._kept(model)
                own = model.engines[: len(model.engines) - len(model.joined)]
                fresh = (self._beside(each, taken) for each in own[len(kept) :])
                model = msgspec.structs.replace(model, engines=(*kept, *fresh, *model.joined))
            placed.append(model)
        self._named = {address for model in placed for address in model.engines}
        return tuple(placed)

    def _kept(self, model: ModelConfig) -> list[str]:
        """Return the engines that go on running it, no more than it wants."""
        wanted, marks = process_of(model), self._drain_marks
        running = (each for each in self._engines.values() if process_of(each.model) == wanted)
        numbers = {engine_number(each.address): each.address for each in running}
        best = sorted(numbers, key=lambda number: (number in marks, number))
        return [numbers[each] for each in sorted(best[: len(model.started)])]

    def _beside(self, address: str, taken: set[int]) -> str:
        """Return `address`, or that of the next number which is not `taken`, and take it."""
        number = engine_number(address)
        while number in taken:
            number += 1
        taken.add(number)
        return f"unix:{self._home.engine_socket(number)}"

    async def begin(self, settings: Settings) -> list[RunningEngine]:
        """Start the engines that are missing, and return them; they load from now on. The models of
        `settings` have their places."""
        self._settings = settings
        fresh = self._add_missing(settings)
        await together(*(each.restarter.begin() for each in fresh))
        self.on_change()
        return fresh

    async def begin_beside(self, model: ModelConfig, settings: Settings) -> RunningEngine:
        """Start one more engine of a model, which none of `settings` names until it is `taken`; it
        loads from now on. Raises: StartError, OSError, and nothing is left of it."""
        self._failed = [each for each in self._failed if each.model != model.name]
        named = {each for other in settings.models for each in other.engines} | self._named
        taken = {engine_number(each) for each in (*named, *(each.address for each in self.all))}
        number = next(each for each in count() if each not in taken)
        address = f"unix:{self._home.engine_socket(number)}"
        engine = self._growing[address] = self._engine(model, address, settings)
        self._place_on_devices([engine], settings)
        try:
            await engine.restarter.begin()
        except BaseException as error:
            await self.drop([engine], str(error) if isinstance(error, StartError) else "")
            raise
        self.on_change()
        return engine

    def take(self, engine: RunningEngine) -> None:
        """Count an engine that was begun beside others among those that settings name."""
        self._engines[engine.address] = self._growing.pop(engine.address)

    async def let_join(self, settings: Settings) -> None:
        """Let engines of other machines join as the settings have it, and have those run that Ray
        starts. Raises: SettingsError, OSError."""
        await self._relay.follow(settings)
        await self._ray.follow(settings, self._relay.port)

    def forget_failures(self) -> None:
        """Forget the versions that did not start: others are tried."""
        self._failed = []

    async def until_ready(self, fresh: Iterable[RunningEngine]) -> None:
        """Wait until engines serve. Raises: StartError, with the reason that an engine gives."""
        await together(*(self._until_ready(each) for each in fresh))

    def watch(self, models: Iterable[ModelConfig]) -> None:
        """Watch those that serve, from now on: who hangs is killed, and started again. Lend them to
        other cells if settings want that. `models`: those in force, some of which an engine runs on
        with other settings than it began with."""
        models = [*models]
        in_force = {address: each for each in models for address in each.engines}
        for address, each in self._engines.items():
            each.is_ready = True
            if (model := in_force.get(address)) is not None:
                each.model, each.options = model, shared_options(model, models)
            if address not in self._watching:
                dog = Watchdog(each.restarter, address, load_timeout_s=READY_TIMEOUT_S)
                self._watching[address] = self._tasks.spawn(dog.run(), name=f"watch {address}")
        if self._settings is not None:
            several = [each for model in models if len(model.engines) > 1 for each in model.engines]
            self._tasks.spawn(self._conductor.follow(several, self._settings), name="conductor")
            self._tasks.spawn(self._lender.follow(models, self._settings), name="lend")
        self.on_change()

    async def stop_unwanted(self, models: Sequence[ModelConfig]) -> list[str]:
        """Stop the engines that no model wants, once what they are doing is done, and return the
        name of its model for each."""
        gone = self._part_with_unwanted(models)
        await asyncio.gather(*(self._end(each) for each in gone))
        return [each.model.name for each in gone]

    async def drop(self, fresh: Iterable[RunningEngine], problem: str = "") -> None:
        """End engines that nobody was told of. `problem`: why they are not wanted any more."""
        ending = []
        for each in fresh:
            self._engines.pop(each.address, None)
            self._growing.pop(each.address, None)
            self._dropped[each.address] = each  # its socket is its own until it has ended
            if problem:
                self._failed.append(each.look(each.failure or problem))
            name = f"drop {each.address}"
            ending.append(self._tasks.spawn(self._end(each, ENGINE_STOP_S), name=name))
        self.on_change()
        if ending:
            await asyncio.wait(ending)

    def retire(
        self, models: Sequence[ModelConfig], in_use: Callable[[], Collection[str]]
    ) -> list[str]:
        """End the engines that no model wants, each once it is not `in_use`; return the name of its
        model for each."""
        gone = self._part_with_unwanted(models)
        for each in gone:
            self._tasks.spawn(self._retire(each, in_use), name=f"retire {each.address}")
        return [each.model.name for each in gone]

    async def stop(self, timeout_s: float) -> None:
        await self._tasks.close()
        engines = (each.restarter.stop(timeout_s) for each in self.all)
        beside = (self._conductor, self._ray, self._lender)
        await asyncio.gather(*(each.stop() for each in beside), *engines)
        await self._relay.stop()

    async def _retire(self, each: RunningEngine, in_use: Callable[[], Collection[str]]) -> None:
        while each.address in in_use():
            await asyncio.sleep(READY_POLL_S)
        await self._end(each)

    def _part_with_unwanted(self, models: Sequence[ModelConfig]) -> list[RunningEngine]:
        wanted = {address for each in models for address in each.engines}
        gone = [each for each in self._engines.values() if each.address not in wanted]
        for each in gone:
            self._retiring[each.address] = self._engines.pop(each.address)
            each.is_retired = True
        for each in self._growing.values():
            each.is_outdated = not any(can_grow_by(model, each.model) for model in models)
        self.on_change()
        return gone

    async def _end(self, each: RunningEngine, timeout_s: float = RETIRE_S) -> None:
        if (watching := self._watching.pop(each.address, None)) is not None:
            await end_tasks(watching)
        await each.restarter.stop(timeout_s)
        self._dropped.pop(each.address, None)
        if self._retiring.pop(each.address, None) is not None:
            self.on_change()
        log.info("%s of %s has ended", each.restarter.name, each.model.name)

    async def _until_ready(self, each: RunningEngine) -> None:
        client = EngineClient(each.address)
        client.start()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not client.connected:
                    if (failure := each.failure) is not None:
                        raise StartError(failure)
                    if each.is_outdated:
                        raise StartOutdated(OUTDATED)
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            what = f"{each.restarter.name} is not ready after {READY_TIMEOUT_S:.0f} s"
            raise StartError(what) from None
        finally:
            await client.close()

    def _add_missing(self, settings: Settings) -> list[RunningEngine]:
        """Add the engines that models want and that are not there, and return them."""
        fresh = []
        for model in settings.models:
            for address in model.started:
                if address not in self._engines:
                    fresh.append(self._engine(model, address, settings))
                    self._engines[address] = fresh[-1]
        self._place_on_devices(fresh, settings)
        return fresh

    def _engine(self, model: ModelConfig, address: str, settings: Settings) -> RunningEngine:
        used = {each.record for each in self.all if each.model.name == model.name}
        record = next(each for each in range(1, len(used) + 2) if each not in used)
        options = shared_options(model, settings.models)
        self._drain_marks.remove(engine_number(address))  # an earlier one's of that number
        return RunningEngine(model, address, record, options, partial(self._start, settings))

    async def _start(self, settings: Settings, engine: RunningEngine) -> Child:
        """Returns at once: the workers connect when it listens. Raises: StartError."""
        model, name = engine.model, engine.restarter.name
        options, variables = engine.options, dict[str, str]()
        if engine.device is not None:
            placement = engine.device.placement
            if placement.device is None:
                raise StartError(f"{name} of {model.name}: {placement.reason}")
            options = options_on(options, placement.device)
            variables = variables_on(placement.device, own_environment())
        self._home.note_names_sold(model.name, (adapter.name for adapter in model.adapters))
        path = self._home.usage_record(model.name, engine.record)
        command = engine_command(model, engine.address, options, path, settings)
        with lent_tier_key(options, settings) as pipes:
            return spawn(
                name,
                [*command, *(f"--kv-key-file=/dev/fd/{each}" for each in pipes)],
                run=self._home.run,
                log=self._home.logs / f"{name}.log",
                # OpenMP threads that wait by spinning would keep the workers off a small machine.
                env=engine_environment(
                    own_environment(), settings, OMP_WAIT_POLICY="PASSIVE", **variables
                ),
                pass_fds=pipes,
            )


@contextmanager
def lent_tier_key(options: EngineOptions, settings: Settings) -> Iterator[tuple[int, ...]]:
    """Lend the key of an engine's disk tier, if that is to be encrypted, to a child that is
    started: a pipe, which has it until it is read. Raises: StartError."""
    if not options.kv_disk_encrypted:
        yield ()
        return
    try:
        secret = Secret.load(settings.secret_key_file)
    except SecretError as error:
        raise StartError(str(error)) from None
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as pipe:
            pipe.write(secret.current.derive(TIER_PURPOSE))
        yield (reading,)
    finally:
        os.close(reading)


def process_of(model: ModelConfig) -> tuple[object, ...]:
    """Return what an engine's process is made of, but for its share of the machine: two models for
    which it is the same can have the same one."""
    return model.name, model.path, model.engine_options, model.adapters, model.shares_memory


def can_grow_by(model: ModelConfig, started: ModelConfig) -> bool:
    """Tell whether an engine that was started for a model, as it was then, can be one more of it as
    it is."""
    bounds = model.replica_range
    is_open = bounds is not None and len(model.started) < bounds.most
    return is_open and process_of(model) == process_of(started)


def shared_options(model: ModelConfig, models: Iterable[ModelConfig]) -> EngineOptions:
    """Return what an engine of a model is started with on this machine, beside those of all
    models."""
    return options_beside(model, models, num_cores=len(os.sched_getaffinity(0)))


def expected_memory(model: ModelConfig, models: Sequence[ModelConfig]) -> int:
    """Guess the memory of an engine that was never measured: its weights and its KV cache."""
    options = shared_options(model, models)
    cache = options.kv_cache_bytes
    if cache is None:
        cache = int(options.kv_cache_fraction * (available_memory() or 0))
    return weights_bytes(model.path) + cache


def engine_command(
    model: ModelConfig, address: str, options: EngineOptions, record: Path, settings: Settings
) -> list[str]:
    """Return the command line of an engine. `record`: the file of what it counts."""
    assert model.path is not None
    others = settings.fleet.fetch and model.most_engines > 1
    return [
        *(sys.executable, "-m", "engine", "--model", str(model.path)),
        *("--served-name", model.name, "--listen", address),
        *(("--peer-listen", peer_address(address)) if others else ()),
        *("--usage-record", str(record)),
        *("--log-level", settings.log_level, "--log-format", settings.logs.format),
        *options.to_flags(),
        *(f"--adapter={adapter.name}={adapter.path}" for adapter in model.adapters),
    ]


async def capacities(models: Iterable[ModelConfig]) -> list[str]:
    """Return a line for each engine started here: the size of its KV cache, as it reports it."""
    lines = []
    for model in models:
        for address in model.started:
            name = model.replica_name(address)
            try:
                client = await EngineClient.connect(address, timeout_s=PROBE_TIMEOUT_S)
            except EngineUnavailable as error:  # it was ready: its restarter brings it back
                log.warning("%s does not say how large it is: %s", name, error)
                continue
            size = client.status
            await client.close()
            blocks = f"{size.num_blocks} KV blocks of {size.block_size} tokens"
            lines.append(f"{name}: {blocks}, context of {size.max_model_len}")
    return lines
