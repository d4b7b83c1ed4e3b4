"""An engine that lives and does not work is killed and started again; one that loads, works or
leaves by itself is let be."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.processes import watchdog
from gateway.processes.child_processes import Child, spawn
from gateway.processes.restarter import Restarter
from gateway.processes.watchdog import Watchdog
from tests.scratch import scratch_for_a_while

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 1.5
ENGINE = """
    import asyncio, sys, time, msgspec
    from engine.fake.engine import FAKE_CONFIG, FakeCore
    from engine.transport.server import EngineServer

    time.sleep(float(sys.argv[2]))
    core = FakeCore(msgspec.structs.replace(FAKE_CONFIG, step_timeout_s=float(sys.argv[3])))
    asyncio.run(EngineServer(core, sys.argv[1]).serve(asyncio.Event(), drain_timeout_s=1))
"""


class EngineHost:
    """The place where engines without a model are kept; each loads for `load_s`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix:{folder}/engine.sock"
        self.load_s = 0.0
        self.restarter = Restarter("engine", self._start)
        self.begun: list[int] = []

    async def _start(self) -> Child:
        arguments = [self.address, str(self.load_s), str(TIMEOUT_S)]
        child = spawn(
            "engine",
            [sys.executable, "-c", textwrap.dedent(ENGINE), *arguments],
            run=self.folder,
            log=self.folder / "engine.log",
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.begun.append(child.pid)
        return child


@pytest.fixture
async def place() -> AsyncIterator[EngineHost]:
    with scratch_for_a_while() as folder:
        made = EngineHost(Path(folder))
        yield made
        await made.restarter.stop(1)


async def guarded(place: EngineHost, load_timeout_s: float = 60.0) -> asyncio.Task[None]:
    await place.restarter.begin()
    dog = Watchdog(place.restarter, place.address, load_timeout_s=load_timeout_s)
    return asyncio.create_task(dog.run())


async def end(running: asyncio.Task[None]) -> None:
    assert not running.done()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_stopped_engine_is_killed_and_its_successor_let_be(place: EngineHost) -> None:
    running = await guarded(place)
    await until(Path(place.address.removeprefix("unix:")).exists)
    await asyncio.sleep(2 * watchdog.LOOK_INTERVAL_S)
    assert place.restarter.exits == 0
    (pid,) = place.begun
    place.load_s = 3 * TIMEOUT_S  # longer than a working engine may be silent
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    await until(lambda: place.restarter.exits == 1)
    # Twice the timeout since it was last heard of, which may be a heartbeat before it was stopped.
    assert time.monotonic() - stopped > 0.8 * TIMEOUT_S, "a slow one has its chance"
    assert place.restarter.last_exit is not None
    assert place.restarter.last_exit.poll() == -signal.SIGKILL
    await until(lambda: len(place.begun) == 2)
    await asyncio.sleep(place.load_s + 3 * TIMEOUT_S)
    assert (place.restarter.exits, len(place.begun)) == (1, 2)
    await end(running)


async def test_one_that_never_listens_is_killed_in_the_end(place: EngineHost) -> None:
    place.load_s = 600
    running = await guarded(place, load_timeout_s=1.0)
    await until(lambda: place.restarter.exits == 1)
    await until(lambda: len(place.begun) == 2)
    await end(running)


async def test_an_exit_is_the_keepers_business(place: EngineHost) -> None:
    running = await guarded(place)
    for exits in (1, 2):
        await until(lambda exits=exits: len(place.begun) == exits)  # type: ignore[misc]
        await asyncio.sleep(2 * watchdog.LOOK_INTERVAL_S)
        os.kill(place.begun[-1], signal.SIGKILL)
        await until(lambda exits=exits: place.restarter.exits == exits)  # type: ignore[misc]
    await end(running)
