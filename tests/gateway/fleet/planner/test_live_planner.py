"""A planner over engines that are processes, under traffic: they come with the load, go with it by
drain, and no request fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gateway.fleet.planner.planner import Planner
from gateway.fleet.planner.view import PlannedChange, PlannerView
from gateway.processes import engine_set
from gateway.processes.reload import Reload
from gateway.processes.worker_set import WorkerSet
from gateway.settings.load import Settings, load
from tests.gateway.app.test_replicas import PENNY, WAIT_S, Installation, fake_command
from tests.scratch import scratch_for_a_while

FASTER = 200.0
"""Seconds of the planner's clock in one."""
PROMPT_S = 300.0
"""The work that a request is said to be: several engines are busy with those of this test."""
RANGE = """
[fleet.planner]
interval_s = 0.1
cooldown_s = 100
idle_s = 200
"""


class OneWorker:
    """Takes up what all workers do, in this process."""

    def __init__(self, here: Installation) -> None:
        self._here = here

    async def take_up(self, settings: Settings) -> None:
        models = self._here.models
        models.swap(await models.prepare(settings, wait_s=WAIT_S))

    @property
    def engines_in_use(self) -> Any:
        return self._here.models.clients


class PlannedInstallation(Installation):
    """An installation whose planner has a fast clock."""

    async def begin(self, text: str) -> None:
        path = self.folder / "tollgate.toml"
        path.write_text(text)
        read = load({"config": path, "home": self.home.root}, {})
        settings = msgspec.structs.replace(read, models=self.engines.place(read.models))
        await self.engines.until_ready(await self.engines.begin(settings))
        worker = OneWorker(self)
        await worker.take_up(settings)
        self.engines.watch(settings.models)
        self.changes: list[PlannedChange] = []
        self.reload = Reload(
            lambda: read,
            cast(Any, None),
            as_read=settings,
            settings=settings,
            engines=self.engines,
            workers=cast(WorkerSet, worker),
            say=lambda line: None,
        )
        room = {"num_cores": 64, "available_bytes": lambda: None}  # not this machine's
        planner = Planner(
            self.home,
            lambda: self.reload.settings,
            self.reload,
            self.note,
            msgspec.structs.replace(self.engines.machine(), **room),
            clock=lambda: FASTER * time.time(),
        )
        self.planning = asyncio.create_task(planner.run())

    async def note(self, change: PlannedChange) -> None:
        self.changes.append(change)

    async def ask(self) -> None:
        asked = self.models.fleet.routes[0].asked
        assert asked is not None
        asked.note("interactive", PROMPT_S)
        await super().ask()

    @property
    def num_running(self) -> int:
        [model] = self.reload.settings.models
        return 0 if model.is_asleep else len(model.engines)


@pytest.fixture
async def here(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PlannedInstallation]:
    monkeypatch.setattr(engine_set, "engine_command", fake_command)
    with scratch_for_a_while() as folder:
        made = PlannedInstallation(Path(folder))
        yield made
        made.planning.cancel()
        await asyncio.wait({made.planning})
        await made.close()


async def test_engines_come_with_the_load_and_go_with_it(here: PlannedInstallation) -> None:
    await here.begin(PENNY + 'replicas = "1..3"\n' + RANGE)
    async with here.traffic():
        await here.until(lambda: here.num_running == 3)
        await here.until_all_have_worked()
    await here.until(lambda: here.num_running == 1)
    await here.until(lambda: len(here.running()) == 1)
    async with here.traffic():  # those that were ended are not asked
        await here.until_all_have_worked()
    assert {each.model for each in here.changes} == {"penny"} and here.changes[0].before == 1
    view = PlannerView.read(here.home.planner_view)
    assert view is not None and view.models[0].start_s is not None
    assert [each.is_done for each in view.changes] == [True] * len(view.changes)


async def test_a_dry_run_says_what_it_would_do(here: PlannedInstallation) -> None:
    await here.begin(PENNY + 'replicas = "1..3"\n' + RANGE + 'mode = "dry-run"\n')
    async with here.traffic():
        await here.until(lambda: any(each.after == 3 for each in here.changes))
    assert here.num_running == 1 and not any(each.is_done for each in here.changes)


async def test_a_model_goes_to_zero_and_is_back_when_it_is_asked_for(
    here: PlannedInstallation,
) -> None:
    await here.begin(PENNY + 'replicas = "0..2"\n' + RANGE)
    await here.until(lambda: here.num_running == 0)
    await here.until(lambda: not here.running())
    [route] = here.models.fleet.routes
    assert route.is_asleep and route.asked is not None
    here.models.fleet.order(route)
    await here.until(lambda: not here.models.fleet.routes[0].is_asleep)
    await here.ask()
    assert [(each.before, each.after) for each in here.changes][:2] == [(1, 0), (0, 1)]
    assert here.reload.settings.models[0].wakes_in_s is None
