"""Workers take up settings all together, or go back to those before; with workers that only say
what they are told to."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.home import Home
from gateway.processes import worker_set
from gateway.processes.child_processes import Child, spawn
from gateway.processes.worker_set import SettingsRefused, WorkerSet
from gateway.settings.load import Settings, load, restore

SCRIPTED = """
import json, os, signal, sys, time
from pathlib import Path

at = dict(zip(sys.argv[1::2], sys.argv[2::2]))
slot, fd, path = at["--id"].split("-")[0], int(at["--report-fd"]), Path(at["--settings"])
folder = path.parents[1]
wanted = {signal.SIGHUP, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)

def say(**report):
    os.write(fd, json.dumps(report).encode() + b"\\n")

def number():
    return json.loads(path.read_text())["number"]

if (folder / f"dies-{slot}").exists():
    sys.exit(3)
now = number()
say(number=now, engines=[f"unix:/engine-of-{slot}"])
while signal.sigwait(wanted) != signal.SIGTERM:
    if (folder / f"silent-{slot}").exists():
        (folder / f"silent-{slot}").unlink()
    elif (folder / f"refuses-{slot}").exists():
        (folder / f"refuses-{slot}").unlink()
        say(number=now, refused=number(), problem=f"worker {slot} cannot")
    else:
        now = number()
        say(number=now, engines=[])
"""


class Workers:
    """A set of two scripted workers of a home."""

    def __init__(self, home: Home, settings: Settings) -> None:
        self.home, self.settings = home, settings
        self.left: list[Child] = []
        self.said: list[str] = []
        self.set = WorkerSet(home, 0, self.left.append)

    def with_lines(self, number: int) -> Settings:
        return msgspec.structs.replace(self.settings, max_batch_lines=number)

    @property
    def saved(self) -> Settings:
        return restore(self.home.worker_settings).settings

    @property
    def numbers(self) -> set[int]:
        return {each.number for each in self.set.reports.all}

    @property
    def pids(self) -> set[int]:
        return {each.child.pid for each in self.set.restarters if each.child is not None}


@pytest.fixture
async def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workers]:
    def scripted(name: str, argv: list[str], **more: Any) -> Child:
        more["pass_fds"] = more["pass_fds"][1:]
        return spawn(name, [sys.executable, "-c", SCRIPTED, *argv[4:]], **more)

    monkeypatch.setattr(worker_set, "spawn", scripted)
    config = tmp_path / "tollgate.toml"
    config.write_text('workers = 2\n[[model]]\nname = "m"\nupstream = "http://h/v1"\n')
    settings = load({"home": tmp_path / "home", "config": config}, {})
    home = Home(settings.home)
    home.create()
    found = Workers(home, settings)
    await found.set.begin(settings)
    yield found
    await found.set.stop()


async def test_all_take_up_new_settings_and_stay(workers: Workers) -> None:
    before = workers.pids
    assert workers.numbers == {1}
    assert workers.set.engines_in_use == {"unix:/engine-of-0", "unix:/engine-of-1"}
    await workers.set.take_up(workers.with_lines(7))
    assert workers.numbers == {2} and workers.pids == before
    assert workers.saved.max_batch_lines == 7 and not workers.set.engines_in_use


@pytest.mark.parametrize("slot", [0, 1])
async def test_one_that_refuses_takes_all_back(workers: Workers, slot: int) -> None:
    (workers.home.root / f"refuses-{slot}").touch()
    with pytest.raises(SettingsRefused, match=f"^worker {slot} cannot$"):
        await workers.set.take_up(workers.with_lines(7))
    assert workers.numbers == {3}, "those before, once more"
    assert workers.saved == workers.settings


async def test_replaced_workers_have_the_new_settings(workers: Workers) -> None:
    before = workers.pids
    fresh = msgspec.structs.replace(workers.with_lines(7), workers=3)
    await workers.set.replace(fresh, workers.said.append)
    assert len(workers.pids) == 3 and not workers.pids & before
    assert workers.numbers == {2} and len(workers.left) == 2
    assert workers.said == ["Replacing worker 1 of 2.", "Replacing worker 2 of 2."]
    await workers.set.replace(workers.settings, workers.said.append)
    assert len(workers.pids) == 2 and workers.numbers == {3}


async def test_a_new_worker_that_does_not_start_takes_all_back(workers: Workers) -> None:
    """The first is replaced by then: it goes back to the settings before by itself."""
    (workers.home.root / "dies-1").touch()
    with pytest.raises(SettingsRefused, match="worker-1 left with status 3"):
        await workers.set.replace(workers.with_lines(7), workers.said.append)
    assert workers.saved == workers.settings and len(workers.pids) == 2
    assert workers.numbers == {3}


async def test_one_that_was_killed_comes_back_with_the_settings_in_force(workers: Workers) -> None:
    (first, _) = workers.set.restarters
    assert first.child is not None
    killed = first.child
    os.kill(killed.pid, signal.SIGKILL)
    await workers.set.take_up(workers.with_lines(7))
    assert first.child is not killed and workers.numbers == {2}


async def test_one_that_gives_no_answer_is_replaced(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_set, "TAKE_UP_TIMEOUT_S", 0.0)
    before = workers.pids
    (workers.home.root / "silent-1").touch()
    await workers.set.take_up(workers.with_lines(7))
    await workers.set.reports.until(lambda: workers.numbers == {2})  # the replaced one is gone
    assert before - workers.pids
    assert workers.saved.max_batch_lines == 7


async def test_a_report_that_cannot_be_read_is_that_of_nobody(workers: Workers) -> None:
    reader, writer = os.pipe()
    workers.set.reports.listen(reader)
    os.write(writer, b'{"number": "x"}\n')
    await workers.set.reports.until(lambda: not workers.set.reports.hears(reader))
    os.close(writer)
    assert len(workers.set.reports.all) == 2
