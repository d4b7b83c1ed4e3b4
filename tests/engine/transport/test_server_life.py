"""engine.transport.server from its address to its end: listening, idling, draining, dying."""

from __future__ import annotations

import asyncio
import logging
import socket
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

import engine.transport.server
import engine.transport.step_loop
from engine.errors import (
    ConfigError,
    EngineStepFailed,
    EngineUnavailable,
)
from engine.fake.engine import FakeCore
from engine.protocol import (
    EngineOutput,
    ReplicaStatus,
)
from engine.transport.client import EngineClient
from engine.transport.entrance import is_loopback
from engine.transport.frames import open_connection
from engine.transport.server import EngineServer
from engine.transport.step_loop import Result, StepLoop
from tests.engine.peers import (
    CONFIG,
    GatedCore,
    Join,
    Serve,
    settle,
    submit,
    until,
)

# ---- status and idling


async def test_statuses_are_rare_while_busy_and_prompt_when_idle(join: Join, serve: Serve) -> None:
    class Slow(FakeCore):
        def step(self) -> list[EngineOutput]:
            time.sleep(0.001)
            return super().step()

    config = msgspec.structs.replace(CONFIG, status_interval_s=0.1)
    start = time.monotonic()
    peer = await join(await serve(Slow(config)))
    peer.say(submit("a", max_tokens=300))
    statuses: list[ReplicaStatus] = []
    async with asyncio.timeout(30):
        while not statuses or statuses[-1].generated_tokens < 300:
            message = await peer._frames.read()
            if isinstance(message, ReplicaStatus):
                statuses.append(message)
    elapsed_s = time.monotonic() - start
    assert 2 <= len(statuses) <= elapsed_s / 0.1 + 2
    assert statuses[-1].num_running == 0


async def test_an_idle_engine_sleeps(join: Join, serve: Serve) -> None:
    core = FakeCore(CONFIG)
    asked = 0

    class Counting(FakeCore):
        def has_work(self) -> bool:
            nonlocal asked
            asked += 1
            return super().has_work()

    core = Counting(CONFIG)
    peer = await join(await serve(core))
    peer.say(submit("a"))
    await peer.last_of("a")
    await settle()
    before, began = asked, time.monotonic()
    await asyncio.sleep(0.5)
    assert asked - before <= 3 + 20 * (time.monotonic() - began)


async def test_an_idle_engine_is_checked_but_not_all_the_time(
    monkeypatch: pytest.MonkeyPatch, join: Join, serve: Serve
) -> None:
    """Idle three times, each long enough for a check: one check within the interval."""
    monkeypatch.setattr(engine.transport.step_loop, "IDLE_CHECK_S", 0.05)
    checks = 0

    class Counting(FakeCore):
        def check_integrity(self) -> None:
            nonlocal checks
            checks += 1
            super().check_integrity()

    async def work_then_idle(name: str) -> None:
        peer.say(submit(name))
        await peer.last_of(name)
        await asyncio.sleep(0.2)

    peer = await join(await serve(Counting(CONFIG)))
    await work_then_idle("a")
    await until(lambda: checks == 1)
    for name in ("b", "c"):
        await work_then_idle(name)
    assert checks == 1
    monkeypatch.setattr(engine.transport.step_loop, "INTEGRITY_INTERVAL_S", 0.0)
    await work_then_idle("d")
    await until(lambda: checks == 2)


# ---- the end


def served(
    core: FakeCore, tmp_path: Path, stop: asyncio.Event, drain_timeout_s: float
) -> tuple[EngineServer, asyncio.Task[None]]:
    server = EngineServer(core, f"unix:{tmp_path}/s")
    return server, asyncio.create_task(server.serve(stop, drain_timeout_s=drain_timeout_s))


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    core, stop = GatedCore(), asyncio.Event()
    _, serving = served(core, tmp_path, stop, 60)
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=30)
    stream = client.generate(submit("a").request)
    core.allow(1)
    outputs = [await anext(stream)]
    stop.set()
    await settle()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await anext(client.generate(submit("b").request))
    with pytest.raises(OSError):
        await open_connection(f"unix:{tmp_path}/s")
    core.allow(10)
    outputs += [output async for output in stream]
    assert outputs[-1].finish_reason == "length"
    await asyncio.wait_for(serving, 30)
    assert not (tmp_path / "s").exists()
    await client.close()
    core.check_integrity()


async def test_a_drain_is_bounded_and_what_is_cut_is_billed(tmp_path: Path) -> None:
    core, stop = GatedCore(), asyncio.Event()
    server, serving = served(core, tmp_path, stop, 0.1)
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=30)
    stream = client.generate(submit("a", max_tokens=1000).request)
    core.allow(3)
    outputs = [await anext(stream)]
    await until(lambda: core.entered == 4)
    stop.set()
    await until(lambda: server._live["a"].aborting)
    core.allow(1)
    outputs += [output async for output in stream]
    assert outputs[-1].finish_reason == "abort"
    assert outputs[-1].usage.generated_tokens == 4
    await asyncio.wait_for(serving, 30)
    await client.close()


