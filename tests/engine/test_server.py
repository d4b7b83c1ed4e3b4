"""engine.server on real sockets: whose requests are whose, who is dropped, what is never lost."""

from __future__ import annotations

import asyncio
import logging
import socket
import stat
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import engine.server
import engine.step_loop
from engine.client import EngineClient
from engine.errors import ConfigError, EngineStepFailed, EngineUnavailable
from engine.fake import FAKE_CONFIG, FakeCore, drawn
from engine.frames import FrameReader, encode_frame, open_connection
from engine.protocol import (
    Abort,
    EngineOutput,
    EngineRequest,
    OrphanAck,
    OrphanedUsage,
    Outputs,
    Rejected,
    ReplicaStatus,
    SamplingParams,
    ServerMessage,
    Submit,
    Usage,
)
from engine.server import EngineServer
from engine.step_loop import Result, StepLoop

Serve = Callable[..., Awaitable[EngineServer]]
Join = Callable[[EngineServer], Awaitable["Peer"]]
CONFIG = msgspec.structs.replace(
    FAKE_CONFIG, max_num_seqs=2, max_waiting=2, status_interval_s=0.02, max_orphans=3
)


class GatedCore(FakeCore):
    """Runs as many steps as `allow` was called for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(msgspec.structs.replace(CONFIG, **options))
        self._gate = threading.Semaphore(0)
        self.entered = 0

    def allow(self, steps: int) -> None:
        self._gate.release(steps)

    def step(self) -> list[EngineOutput]:
        self.entered += 1
        assert self._gate.acquire(timeout=20), "nobody allowed this step"
        return super().step()


class Peer:
    """A gateway that says what it is told to, and hears everything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._frames: FrameReader[ServerMessage] = FrameReader(reader, ServerMessage)
        self.status: ReplicaStatus | None = None
        self.heard: list[ServerMessage] = []

    def say(self, *messages: msgspec.Struct) -> None:
        self.writer.write(b"".join(map(encode_frame, messages)))

    async def next(self) -> ServerMessage | None:
        """The next message that is not a status; None when the engine hung up."""
        async with asyncio.timeout(10):
            while isinstance(message := await self._frames.read(), ReplicaStatus):
                self.status = message
        if message is not None:
            self.heard.append(message)
        return message

    async def until_status(self, wanted: Callable[[ReplicaStatus], bool]) -> None:
        async with asyncio.timeout(10):
            while self.status is None or not wanted(self.status):
                message = await self._frames.read()
                assert message is not None
                if isinstance(message, ReplicaStatus):
                    self.status = message
                else:
                    self.heard.append(message)

    async def last_of(self, request_id: str) -> EngineOutput:
        while True:
            message = await self.next()
            assert message is not None, "the engine hung up"
            if isinstance(message, Outputs):
                for output in message.outputs:
                    if output.request_id == request_id and output.finished:
                        return output

    def vanish(self) -> None:
        self.writer.transport.abort()


@pytest_asyncio.fixture
async def join() -> AsyncIterator[Join]:
    """`await join(server)`: a connected peer, gone at the end."""
    joined: list[Peer] = []

    async def connect(server: EngineServer) -> Peer:
        joined.append(Peer(*await open_connection(server.address)))
        return joined[-1]

    yield connect
    for peer in joined:
        peer.vanish()
    await asyncio.sleep(0)  # the loop closes what was aborted


def submit(request_id: str, prompt: Sequence[int] = (1, 2, 3), n: int = 1, **kw: Any) -> Submit:
    sampling = SamplingParams(**{"max_tokens": 4, **kw})
    return Submit(
        EngineRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling, n=n)
    )


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def settle() -> None:
    """Let the server read what was said: it runs on this loop and needs a few rounds of it."""
    for _ in range(20):
        await asyncio.sleep(0.002)


@pytest_asyncio.fixture
async def gated(serve: Serve) -> AsyncIterator[tuple[GatedCore, EngineServer]]:
    core = GatedCore()
    server = await serve(core)
    yield core, server
    core.allow(10_000)  # so that the thread can be joined


# ---- requests and their connections


