"""A planner starts and ends engines of several models side by side, as many starts as it may, and
breaks off those that are not needed any more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.fleet.planner.machine import Machine
from gateway.fleet.planner.planner import Planner
from gateway.fleet.planner.scaling import PutInForce, ScalingError
from gateway.fleet.planner.view import PlacedEngine, PlannedChange, PlannerView
from gateway.fleet.sent_work import AskedWork
from gateway.home import Home
from gateway.settings.load import Settings, load
from tests.scratch import scratch_for_a_while

MODEL = '[[model]]\nname = "{}"\npath = "models/penny"\nreplicas = "{}"\n'
GIB = 2**30
COOLDOWN_S = 60.0


class EnginesOfATest:
    """Engines that are numbers in settings; each start waits until a test ends it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.starting: dict[str, list[asyncio.Future[str]]] = {"a": [], "b": []}
        self.taking_up = asyncio.Event()
        self.taking_up.set()

    async def start(self, model: str) -> PutInForce:
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.starting[model].append(outcome)
        try:
            problem = await outcome
        finally:
            self.starting[model].remove(outcome)
        if problem:
            raise ScalingError(problem, is_outdated=problem == "outdated")

        async def put_in_force() -> None:
            await self.taking_up.wait()
            self._size(model, self.numbers[model] + 1)

        return put_in_force

    async def shrink(self, model: str, number: int, wakes_in_s: float | None) -> None:
        self._size(model, min(number, self.numbers[model]))

    @property
    def numbers(self) -> Mapping[str, int]:
        return {each.name: len(each.started) for each in self.settings.models}

    def _size(self, name: str, number: int) -> None:
        models = tuple(
            each.sized(number) if each.name == name else each for each in self.settings.models
        )
        self.settings = msgspec.structs.replace(self.settings, models=models)

    def end(self, model: str, problem: str = "") -> None:
        """End the oldest start of a model."""
        next(each for each in self.starting[model] if not each.done()).set_result(problem)