@pytest.mark.parametrize("where", ["step", "abort", "integrity", "stranger"])
async def test_a_dead_step_thread_ends_the_server_at_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.transport.step_loop, "IDLE_CHECK_S", 0.3)

    class Broken(FakeCore):
        def step(self) -> list[EngineOutput]:
            assert where != "step", "broken step"
            if where == "abort":
                time.sleep(0.001)  # the answer must not be whole before the abort is there
            outputs = super().step()
            if where == "stranger":  # an output of nobody's request
                outputs.append(msgspec.structs.replace(outputs[0], request_id="nobody's"))
            return outputs

        def abort(self, request_id: str) -> list[EngineOutput]:
            assert where != "abort", "broken abort"
            return super().abort(request_id)

        def check_integrity(self) -> None:
            assert where != "integrity", "broken integrity"

    _, serving = served(Broken(CONFIG), tmp_path, asyncio.Event(), 60)
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=30)
    stream = client.generate(submit("a", max_tokens=4000).request)
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            await client.abort("a")
        await until(lambda: not client.connected)  # the check of an idle engine has failed
        await anext(client.generate(submit("b").request))
    with pytest.raises(EngineStepFailed):
        await asyncio.wait_for(serving, 30)
    await client.close()


async def test_a_failed_step_is_found_by_the_ids_of_the_requests_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeCore):
        def step(self) -> list[EngineOutput]:
            raise RuntimeError("provoked")

    _, serving = served(Broken(CONFIG), tmp_path, asyncio.Event(), 60)
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=30)
    asked = msgspec.structs.replace(submit("a").request, log_id="req_1")
    with pytest.raises(EngineUnavailable):
        await anext(client.generate(asked))
    with pytest.raises(EngineStepFailed):
        await asyncio.wait_for(serving, 30)
    await client.close()
    [said] = [each for each in caplog.records if "req_1" in each.getMessage()]
    assert said.exc_info is not None
    assert str(said.exc_info[1]) == "provoked"


def test_a_receiver_that_falls_behind_stops_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.transport.step_loop, "MAX_UNDELIVERED", 3)
    core = FakeCore(CONFIG)
    received: list[Sequence[Result]] = []
    loop = StepLoop(
        core,
        on_results=received.append,
        on_status=lambda status: None,
        on_cache=lambda changes: None,
        on_failure=lambda error: None,
    )
    loop.start()
    loop.submit(submit("a", max_tokens=4000).request)
    for delivered in (3, 4):
        deadline = time.monotonic() + 30
        while len(received) < delivered and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(received) == delivered, "it goes on when one was taken, and for one more"
        loop.delivered()
    assert loop.stop(30)


# ---- addresses


async def test_a_closing_engine_leaves_its_successors_socket(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since the drain began nobody listened there; inode numbers are given away again at once."""
    path = tmp_path / "s"
    old, new = (EngineServer(FakeCore(CONFIG), f"unix:{path}") for _ in range(2))
    await old.start()
    await old.drain(1)
    await new.start()
    await old.close()
    assert path.exists()
    peer = await join(new)
    peer.say(submit("a"))
    await peer.last_of("a")
    await new.close()
    assert not path.exists()


async def test_a_socket_is_this_users_alone_and_is_removed(tmp_path: Path) -> None:
    server = EngineServer(FakeCore(CONFIG), f"unix:{tmp_path}/s")
    await server.start()
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    await server.close()
    assert not (tmp_path / "s").exists()


async def test_a_dead_engines_socket_is_replaced_and_a_live_ones_is_not(
    join: Join, serve: Serve, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(f"{tmp_path}/engine.sock")
    server = await serve(FakeCore(CONFIG))
    with pytest.raises(ConfigError, match="another process does"):
        await EngineServer(FakeCore(CONFIG), server.address).start()
    peer = await join(server)
    peer.say(submit("a"))
    await peer.last_of("a")


async def test_what_cannot_be_listened_on_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for address in (f"unix:{tmp_path}/file", f"unix:{tmp_path}/no/s", "tcp:192.0.2.1:80"):
        with pytest.raises(ConfigError, match="cannot listen on"):
            await EngineServer(FakeCore(CONFIG), address).start()
    assert (tmp_path / "file").read_text() == "precious"


async def test_tcp_on_any_free_port(
    join: Join, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        server = await serve(FakeCore(CONFIG), "tcp:127.0.0.1:0")
    assert not caplog.records
    assert not server.address.endswith(":0")
    peer = await join(server)
    assert peer.writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    peer.say(submit("a"))
    await peer.last_of("a")


def test_what_is_loopback() -> None:
    loopback = ["localhost", "127.0.0.1", "127.8.8.8", "::1"]
    assert [is_loopback(host) for host in loopback] == [True] * 4
    elsewhere = ["0.0.0.0", "10.0.0.1", "::", "engine.example.org"]
    assert [is_loopback(host) for host in elsewhere] == [False] * 4