async def test_a_request_from_submit_to_idle(join: Join, serve: Serve) -> None:
    peer = await join(await serve(FakeCore(CONFIG)))
    await peer.until_status(lambda status: status.model == "fake")
    message = submit("a", max_tokens=5)
    peer.say(message)
    last = await peer.last_of("a")
    frames = [m for m in peer.heard if isinstance(m, Outputs)]
    ids = [id_ for frame in frames for output in frame.outputs for id_ in output.token_ids]
    assert ids == list(islice(drawn(message.request, 0), 5))
    assert last.usage == Usage(prompt_tokens=3, generated_tokens=5, prefilled=True)
    await peer.until_status(lambda s: s.num_running == 0 and s.generated_tokens == 5)
    assert peer.status is not None
    assert peer.status.num_free_blocks == peer.status.num_blocks


async def test_one_frame_per_step_and_connection(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    one, two = await join(server), await join(server)
    one.say(submit("a", n=3))
    await until(lambda: core.entered == 1)
    two.say(submit("b"))
    await settle()
    core.allow(1)
    first = await one.next()
    assert isinstance(first, Outputs)
    assert [(o.request_id, o.index) for o in first.outputs] == [("a", 0), ("a", 1), ("a", 2)]
    core.allow(4)
    assert (await one.last_of("a")).usage.generated_tokens == 12
    assert (await two.last_of("b")).usage.generated_tokens == 4
    assert len([m for m in one.heard if isinstance(m, Outputs)]) == 4
    for message in two.heard:
        assert isinstance(message, Outputs)
        assert {o.request_id for o in message.outputs} == {"b"}


async def test_refusals_name_code_and_field(
    join: Join, gated: tuple[GatedCore, EngineServer]
) -> None:
    core, server = gated
    peer = await join(server)
    peer.say(submit("blocks"))
    await until(lambda: core.entered == 1)
    # All of these wait for the step in progress, and are refused before the next one.
    peer.say(
        submit("empty", prompt=[]),
        submit("long", prompt=[1] * 4096),
        submit("w1"),
        submit("w2"),
        submit("w3"),
    )
    await settle()
    core.allow(1)
    refused: list[tuple[str, str, str | None]] = []
    while len(refused) < 3:
        if isinstance(message := await peer.next(), Rejected):
            refused.append((message.request_id, message.code, message.param))
    assert refused == [
        ("empty", "invalid_request", "prompt_token_ids"),
        ("long", "context_length_exceeded", "prompt_token_ids"),
        ("w3", "engine_overloaded", None),
    ]
    core.allow(20)
    for request_id in ("w1", "w2"):
        await peer.last_of(request_id)


async def test_an_id_in_use_is_refused_whoever_asks(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    one, two = await join(server), await join(server)
    one.say(submit("a"))
    await until(lambda: core.entered == 1)
    for peer in (one, two):
        peer.say(submit("a"))
        message = await peer.next()
        assert isinstance(message, Rejected)
        assert (message.code, message.param) == ("invalid_request", "request_id")
    core.allow(10)
    await one.last_of("a")
    one.say(submit("a"))
    await one.last_of("a")


async def test_too_many_commands_during_a_step_are_overload(
    join: Join, gated: tuple[GatedCore, EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.step_loop, "MAX_PENDING_COMMANDS", 1)
    core, server = gated
    peer = await join(server)
    peer.say(submit("a"))
    await until(lambda: core.entered == 1)
    peer.say(submit("b"), submit("c"))
    message = await peer.next()
    assert isinstance(message, Rejected)
    assert (message.request_id, message.code) == ("c", "engine_overloaded")
    core.allow(10)
    await peer.last_of("b")


async def test_abort_frees_within_one_step(
    join: Join, gated: tuple[GatedCore, EngineServer]
) -> None:
    core, server = gated
    peer, stranger = await join(server), await join(server)
    peer.say(submit("a", max_tokens=1000), submit("b", max_tokens=1000))
    core.allow(3)
    await until(lambda: core.entered == 4)
    stranger.say(Abort("a"))  # not its own
    peer.say(Abort("b"), Abort("b"), Abort("unknown"))
    await settle()
    core.allow(1)
    last = await peer.last_of("b")
    assert last.finish_reason == "abort"
    assert last.usage.generated_tokens in (3, 4)  # `b` may have missed the first step
    await until(lambda: core.entered == 5)
    assert core.status().num_running == 1  # the step after the abort runs without it
    core.allow(1000)
    assert (await peer.last_of("a")).finish_reason == "length"


async def test_abort_of_what_never_ran_bills_nothing(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    peer = await join(server)
    peer.say(submit("a"))
    await until(lambda: core.entered == 1)
    peer.say(submit("b"), Abort("b"))
    await settle()
    core.allow(10)
    last = await peer.last_of("b")
    assert last.finish_reason == "abort" and not last.usage.prefilled


# ---- lost connections


async def test_a_lost_connection_aborts_its_requests_and_leaves_orphans(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    lost, stays = await join(server), await join(server)
    lost.say(submit("a", max_tokens=1000), submit("b", max_tokens=1000))
    lost.say(submit("waits", max_tokens=1000))  # max_num_seqs is 2
    core.allow(5)
    await until(lambda: core.entered == 6)
    lost.vanish()
    await settle()
    core.allow(1)
    orphans = [await stays.next(), await stays.next()]
    assert {o.request_id for o in orphans if isinstance(o, OrphanedUsage)} == {"a", "b"}
    for orphan in orphans:
        assert isinstance(orphan, OrphanedUsage)
        assert orphan.usage.prefilled and 4 <= orphan.usage.generated_tokens <= 6
    await stays.until_status(lambda s: s.num_running == s.num_waiting == 0)
    assert stays.status is not None and stays.status.kv_cache_usage == 0

    late = await join(server)
    assert {o.request_id for o in (await late.next(), await late.next())} == {"a", "b"}  # type: ignore[union-attr]
    late.say(submit("a"))  # billed under this id already
    assert isinstance(await late.next(), Rejected)
    late.say(OrphanAck(["a", "never heard of"]))
    core.allow(10)
    late.say(submit("c"))
    await late.last_of("c")
    later = await join(server)
    message = await later.next()
    assert isinstance(message, OrphanedUsage) and message.request_id == "b"


async def test_a_request_that_ends_while_its_loss_is_unknown_to_the_core_is_an_orphan(
    join: Join,
    gated: tuple[GatedCore, EngineServer],
) -> None:
    core, server = gated
    lost, stays = await join(server), await join(server)
    lost.say(submit("a", max_tokens=1))
    await until(lambda: core.entered == 1)
    lost.vanish()
    await settle()
    core.allow(1)  # the step in progress finishes it; the abort comes too late
    message = await stays.next()
    assert isinstance(message, OrphanedUsage)
    assert message.usage.generated_tokens == 1


async def test_the_oldest_orphan_goes_with_a_word(
    join: Join, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    core = GatedCore(max_num_seqs=8, max_waiting=8)
    server = await serve(core)
    lost = await join(server)
    lost.say(*(submit(f"r{i}", max_tokens=1000) for i in range(5)))
    core.allow(2)
    await until(lambda: core.entered == 3)
    lost.vanish()
    await settle()
    with caplog.at_level(logging.ERROR):
        core.allow(1)
        await until(lambda: "orphaned usage of r1 dropped" in caplog.text)
    assert "orphaned usage of r0 dropped" in caplog.text
    peer = await join(server)
    orphans = [await peer.next() for _ in range(3)]
    assert [o.request_id for o in orphans if isinstance(o, OrphanedUsage)] == ["r2", "r3", "r4"]


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack(">I", 2**31),
        struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1",
        encode_frame(Outputs([])),  # well formed, but not a gateway's to say
        encode_frame(Abort("a"))[:-1],
    ],
    ids=["too large", "no msgpack", "wrong direction", "truncated"],
)
async def test_a_malformed_frame_ends_that_connection_alone(
    join: Join, serve: Serve, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve(FakeCore(CONFIG))
    good, bad = await join(server), await join(server)
    with caplog.at_level(logging.WARNING):
        bad.writer.write(garbage)
        bad.writer.write_eof()
        assert await bad.next() is None
        good.say(submit("a"))
        await good.last_of("a")
    assert "gateway-2 dropped: " in caplog.text


async def test_a_peer_that_does_not_read_is_dropped_and_stalls_nobody(
    join: Join, serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.server, "MAX_WRITE_BUFFER_BYTES", 2_000_000)
    server = await serve(FakeCore(CONFIG))
    good = await join(server)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bad:
        bad.connect(server.address.removeprefix("unix:"))
        with caplog.at_level(logging.WARNING):
            bad.sendall(encode_frame(submit("slow", max_tokens=4000, n=8, logprobs=20)))
            good.say(submit("a", max_tokens=2000))
            assert (await good.last_of("a")).usage.generated_tokens == 2000
            while not (orphans := [m for m in good.heard if isinstance(m, OrphanedUsage)]):
                await good.next()
    assert "gateway-2 does not read" in caplog.text
    orphan = orphans[0]
    assert orphan.request_id == "slow"
    assert orphan.usage.generated_tokens < 8 * 4000
    await good.until_status(lambda s: s.num_running == 0)


async def test_connections_are_bounded(
    join: Join, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.server, "MAX_CONNECTIONS", 1)
    server = await serve(FakeCore(CONFIG))
    first = await join(server)
    second = await join(server)
    assert await second.next() is None
    first.say(submit("a"))
    await first.last_of("a")
    first.vanish()
    await until(lambda: not server._connections)
    third = await join(server)
    third.say(submit("b"))
    await third.last_of("b")


# ---- status and idling


async def test_statuses_are_rare_while_busy_and_prompt_when_idle(join: Join, serve: Serve) -> None:
    class Slow(FakeCore):
        def step(self) -> list[EngineOutput]:
            time.sleep(0.001)
            return super().step()

    config = msgspec.structs.replace(CONFIG, status_interval_s=0.1)
    peer = await join(await serve(Slow(config)))
    peer.say(submit("a", max_tokens=300))
    statuses: list[ReplicaStatus] = []
    start = time.monotonic()
    async with asyncio.timeout(20):
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
    before = asked
    await asyncio.sleep(0.5)
    assert asked - before <= 3


# ---- the end


def served(
    core: FakeCore, tmp_path: Path, stop: asyncio.Event, drain_timeout_s: float
) -> asyncio.Task[None]:
    server = EngineServer(core, f"unix:{tmp_path}/s")
    return asyncio.create_task(server.serve(stop, drain_timeout_s=drain_timeout_s))


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    core, stop = GatedCore(), asyncio.Event()
    serving = served(core, tmp_path, stop, 10)
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=5)
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
    await asyncio.wait_for(serving, 5)
    assert not (tmp_path / "s").exists()
    await client.close()
    core.check_integrity()


async def test_a_drain_is_bounded_and_what_is_cut_is_billed(tmp_path: Path) -> None:
    core, stop = GatedCore(), asyncio.Event()
    serving = served(core, tmp_path, stop, 0.1)
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=5)
    stream = client.generate(submit("a", max_tokens=1000).request)
    core.allow(3)
    outputs = [await anext(stream)]
    await until(lambda: core.entered == 4)
    stop.set()
    await asyncio.sleep(0.3)
    core.allow(1)
    outputs += [output async for output in stream]
    assert outputs[-1].finish_reason == "abort"
    assert outputs[-1].usage.generated_tokens == 4
    await asyncio.wait_for(serving, 5)
    await client.close()


@pytest.mark.parametrize("where", ["step", "abort", "integrity", "stranger"])
async def test_a_dead_step_thread_ends_the_server_at_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.step_loop, "IDLE_CHECK_S", 0.3)

    class Broken(FakeCore):
        def step(self) -> list[EngineOutput]:
            assert where != "step", "broken step"
            outputs = super().step()
            if where == "stranger":  # an output of nobody's request
                outputs.append(msgspec.structs.replace(outputs[0], request_id="nobody's"))
            return outputs

        def abort(self, request_id: str) -> EngineOutput | None:
            assert where != "abort", "broken abort"
            return super().abort(request_id)

        def check_integrity(self) -> None:
            assert where != "integrity", "broken integrity"

    serving = served(Broken(CONFIG), tmp_path, asyncio.Event(), 10)
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=5)
    stream = client.generate(submit("a", max_tokens=4000).request)
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            await client.abort("a")
        await asyncio.sleep(1)
        await anext(client.generate(submit("b").request))
    with pytest.raises(EngineStepFailed):
        await asyncio.wait_for(serving, 2)
    await client.close()


def test_a_receiver_that_falls_behind_stops_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.step_loop, "MAX_UNDELIVERED", 3)
    core = FakeCore(CONFIG)
    received: list[Sequence[Result]] = []
    loop = StepLoop(
        core,
        on_results=received.append,
        on_status=lambda status: None,
        on_failure=lambda error: None,
    )
    loop.start()
    loop.submit(submit("a", max_tokens=4000).request)
    time.sleep(0.2)
    assert len(received) == 3
    loop.delivered()
    time.sleep(0.1)
    assert len(received) == 4
    assert loop.stop(5)


# ---- addresses


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
    assert [engine.server._is_loopback(host) for host in loopback] == [True] * 4
    elsewhere = ["0.0.0.0", "10.0.0.1", "::", "engine.example.org"]
    assert [engine.server._is_loopback(host) for host in elsewhere] == [False] * 4
