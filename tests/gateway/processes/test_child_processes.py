"""Child processes: leftovers, strangers, logs, and one that is kept running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from foundation import tasks
from gateway.processes import restarter
from gateway.processes.child_processes import Child, end_leftovers, spawn
from gateway.processes.restarter import Restarter

ROOT = Path(__file__).resolve().parents[3]
ENV = {"PATH": "/usr/bin:/bin"}
FOREVER = "exec sleep 600"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[partial[Child]]:
    """`start(name, script)`; whatever still runs at the end is killed."""
    yield partial(start_script, tmp_path)
    end_leftovers(tmp_path)


def start_script(folder: Path, name: str, script: str = FOREVER) -> Child:
    return spawn(name, ["/bin/sh", "-c", script], run=folder, log=folder / f"{name}.log", env=ENV)


async def until(condition: partial[bool] | object) -> None:
    assert callable(condition)
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_exit_status_and_pid_file(start: partial[Child], tmp_path: Path) -> None:
    child = start("seven", "exit 7")
    assert await child.wait() == 7
    assert child.poll() == 7
    assert not (tmp_path / "seven.pid").exists()
    assert await child.stop(1) == 7


async def test_a_child_is_asked_before_it_is_made(start: partial[Child], tmp_path: Path) -> None:
    polite = start("polite", "trap 'exit 3' TERM; echo up; while :; do sleep 0.05; done")
    deaf = start("deaf", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    for name in ("polite", "deaf"):
        await until(lambda name=name: (tmp_path / f"{name}.log").read_text() == "up\n")
    assert await polite.stop(20) == 3
    assert await deaf.stop(0.2) == -signal.SIGKILL


async def test_a_ctrl_c_at_the_terminal_is_the_parents_alone(start: partial[Child]) -> None:
    child = start("sleeper")
    assert os.getsid(child.pid) == child.pid
    await child.stop(10)


KILLED_PARENT = """
import os, pathlib, signal, sys
from gateway.processes.child_processes import spawn
folder = pathlib.Path(sys.argv[1])
spawn("orphan", ["/bin/sleep", "600"], run=folder, log=folder / "orphan.log", env={"PATH": "/bin"})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("round_", range(5))
def test_a_parent_killed_in_the_act_of_spawning(tmp_path: Path, round_: int) -> None:
    """Whether the death came before or after the child asked to be told of it."""
    command = [sys.executable, "-c", KILLED_PARENT, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not (tmp_path / "orphan.pid").exists() or not (tmp_path / "orphan.pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = int((tmp_path / "orphan.pid").read_text().split()[1])
    end_leftovers(tmp_path)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not (tmp_path / "orphan.pid").exists()


async def test_a_stranger_with_a_remembered_pid_is_left_alone(
    start: partial[Child], tmp_path: Path
) -> None:
    child = start("mine")
    pid_file = tmp_path / "mine.pid"
    await until(lambda: pid_file.exists() and pid_file.read_text())
    boot, pid, *rest = pid_file.read_text().split(" ")
    later = [*rest[:20], str(int(rest[20]) + 1), *rest[21:]]  # field 22 of proc_pid_stat(5)
    forgeries = {
        "reused pid": " ".join((boot, pid, *later)),
        "another boot": " ".join(("00000000-0000-0000-0000-000000000000", pid, *rest)),
        "gone": " ".join((boot, "4194304", *rest)),
        "cut short": "",
    }
    for name, line in forgeries.items():
        pid_file.write_text(line)
        assert end_leftovers(tmp_path) == [], name
        assert not pid_file.exists()
    assert child.poll() is None
    pid_file.write_text(" ".join((boot, pid, *rest)))
    assert end_leftovers(tmp_path) == ["mine"]
    assert await child.wait() == -signal.SIGTERM


@pytest.fixture
async def kept(start: partial[Child], tmp_path: Path) -> AsyncIterator[Restarter]:
    """One sleeping child, kept; `starts` of the fixture's function count its incarnations."""

    async def begin() -> Child:
        return start(f"kept-{time.monotonic_ns()}")

    made = Restarter("kept", begin)
    yield made
    await made.stop(10)
    assert list(tmp_path.glob("kept-*.pid")) == []


def sleepers(folder: Path) -> list[int]:
    """The pids that are registered and run."""
    lines = [path.read_text().split() for path in folder.glob("kept-*.pid")]
    return [int(line[1]) for line in lines if line]


async def test_a_dead_child_is_started_again(kept: Restarter, tmp_path: Path) -> None:
    await kept.begin()
    for deaths in (1, 2):
        await until(lambda: len(sleepers(tmp_path)) == 1)
        (pid,) = sleepers(tmp_path)
        os.kill(pid, signal.SIGKILL)
        await until(lambda pid=pid: sleepers(tmp_path) not in ([], [pid]))
        assert kept.exits == deaths


async def test_a_stop_waits_for_a_start_to_end_its_own_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start that is cancelled stops the child that nobody else knows, which takes its time."""
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.01)
    monkeypatch.setattr(restarter, "FIRST_BACKOFF_S", 0.01)
    starting, ended = asyncio.Event(), asyncio.Event()

    async def start_slowly() -> Child:
        try:
            starting.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            ended.set()
        raise AssertionError

    made = Restarter("slow", start_slowly)
    made._task = asyncio.create_task(made._keep())
    async with asyncio.timeout(30):
        await starting.wait()
        await made.stop(10)
    assert ended.is_set()


async def test_a_replacement_comes_before_the_old_one_goes(kept: Restarter, tmp_path: Path) -> None:
    gone: list[Child] = []
    kept.on_exit = gone.append
    await kept.begin()
    await until(lambda: len(sleepers(tmp_path)) == 1)
    (old,) = sleepers(tmp_path)
    await kept.replace(10)
    assert [child.pid for child in gone] == [old]
    await until(lambda: len(sleepers(tmp_path)) == 1)
    assert sleepers(tmp_path) != [old]
    await asyncio.sleep(restarter.FIRST_BACKOFF_S * 2)
    assert kept.exits == 0, "a replaced child was counted as dead"


async def test_a_replacement_that_fails_leaves_the_old_one(start: partial[Child]) -> None:
    fail = False

    async def begin() -> Child:
        if fail:
            raise OSError("no")
        return start("only")

    made = Restarter("only", begin)
    await made.begin()
    fail = True
    with pytest.raises(OSError, match="no"):
        await made.replace(10)
    assert made.exits == 0
    await made.stop(10)


async def test_stop_ends_one_that_was_still_leaving(start: partial[Child], tmp_path: Path) -> None:
    """A rolling restart that is cut short by Ctrl-C."""
    scripts = iter(["trap '' TERM; echo up; while :; do sleep 0.05; done", FOREVER])

    async def begin() -> Child:
        return start(f"kept-{time.monotonic_ns()}", next(scripts))

    made = Restarter("kept", begin)
    await made.begin()
    await until(lambda: [p.read_text() for p in tmp_path.glob("*.log")] == ["up\n"])
    rolling = asyncio.create_task(made.replace(600))
    await until(lambda: len(sleepers(tmp_path)) == 2)
    pids = sleepers(tmp_path)
    rolling.cancel()
    await asyncio.gather(rolling, return_exceptions=True)
    await made.stop(0.2)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_a_start_that_fails_again_and_again_waits_longer(
    start: partial[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarter, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(restarter, "MAX_BACKOFF_S", 0.1)
    began, waits, sleep = 0, [], asyncio.sleep

    async def begin() -> Child:
        nonlocal began
        began += 1
        if began > 1:
            raise OSError("not now")
        return start("once", "exit 1")

    async def note_wait(delay_s: float) -> None:
        if asyncio.current_task() is made._task:
            waits.append(delay_s)
        await sleep(delay_s)

    monkeypatch.setattr(asyncio, "sleep", note_wait)
    made = Restarter("flaky", begin)
    await made.begin()
    await until(lambda: began >= 7)
    await made.stop(1)
    assert waits[:6] == [0.02, 0.04, 0.08, 0.1, 0.1, 0.1]
