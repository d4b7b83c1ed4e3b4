"""A worker that is told by SIGHUP to read its settings again, and what it reports."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from sqlalchemy.exc import SQLAlchemyError

from foundation.tasks import end_tasks
from gateway.app.settings_follower import Complete, SettingsFollower
from gateway.installation.merge import Merger
from gateway.lanes import LaneDeadlines
from gateway.settings.file import SettingsError
from gateway.settings.live import LiveSettings, WorkerReport
from gateway.settings.load import SavedSettings, Settings, load
from tests.gateway.whole_app import SECRET


class Scripted:
    """A configuration that takes settings up, or raises what `error` is."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.merger = Merger("home", SECRET)
        self.applied: list[LiveSettings] = []
        self.error: Exception | None = None
        self.engine_addresses = {"unix:/b", "unix:/a"}
        self.on_engine_released: Callable[[], None] = lambda: None

    async def apply(self, live: LiveSettings) -> None:
        if self.error is not None:
            raise self.error
        self.applied.append(live)


class Following:
    """A follower, and the other end of its pipe."""

    def __init__(self, folder: Path, reader: int) -> None:
        self._reader, self._unread = reader, b""
        config = folder / "tollgate.toml"
        config.write_text('[[model]]\nname = "far"\nupstream = "http://h/v1"\n')
        self.settings = load({"home": folder / "home", "config": config}, {})
        self.configuration = Scripted(self.settings)
        self.number, self.problem = 1, ""

    def read_again(self) -> SavedSettings:
        if self.problem:
            raise SettingsError(self.problem)
        self.number += 1
        return SavedSettings(number=self.number, settings=self.settings)

    async def reported(self) -> WorkerReport:
        while b"\n" not in self._unread:
            self._unread += await asyncio.to_thread(os.read, self._reader, 65536)
        line, _, self._unread = self._unread.partition(b"\n")
        return msgspec.json.decode(line, type=WorkerReport)


@asynccontextmanager
async def following(folder: Path, complete: Complete | None = None) -> AsyncIterator[Following]:
    reader, writer = os.pipe()
    found = Following(folder, reader)
    follower = SettingsFollower(found.configuration, found.read_again, 1, writer, complete)
    task = asyncio.create_task(follower.run())
    before = signal.getsignal(signal.SIGHUP)
    try:
        async with asyncio.timeout(60):
            yield found
    finally:
        await end_tasks(task)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)
        os.close(writer)
        os.close(reader)


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


async def test_it_says_what_it_has_and_takes_up_what_it_reads(tmp_path: Path) -> None:
    async with following(tmp_path) as found:
        engines = ("unix:/a", "unix:/b")
        assert await found.reported() == WorkerReport(number=1, engines=engines)
        hang_up()
        assert await found.reported() == WorkerReport(number=2, engines=engines)
        assert [each.models for each in found.configuration.applied] == [found.settings.models]
        found.configuration.engine_addresses = set()
        found.configuration.on_engine_released()
        assert await found.reported() == WorkerReport(number=2)


@pytest.mark.parametrize("error", [SettingsError("x: no"), OSError("x: no"), KeyError("x: no")])
async def test_what_it_cannot_take_up_is_refused_by_its_number(
    tmp_path: Path, error: Exception
) -> None:
    async with following(tmp_path) as found:
        assert (await found.reported()).refused is None
        found.configuration.error = error
        hang_up()
        refused = await found.reported()
        assert (refused.number, refused.refused) == (1, 2) and "x: no" in refused.problem
        found.configuration.error = None
        hang_up()
        assert (await found.reported()).number == 3


async def test_settings_that_cannot_be_read_change_nothing(tmp_path: Path) -> None:
    async with following(tmp_path) as found:
        await found.reported()
        found.problem = "y: unknown key"
        hang_up()
        refused = await found.reported()
        assert (refused.number, refused.problem) == (1, "y: unknown key")
        assert found.configuration.applied == []


async def test_it_follows_on_when_nobody_reads(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    found = Following(tmp_path, reader)
    follower = SettingsFollower(found.configuration, found.read_again, 1, writer)
    os.close(reader)
    follower.report()
    follower.report()
    os.close(writer)


async def test_what_is_stored_is_added_to_what_was_read(tmp_path: Path) -> None:
    """In a gateway that runs alone."""

    async def complete(settings: Settings) -> Settings:
        return msgspec.structs.replace(settings, deadlines=LaneDeadlines(batch=7))

    async with following(tmp_path, complete) as found:
        await found.reported()
        os.kill(os.getpid(), signal.SIGHUP)
        await found.reported()
        assert found.configuration.applied[-1].deadlines.batch == 7


async def test_what_cannot_be_read_of_it_is_the_problem_of_the_reload(tmp_path: Path) -> None:
    async def complete(settings: Settings) -> Settings:
        raise SQLAlchemyError("Postgres is away")

    async with following(tmp_path, complete) as found:
        await found.reported()
        os.kill(os.getpid(), signal.SIGHUP)
        report = await found.reported()
        assert (report.refused, report.problem) == (2, "Postgres is away")
        assert found.configuration.applied == []
