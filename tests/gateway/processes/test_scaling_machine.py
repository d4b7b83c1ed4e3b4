"""Engines that start side by side, that end, and settings that change meanwhile: in whatever order
they come, workers are told of engines that serve, and nothing is left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.fleet.planner.scaling import PutInForce, ScalingError
from gateway.home import Home
from gateway.processes import engine_set, restarter
from gateway.processes.beside_engines import ConductorPlace
from gateway.processes.control_socket import ReloadRequest
from gateway.processes.engine_set import ENGINE_CANNOT_START, EngineSet, RunningEngine
from gateway.processes.reload import Reload
from gateway.processes.worker_set import SettingsRefused, WorkerSet
from gateway.settings.load import Settings, load
from tests.machines import run_machine
from tests.scratch import scratch_for_a_while

A = '[[model]]\nname = "a"\npath = "models/penny"\nreplicas = "{a}"\n'
B = '[[model]]\nname = "b"\npath = "models/penny"\nreplicas = "0..2"\n'
TEXTS = (
    A.format(a="1..3") + B,
    A.format(a="1..2") + B,
    A.format(a="2..3") + B + "[engine]\nmax_num_seqs = 5\n",
    A.format(a="1..3"),
    A.format(a="1..3").replace('"1..3"', "2"),
)
MOST_STARTS = 4
TICKS = 40
"""So often everything goes on until it waits for somebody else."""


class ProcessOfATest:
    """A child that lives until it is stopped or dies."""

    def __init__(self, machine: ScalingMachine, address: str) -> None:
        self.pid, self.started_s, self.log_start = 1, 0.0, 0
        self.log = machine.folder / "engine.log"
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        assert address not in machine.living, "two processes on one socket"
        machine.living[address] = self
        self._machine, self._address = machine, address

    def poll(self) -> int | None:
        return self.status.result() if self.status.done() else None

    def die(self, status: int) -> None:
        if not self.status.done():
            self.status.set_result(status)
            self._machine.serving.discard(self._address)
            del self._machine.living[self._address]

    async def wait(self) -> int:
        return await asyncio.shield(self.status)

    async def stop(self, timeout_s: float) -> int:
        await asyncio.sleep(0)
        self.die(0)
        return await self.wait()


class EnginesOfATest(EngineSet):
    machine: ScalingMachine

    async def _start(self, settings: Settings, engine: RunningEngine) -> Any:
        return ProcessOfATest(self.machine, engine.address)


class ReloadOfATest(Reload):
    async def _take_up_plans_and_prices(self, *_: Any, **__: Any) -> int:
        return 0


class WorkersOfATest:
    """Take settings up once `gate` is open, or refuse them."""

    def __init__(self) -> None:
        self.gate, self.refuses, self.settings = asyncio.Event(), False, cast(Any, None)
        self.gate.set()
        self._trying: Settings | None = None

    async def take_up(self, settings: Settings) -> None:
        self._trying = settings
        try:
            await self.gate.wait()
            if self.refuses:
                raise SettingsRefused("no")
            self.settings = settings
        finally:
            self._trying = None

    @property
    def engines_in_use(self) -> set[str]:
        in_use = [self.settings, *([self._trying] if self._trying else [])]
        return {address for of in in_use for each in of.models for address in each.started}


class Start:
    def __init__(self, work: Coroutine[Any, Any, PutInForce]) -> None:
        self.is_ready = False
        self.task = asyncio.create_task(self._run(work))

    async def _run(self, work: Awaitable[PutInForce]) -> str:
        try:
            put_in_force = await work
            self.is_ready = True
            await put_in_force()
        except ScalingError as error:
            return "outdated" if error.is_outdated else "failed"
        return "done"


class ScalingMachine(RuleBasedStateMachine):
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.living: dict[str, ProcessOfATest] = {}
        self.serving: set[str] = set()
        """The sockets on which somebody listens."""
        self.starts: list[Start] = []
        self.others: list[asyncio.Task[Any]] = []
        self.text, self.has_stopped = TEXTS[0], False
        self.run(self.begin())

    def run(self, work: Coroutine[Any, Any, Any] | None = None) -> Any:
        async def main() -> Any:
            found = None if work is None else await work
            for _ in range(TICKS):
                await asyncio.sleep(0)
            return found

        return self.runner.run(main())

    async def begin(self) -> None:
        home = Home(self.folder / "home")
        home.create()
        self.engines = EnginesOfATest(home)
        self.engines.machine = self
        read = self.read()
        now = msgspec.structs.replace(read, models=self.engines.place(read.models))
        self.workers = WorkersOfATest()
        for each in await self.engines.begin(now):
            self.serving.add(each.address)
        await self.workers.take_up(now)
        self.engines.watch(now.models)
        self.reload = ReloadOfATest(
            self.read,
            cast(Any, self.complete),
            as_read=now,
            settings=now,
            engines=self.engines,
            workers=cast(WorkerSet, self.workers),
            say=lambda line: None,
        )

    def read(self) -> Settings:
        path = self.folder / "tollgate.toml"
        path.write_text(self.text)
        return load({"config": path, "home": self.folder / "home"}, {})

    async def complete(self, read: Settings) -> Settings:
        return read

    def loading(self) -> list[str]:
        return sorted(self.living.keys() - self.serving)

    @precondition(lambda self: len(self.starts) < MOST_STARTS)
    @rule(model=st.sampled_from("ab"))
    def start(self, model: str) -> None:
        async def begin() -> None:
            self.starts.append(Start(self.reload.start(model)))

        self.run(begin())

    @rule(model=st.sampled_from("ab"), number=st.integers(0, 2))
    def shrink(self, model: str, number: int) -> None:
        async def begin() -> None:
            work = self.reload.shrink(model, number, None)
            self.others.append(asyncio.create_task(work))

        self.run(begin())

    @rule(text=st.sampled_from(TEXTS), stops_first=st.booleans())
    def change_settings(self, text: str, stops_first: bool) -> None:
        async def begin() -> None:
            self.text, self.has_stopped = text, self.has_stopped or stops_first
            request = ReloadRequest(stops_first=stops_first)
            self.others.append(asyncio.create_task(self.reload.answer(request)))

        self.run(begin())

    @precondition(lambda self: self.loading())
    @rule(number=st.integers(0, 9))
    def one_is_ready(self, number: int) -> None:
        loading = self.loading()
        self.serving.add(loading[number % len(loading)])
        self.run()

    @precondition(lambda self: self.loading())
    @rule(number=st.integers(0, 9), status=st.sampled_from([-9, ENGINE_CANNOT_START]))
    def one_dies_as_it_starts(self, number: int, status: int) -> None:
        loading = self.loading()

        async def die() -> None:
            self.living[loading[number % len(loading)]].die(status)

        self.run(die())

    @precondition(lambda self: any(not each.is_ready for each in self.starts))
    @rule(number=st.integers(0, 9))
    def one_is_broken_off(self, number: int) -> None:
        open_ = [each for each in self.starts if not each.is_ready]

        async def cancel() -> None:
            open_[number % len(open_)].task.cancel()

        self.run(cancel())

    @rule(refuses=st.booleans(), is_slow=st.booleans())
    def workers_change(self, refuses: bool, is_slow: bool) -> None:
        async def change() -> None:
            self.workers.refuses = refuses
            (self.workers.gate.clear if is_slow else self.workers.gate.set)()

        self.run(change())

    @invariant()
    def workers_know_engines_that_serve(self) -> None:
        self.forget_what_is_done()
        known = {a for each in self.workers.settings.models for a in each.started}
        if self.has_stopped:  # on demand workers lack engines for a while
            self.has_stopped = bool(self.starts or self.others or self.loading())
        assert self.has_stopped or known <= self.serving
        everyone = self.engines.all
        assert len({each.address for each in everyone}) == len(everyone)
        assert len({(each.model.name, each.record) for each in everyone}) == len(everyone)
        assert self.living.keys() <= {each.address for each in everyone}
        for model in self.reload.settings.models:
            if (bounds := model.replica_range) is not None:
                assert bounds.least <= len(model.started) <= bounds.most

    @invariant()
    def nothing_is_left_of_what_is_over(self) -> None:
        if self.starts or self.others:
            return
        named = {a for each in self.reload.settings.models for a in each.started}
        assert named == {a for each in self.workers.settings.models for a in each.started}
        assert named == self.living.keys() == self.engines._engines.keys()

    def forget_what_is_done(self) -> None:
        for task in [*self.others, *(each.task for each in self.starts)]:
            if task.done() and not task.cancelled():
                error = task.exception()
                assert error is None or isinstance(error, ScalingError), error
        for each in self.starts:
            if each.task.done():
                event("broken off" if each.task.cancelled() else each.task.result())
        self.starts = [each for each in self.starts if not each.task.done()]
        self.others = [each for each in self.others if not each.done()]

    def teardown(self) -> None:
        self.workers_change(refuses=False, is_slow=False)
        for _ in range(20):
            for address in self.loading():
                self.serving.add(address)
            self.run()
            self.forget_what_is_done()
        assert not self.starts and not self.others
        self.nothing_is_left_of_what_is_over()
        self.run(self.engines.stop(1))
        self.runner.close()


def test_nothing_is_left_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, address: str) -> None:
            self._address = address

        def start(self) -> None:
            pass

        async def close(self) -> None:
            pass

        @property
        def connected(self) -> bool:
            return self._address in ScalingOfThisTest.now.serving

    class ScalingOfThisTest(ScalingMachine):
        now: ScalingMachine

        def __init__(self) -> None:
            type(self).now = self
            super().__init__()

    class Dog:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        async def run(self) -> None:
            await asyncio.Event().wait()

    async def follow(*_: Any) -> None:
        pass

    async def in_no_thread(work: Callable[[], Any]) -> Any:
        return work()

    monkeypatch.setattr(engine_set, "EngineClient", Client)
    monkeypatch.setattr(engine_set, "Watchdog", Dog)
    monkeypatch.setattr(engine_set, "READY_POLL_S", 0)
    monkeypatch.setattr(restarter, "FIRST_BACKOFF_S", 0)
    monkeypatch.setattr(asyncio, "to_thread", in_no_thread)
    monkeypatch.setattr(ConductorPlace, "follow", follow)
    with scratch_for_a_while() as folder:
        ScalingOfThisTest.folder = Path(folder)
        (ScalingOfThisTest.folder / "engine.log").write_text("")
        run_machine(ScalingOfThisTest, examples=80, steps=25)
