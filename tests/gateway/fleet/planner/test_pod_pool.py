"""A planner over a pool of pods, with the API of Kubernetes on the loopback: it grows with what is
asked, shrinks by drain, and says what keeps it from either."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest_asyncio

from engine.config import EngineConfig
from engine.fake.engine import FakeCore
from engine.protocol import EngineRequest, SamplingParams
from engine.transport.client import EngineClient
from engine.transport.server import EngineServer
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.joining.joined_engines import JoinRecord, write_present
from gateway.fleet.planner.machine import Machine
from gateway.fleet.planner.planner import Planner
from gateway.fleet.planner.scaling import PutInForce
from gateway.fleet.planner.view import PlannedChange, PlannerView
from gateway.fleet.sent_work import AskedWork
from gateway.home import Home, engine_number
from gateway.settings.load import load
from tests.gateway.fleet.planner.kubernetes_api import KubernetesApi, kubernetes_api
from tests.scratch import scratch_for_a_while

WAIT_S = 60.0
TEXT = """
drain_timeout_s = 60
[fleet]
join_listen = "tcp:127.0.0.1:9400"
[fleet.planner]
cooldown_s = 20
[[model]]
name = "penny"
path = "models/penny"
replicas = 0
joined = "1..3"
[model.kubernetes]
stateful_set = "penny"
"""
CORE = EngineConfig(model=Path("penny"), max_model_len=4096, num_blocks=4096)
NO_MACHINE = Machine(
    available_bytes=lambda: 0,
    engine_bytes=lambda address: None,
    growing_bytes=lambda: 0,
    expected_bytes=lambda model, models: 1 << 40,
    num_threads=lambda model, models: 1,
    num_cores=1,
)
"""Room for none: pods take none of it."""


class UnhurriedCore(FakeCore):
    """Takes its time, so that a request runs until it is paused."""

    def step(self) -> Any:
        time.sleep(0.002)
        return super().step()


class NothingHere:
    """No engine of this home is scaled."""

    async def start(self, model: str) -> PutInForce:
        raise AssertionError(model)

    async def shrink(self, model: str, number: int, wakes_in_s: float | None) -> None:
        raise AssertionError(model)


class PoolHome:
    """A home with a planner, whose time passes from round to round, and engines of pods."""

    def __init__(self, folder: Path, api: KubernetesApi, text: str = TEXT) -> None:
        path = folder / "tollgate.toml"
        path.write_text(text)
        self.settings = load({"config": path, "home": folder / "home"}, {})
        self.home = Home(self.settings.home)
        self.home.create()
        self.home.join.mkdir(parents=True)
        [self.model] = self.settings.models
        self.asked = AskedWork(self.home.asked_of("penny"))
        self.marks = DrainMarks(self.home.drain_marks)
        self.changes: list[PlannedChange] = []
        self.now_s = 1_000_000.0
        self.timeout_s = WAIT_S
        self.present: dict[str, JoinRecord] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self.planner = Planner(
            self.home,
            lambda: self.settings,
            NothingHere(),
            self._note,
            NO_MACHINE,
            scale_api=lambda config: api.client(config, timeout_s=self.timeout_s),
            clock=lambda: self.now_s,
        )

    async def _note(self, change: PlannedChange) -> None:
        self.changes.append(change)

    def join(self, place: int, pod: str) -> None:
        """Have the engine of a pod join at the place of this position."""
        address = self.model.joined[place]
        stop = self._stops[address] = asyncio.Event()
        serving = EngineServer(UnhurriedCore(CORE), address).serve(stop, drain_timeout_s=0)
        self._serving[address] = asyncio.create_task(serving)
        self.present[self.model.replica_name(address)] = JoinRecord(
            serials=[], token_id="", model="penny", host=pod, joined_at=0, expires_at=0
        )
        write_present(self.home.join, self.present)

    async def leave(self, place: int) -> None:
        address = self.model.joined[place]
        self._stops.pop(address).set()
        await self._serving.pop(address)
        del self.present[self.model.replica_name(address)]
        write_present(self.home.join, self.present)

    def set_mode(self, mode: str) -> None:
        fleet = self.settings.fleet
        planner = msgspec.structs.replace(fleet.planner, mode=mode)
        fleet = msgspec.structs.replace(fleet, planner=planner)
        self.settings = msgspec.structs.replace(self.settings, fleet=fleet)

    def is_marked(self, place: int) -> bool:
        return engine_number(self.model.joined[place]) in self.marks

    @property
    def shown(self) -> str:
        view = PlannerView.read(self.home.planner_view)
        return view.models[0].problem if view is not None and view.models else ""

    async def until(
        self, done: Callable[[], bool], *, work_s: float = 0.0, waits: bool = True
    ) -> None:
        """Have rounds of 5 s pass, with `work_s` asked in each. `waits`: for the changes."""
        async with asyncio.timeout(WAIT_S):
            while not done():
                self.now_s += 5.0
                for _ in range(10 if work_s else 0):
                    self.asked.note("interactive", work_s / 10)
                await self.planner.round()
                if waits:
                    await self.planner.until_done()
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        planning = asyncio.create_task(self.planner.run())
        await asyncio.sleep(0)
        planning.cancel()
        await asyncio.wait({planning})
        for stop in self._stops.values():
            stop.set()
        await asyncio.gather(*self._serving.values())
        self.marks.close()


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    async with kubernetes_api(tmp_path) as made:
        yield made


@pytest_asyncio.fixture
async def here(api: KubernetesApi) -> AsyncIterator[PoolHome]:
    with scratch_for_a_while() as folder:
        made = PoolHome(Path(folder), api)
        yield made
        await made.close()


async def test_a_pool_grows_with_what_is_asked_and_shrinks_by_drain(
    here: PoolHome, api: KubernetesApi
) -> None:
    here.join(0, "penny-0")
    await here.until(lambda: api.replicas == 3, work_s=20.0)
    assert here.changes[0].is_done and (here.changes[0].before, here.changes[0].after) == (1, 3)
    await here.until(lambda: here.shown == "1 of 3 have joined", work_s=20.0)
    here.join(1, "penny-2.pool.models.svc")  # places are taken as engines come
    here.join(2, "penny-1")
    await here.until(lambda: here.planner._num_connected(here.model) == 3, work_s=20.0)
    await here.until(lambda: here.shown == "", work_s=20.0)
    busy = await EngineClient.connect(here.model.joined[1], timeout_s=WAIT_S)
    stream = busy.generate(
        EngineRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(max_tokens=4000, ignore_eos=True, seed=1),
        )
    )
    await anext(stream)
    await busy.pause("r")  # it runs for as long as this test wants
    async with asyncio.timeout(WAIT_S):
        while here.planner._is_idle(here.model.joined[1]):  # it hears of it a moment later
            await asyncio.sleep(0.01)
    here.marks.mark(engine_number(here.model.joined[0]))  # by an operator
    await here.until(lambda: here.is_marked(1), waits=False)
    assert api.replicas == 3, "the one of the highest number is busy"
    await stream.aclose()
    await here.until(lambda: api.replicas == 1)
    await busy.close()
    assert here.is_marked(1) and here.is_marked(2), "until they have left"
    await here.leave(1)
    await here.leave(2)
    [pods] = here.planner._pods.values()
    await pods.look(here.model)
    assert [here.is_marked(place) for place in range(3)] == [True, False, False]
    wanted = [each["replicas"] for each in api.patches]
    assert wanted == sorted(wanted, reverse=True) and (wanted[0], wanted[-1]) == (3, 1)
    assert all(each.is_done for each in here.changes)


async def test_what_the_api_refuses_is_told_and_left_alone_for_a_while(
    here: PoolHome, api: KubernetesApi
) -> None:
    api.forbids_patch = True
    await here.until(lambda: bool(here.changes), work_s=20.0)
    [refused] = here.changes
    assert not refused.is_done and "not done: the API of Kubernetes answers 403" in refused.why
    await here.until(lambda: "answers 403" in here.shown, work_s=20.0)
    assert len(here.changes) == 1, "the next try waits"
    api.forbids_patch = False
    await here.until(lambda: api.replicas == 3, work_s=20.0)
    assert here.changes[-1].is_done


async def test_a_shrink_that_is_refused_takes_its_marks_back(
    here: PoolHome, api: KubernetesApi
) -> None:
    api.replicas, api.forbids_patch = 2, True
    for place in range(2):
        here.join(place, f"penny-{place}")
    await here.until(lambda: bool(here.changes))
    assert not here.changes[0].is_done and not here.is_marked(1) and api.replicas == 2
    api.forbids_patch = False
    await here.until(lambda: api.replicas == 1)
    assert here.is_marked(1)
    here.asked.note("interactive", 1.0)
    await here.until(lambda: api.replicas == 3, work_s=20.0)
    assert not here.is_marked(1), "its pod is wanted again"


async def test_an_api_that_is_away_fails_no_round(here: PoolHome, api: KubernetesApi) -> None:
    here.join(0, "penny-0")
    api.hangs, here.timeout_s = True, 0.2
    await here.until(lambda: "does not answer within 0.2 s" in here.shown, work_s=20.0)
    await here.until(lambda: bool(here.changes), work_s=20.0)
    assert not here.changes[0].is_done and not api.patches


async def test_marks_end_with_who_looks_after_the_pods(here: PoolHome, api: KubernetesApi) -> None:
    api.replicas = 2
    here.join(1, "penny-1")
    await here.until(lambda: api.replicas == 1)
    assert here.is_marked(1)
    here.set_mode("off")
    await here.planner.round()
    assert not here.is_marked(1)


async def test_a_dry_run_asks_and_changes_nothing(here: PoolHome, api: KubernetesApi) -> None:
    here.set_mode("dry-run")
    await here.until(lambda: any(each.after == 3 for each in here.changes), work_s=20.0)
    assert not api.patches and not any(each.is_done for each in here.changes)