class PlannedHome:
    """A home whose time passes from round to round."""

    def __init__(self, folder: Path, ranges: Mapping[str, str], planner: str) -> None:
        text = "".join(MODEL.format(*each) for each in ranges.items())
        path = folder / "tollgate.toml"
        path.write_text(f"{text}[fleet.planner]\ncooldown_s = {COOLDOWN_S}\n{planner}")
        self.home = Home(folder / "home")
        self.home.create()
        self.engines = EnginesOfATest(load({"config": path, "home": folder / "home"}, {}))
        self.asked = {name: AskedWork(self.home.asked_of(name)) for name in ranges}
        self.changes: list[PlannedChange] = []
        self.now_s, self.available = 1_000_000.0, 64 * GIB
        self.placed: list[PlacedEngine] = []
        self.planner = Planner(
            self.home,
            lambda: self.engines.settings,
            self.engines,
            self._note,
            Machine(
                available_bytes=lambda: self.available,
                engine_bytes=lambda address: None,
                growing_bytes=lambda: 0,
                expected_bytes=lambda model, models: GIB,
                num_threads=lambda model, models: 1,
                num_cores=64,
                placed=lambda: self.placed,
            ),
            clock=lambda: self.now_s,
        )

    async def _note(self, change: PlannedChange) -> None:
        self.changes.append(change)

    async def round(self, **work_s: float) -> None:
        """Have 5 s pass, with so many seconds of work asked of models."""
        self.now_s += 5.0
        for name, seconds in work_s.items():
            for _ in range(10):
                self.asked[name].note("interactive", seconds / 10)
        await self.planner.round()
        await self.go_on()

    async def go_on(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def until(self, done: Callable[[], bool], **work_s: float) -> None:
        for _ in range(200):
            if done():
                return
            await self.round(**work_s)
        raise AssertionError(f"{self.engines.numbers}, {self.num_starting}")

    @property
    def num_starting(self) -> dict[str, int]:
        return {name: len(each) for name, each in self.engines.starting.items()}

    def shown(self, model: str) -> Any:
        view = PlannerView.read(self.home.planner_view)
        assert view is not None
        return next(each for each in view.models if each.model == model)


@pytest.fixture
def folder() -> AsyncIterator[Path]:
    with scratch_for_a_while() as made:
        yield Path(made)


async def test_models_grow_side_by_side_and_each_engine_serves_once_it_is_ready(
    folder: Path,
) -> None:
    here = PlannedHome(folder, {"a": "1..4", "b": "1..4"}, "starts_at_once = 4\n")
    await here.until(lambda: here.num_starting == {"a": 2, "b": 2}, a=40, b=40)
    await here.round(a=40, b=40)
    assert here.num_starting == {"a": 2, "b": 2}, "no more start at a time"
    assert here.shown("a").starting == 2 and "1 more start" in here.shown("a").problem
    here.engines.end("b")
    await here.go_on()
    assert here.engines.numbers == {"a": 1, "b": 2}, "it waits for no other one"
    await here.round(a=40, b=40)
    assert sum(here.num_starting.values()) == 4
    while any(here.num_starting.values()):
        for name, number in here.num_starting.items():
            if number:
                here.engines.end(name)
        await here.round(a=40, b=40)
    assert here.engines.numbers == {"a": 4, "b": 4}
    made = Counter((each.model, each.before, each.after) for each in here.changes)
    assert made == {(name, n, n + 1): 1 for name in "ab" for n in (1, 2, 3)}
    assert all(each.is_done for each in here.changes)


async def test_one_shrinks_while_another_one_starts(folder: Path) -> None:
    here = PlannedHome(folder, {"a": "1..2", "b": "1..3"}, "")
    await here.until(lambda: here.num_starting["b"] == 2, b=40)
    for _ in range(2):
        here.engines.end("b")
    await here.until(lambda: here.num_starting == {"a": 1, "b": 0}, a=40)
    await here.until(lambda: here.engines.numbers["b"] == 1, a=40)
    assert here.num_starting["a"] == 1 and here.engines.numbers["a"] == 1


async def test_a_start_that_is_not_needed_any_more_is_broken_off(folder: Path) -> None:
    here = PlannedHome(folder, {"a": "1..4", "b": "1..1"}, "")
    await here.until(lambda: here.num_starting["a"] == 3, a=40)
    here.engines.taking_up.clear()
    here.engines.end("a")
    await here.until(lambda: here.num_starting["a"] == 0)
    assert here.engines.numbers["a"] == 1, "one is being put in force, which is not broken off"
    here.engines.taking_up.set()
    await here.until(lambda: here.engines.numbers["a"] == 1 and not here.planner._pools["a"].starts)
    told = Counter(each.is_done for each in here.changes)
    assert told[False] == 2 and told[True] == 2, "one came, and left again"
    assert "not needed any more" in here.changes[0].why


async def test_starts_that_fail_together_are_one_failure(folder: Path) -> None:
    here = PlannedHome(folder, {"a": "1..4", "b": "1..1"}, "")
    await here.until(lambda: here.num_starting["a"] == 3, a=40)
    for _ in range(3):
        here.engines.end("a", "no such file")
    await here.go_on()
    await here.round(a=40)
    assert here.num_starting["a"] == 0 and here.shown("a").problem == "no such file"
    assert here.planner._pools["a"].failures == 1
    await here.until(lambda: here.num_starting["a"] == 3, a=40)
    here.engines.end("a", "outdated")
    await here.go_on()
    await here.round(a=40)
    assert here.num_starting["a"] == 3, "what the settings want now is tried at once"


async def test_growth_waits_for_the_room_that_another_one_makes(folder: Path) -> None:
    here = PlannedHome(folder, {"a": "1..2", "b": "1..2"}, "")
    await here.until(lambda: here.num_starting["b"] == 1, b=40)
    here.engines.end("b")
    await here.go_on()
    here.available = GIB // 2
    for _ in range(int(COOLDOWN_S // 5)):
        await here.round(a=40)
        assert here.num_starting["a"] == 0
    await here.until(lambda: here.engines.numbers["b"] == 1, a=40)
    assert here.num_starting["a"] == 0, "the other one has not ended yet"
    here.available = 2 * GIB
    await here.until(lambda: here.num_starting["a"] == 1, a=40)


async def test_where_engines_are_is_shown_also_while_nothing_is_planned(folder: Path) -> None:
    here = PlannedHome(folder, {"a": "1..4"}, 'mode = "off"\n')
    await here.round()
    assert PlannerView.read(here.home.planner_view) is None
    here.placed = [PlacedEngine(engine="a/0", device="cuda:0", bytes=GIB, reason="it fits")]
    await here.round()
    view = PlannerView.read(here.home.planner_view)
    assert view is not None and (view.models, view.engines) == ([], here.placed)
