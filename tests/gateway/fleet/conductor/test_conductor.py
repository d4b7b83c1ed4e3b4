"""The conductor beside engines that come and go: what readers find while it lives, and after."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec
import pytest

from engine.fake.engine import FAKE_CONFIG, FakeCore
from engine.prefix_digests import span_keys
from engine.protocol import CacheChanged, CacheSnapshot, EngineRequest, SamplingParams
from engine.transport.client import EngineClient
from engine.transport.server import EngineServer
from foundation.tasks import end_tasks
from gateway.fleet.conductor.followers import CacheFollower
from gateway.fleet.conductor.index_writer import KvIndexWriter
from gateway.fleet.conductor.process import Conductor
from gateway.fleet.kv_index import KvIndex

PROMPT = [*range(1, 401)]
"""Three spans, and more."""
KEYS = span_keys("org", PROMPT, 16)
_numbers = count()


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[FakeCore]:
    """An engine without a model, on a socket."""
    core, stop = FakeCore(FAKE_CONFIG), asyncio.Event()
    serving = asyncio.create_task(
        EngineServer(core, f"unix:{path}").serve(stop, drain_timeout_s=0.0)
    )
    try:
        yield core
    finally:
        stop.set()
        await serving


async def run_prompt(path: Path, prompt: list[int]) -> str:
    """Return the id of the engine that computed it."""
    client = await EngineClient.connect(f"unix:{path}", timeout_s=30)
    request = EngineRequest(
        request_id=f"{next(_numbers)}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1),
        cache_salt="org",
    )
    assert [output async for output in client.generate(request)][-1].finished
    await client.acknowledge(request.request_id)
    engine_id = client.status.engine_id
    await client.close()
    return engine_id


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_who_has_what_is_known_until_its_engine_is_gone(tmp_path: Path) -> None:
    index, sockets = KvIndex(tmp_path / "index"), [tmp_path / "a", tmp_path / "b"]
    conductor = Conductor(tmp_path / "index", [f"unix:{each}" for each in sockets])
    running = asyncio.create_task(conductor.run())
    async with served(sockets[0]):
        first = await run_prompt(sockets[0], PROMPT)
        async with served(sockets[1]):
            second = await run_prompt(sockets[1], PROMPT[:256])
            both = (first, second)
            await until(lambda: index.spans_held(KEYS, both) == [3, 2])
            await run_prompt(sockets[1], PROMPT)
            await until(lambda: index.spans_held(KEYS, both) == [3, 3])
        await until(lambda: index.spans_held(KEYS, both) == [3, 0])
        async with served(sockets[1]):
            heir = await run_prompt(sockets[1], PROMPT)
            await until(lambda: index.spans_held(KEYS, (first, second, heir)) == [3, 0, 3])
    await until(lambda: index.spans_held(KEYS, (first, heir)) == [0, 0])
    state = index.state()
    assert state is not None and state.spans == 0 and state.silent_s < 30
    await end_tasks(running)


@asynccontextmanager
async def conducting(path: Path, engine: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "gateway", "conductor", "--index", str(path)]
    process = await asyncio.create_subprocess_exec(*command, "--engine", f"unix:{engine}")
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_when_it_is_killed_readers_go_on_with_what_it_left(tmp_path: Path) -> None:
    """Under traffic, in a process of its own; the next one takes over."""
    index, socket = KvIndex(tmp_path / "index"), tmp_path / "engine"
    async with served(socket):
        engine = (await run_prompt(socket, PROMPT),)
        async with conducting(tmp_path / "index", socket) as process:
            await until(lambda: index.spans_held(KEYS, engine) == [3])
            asking = asyncio.create_task(ask_for_ever(socket))
            await until(lambda: (state := index.state()) is not None and state.spans > 10)
            os.kill(process.pid, signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
        assert index.spans_held(KEYS, engine) == [3]
        await end_tasks(asking)
        other = [*range(600, 1000)]
        await run_prompt(socket, other)
        assert index.spans_held(span_keys("org", other, 16), engine) == [0]
        async with conducting(tmp_path / "index", socket) as process:
            await until(lambda: index.spans_held(span_keys("org", other, 16), engine) == [3])
            process.terminate()
            assert await process.wait() == 0
        assert index.spans_held(KEYS, engine) == [3], "it leaves what it wrote"


async def ask_for_ever(socket: Path) -> None:
    for number in count():
        await run_prompt(socket, [1 + number % 1000, 1 + number // 1000] * 100)


class Told:
    """A follower of one engine that is not there, whose messages are made here."""

    def __init__(self, folder: Path) -> None:
        self.index = KvIndexWriter(folder / "index")
        self.index.publish()
        self.reader = KvIndex(folder / "index")
        self.follower = CacheFollower("unix:engine", self.index, clock=lambda: 12.5)
        self.follower.connected(msgspec.structs.replace(FakeCore().status(), engine_id="e"))

    @property
    def held(self) -> list[int]:
        return [key for key in range(1, 9) if self.reader.spans_held([key], ("e",)) == [1]]


def packed(*keys: int) -> bytes:
    return b"".join(key.to_bytes(8, "little") for key in keys)


def test_changes_are_applied_in_their_order_and_a_gap_is_noticed(tmp_path: Path) -> None:
    told = Told(tmp_path)
    hear = told.follower.heard
    assert hear(CacheChanged(seq=7, stored=packed(1), since=0.0)), "from before the snapshot"
    assert hear(CacheSnapshot(seq=7, keys=packed(1, 2), last=False))
    assert hear(CacheSnapshot(seq=7, keys=packed(3), last=True))
    assert told.held == [1, 2, 3]
    assert hear(CacheChanged(seq=8, removed=packed(1), stored=packed(4), since=12.0))
    assert told.held == [2, 3, 4]
    state = told.reader.state()
    assert state is not None and state.lag_s == pytest.approx(0.5)
    assert not hear(CacheChanged(seq=10, stored=packed(5), since=12.0))
    assert hear(CacheChanged(seq=11, stored=packed(6), since=12.0)), "asked for once"
    assert hear(CacheSnapshot(seq=11, keys=packed(4, 5, 6), last=True))
    assert told.held == [4, 5, 6]
    told.follower.lost()
    assert told.held == []
