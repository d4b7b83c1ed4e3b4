"""A step loop that is stuck is noticed, one that is slow or idle is not, and no client's connection
dies in silence."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, TypeVar

import msgspec
import pytest
import pytest_asyncio

import engine.transport.client as client_module
import engine.transport.server
from engine.errors import ConfigError, EngineUnavailable
from engine.fake.engine import FakeCore
from engine.models import llama
from engine.models.config import ModelConfig, model_config, parse
from engine.protocol import EngineOutput, OrphanedUsage, ReplicaStatus, ServerMessage, StepCosts
from engine.runner.memory.sizing import (
    MIN_STEP_TIMEOUT_S,
    derive_step_timeout_s,
    operations_per_token,
)
from engine.transport.client import EngineClient, silence_of
from engine.transport.frames import open_connection
from engine.transport.server import EngineServer
from tests.engine.peers import CONFIG, LONG, GatedCore, Join, Serve, ask, collect, paced, until

TIMEOUT_S = 0.5
"""Less than an operator may ask for."""
Core = TypeVar("Core", bound=FakeCore)


def impatient(core: Core) -> Core:
    core.resolved = msgspec.structs.replace(core.resolved, step_timeout_s=TIMEOUT_S)
    return core


@pytest_asyncio.fixture
async def stuck(serve: Serve) -> AsyncIterator[tuple[GatedCore, EngineServer]]:
    """A core whose steps do not end before they are allowed to."""
    core = impatient(GatedCore())
    server = await serve(core)
    yield core, server
    core.allow(10_000)


async def test_a_stuck_step_is_a_lost_engine_until_it_ends(
    stuck: tuple[GatedCore, EngineServer],
) -> None:
    core, server = stuck
    client = await EngineClient.connect(server.address, timeout_s=30)
    began = time.monotonic()
    stream = client.generate(ask("r", max_tokens=100))
    core.allow(3)
    usage = None
    with pytest.raises(EngineUnavailable, match="the engine hangs: not heard of for 0.5 s"):
        async for output in stream:
            usage = output.usage
    assert usage is not None and usage.generated_tokens == 3
    assert time.monotonic() - began > TIMEOUT_S * 0.8
    assert not client.connected
    with pytest.raises(EngineUnavailable):
        await collect(client, ask("another"))
    # Its event loop is well, accepts and greets; nobody may take that for a sign of life.
    said = ""
    async with asyncio.timeout(60):
        while "the engine hangs: no step ended in" not in said:
            try:  # it counts from its last step, the client from what it heard last
                await (await EngineClient.connect(server.address, timeout_s=1)).close()
            except EngineUnavailable as error:
                said = str(error)
    assert not client.connected
    core.allow(10_000)
    await client.wait_connected(60)
    assert await collect(client, ask("after"))
    await client.close()


async def test_what_a_stuck_step_had_generated_is_an_orphan_when_it_ends(
    stuck: tuple[GatedCore, EngineServer],
) -> None:
    core, server = stuck
    orphans: list[OrphanedUsage] = []

    async def keep(orphan: OrphanedUsage) -> None:
        orphans.append(orphan)

    client = await EngineClient.connect(server.address, timeout_s=30, on_orphan=keep)
    core.allow(2)
    with pytest.raises(EngineUnavailable):
        await collect(client, ask("r", max_tokens=100))
    await until(lambda: server._live["r"].aborting)
    core.allow(10_000)
    await until(lambda: bool(orphans))
    (orphan,) = orphans
    assert (orphan.request_id, orphan.usage.generated_tokens) == ("r", 3)
    await client.close()


async def test_a_silent_engine_can_be_left_and_its_work_is_dropped_when_it_goes_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before it is taken for hung: what it says of the request after that is nobody's, but for
    what was used."""
    monkeypatch.setattr(client_module, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(client_module, "SILENT_PART", 0.0)
    core, orphans = GatedCore(), list[OrphanedUsage]()

    async def keep(orphan: OrphanedUsage) -> None:
        orphans.append(orphan)

    server = await serve(core)
    client = await EngineClient.connect(server.address, timeout_s=30, on_orphan=keep)
    taken: list[int] = []

    async def read() -> None:
        async for output in client.generate(ask("r", max_tokens=100)):
            taken.extend(output.token_ids)

    reading = asyncio.create_task(read())
    core.allow(3)
    await until(lambda: len(taken) == 3 and client.is_silent)
    client.leave("r")
    client.leave("unknown")
    with pytest.raises(EngineUnavailable, match="given up, heard of"):
        await reading
    assert client.connected and len(taken) == 3
    core.allow(10_000)
    await until(lambda: bool(orphans))
    (orphan,) = orphans
    assert orphan.request_id == "r" and orphan.usage.generated_tokens >= 3
    assert not client.is_silent
    assert await collect(client, ask("r", max_tokens=5)), "the name is free again"
    await until(lambda: not server._orphans)
    await client.close()


async def test_an_idle_engine_and_a_slow_one_are_alive(serve: Serve) -> None:
    class Slow(FakeCore):
        def step(self) -> list[EngineOutput]:
            time.sleep(0.4 * timeout_s)
            return super().step()

    timeout_s = 3 * TIMEOUT_S
    core = impatient(Slow(CONFIG))
    core.resolved = msgspec.structs.replace(core.resolved, step_timeout_s=timeout_s)
    client = await EngineClient.connect((await serve(core)).address, timeout_s=30)
    await asyncio.sleep(1.3 * timeout_s)
    assert client.connected
    assert len(await collect(client, ask(max_tokens=4))) == 4
    assert client.connected
    await client.close()


async def test_an_idle_engine_says_so_now_and_then(serve: Serve, join: Join) -> None:
    peer = await join(await serve(impatient(FakeCore(CONFIG))))
    statuses: list[ServerMessage | None] = []
    async with asyncio.timeout(30):
        while len(statuses) < 4:
            statuses.append(await peer._frames.read())
    assert all(isinstance(status, ReplicaStatus) for status in statuses)


async def test_a_client_that_was_held_up_itself_blames_nobody(serve: Serve) -> None:
    """The engine runs in a thread of its own, as it would in its own process."""
    core = impatient(FakeCore(CONFIG, respond=paced))
    ready, over = threading.Event(), threading.Event()
    address = ""

    async def run() -> None:
        nonlocal address
        server = EngineServer(core, "tcp:127.0.0.1:0")
        await server.start()
        address = server.address
        ready.set()
        await asyncio.to_thread(over.wait)
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert await asyncio.to_thread(ready.wait, 10)
    client = await EngineClient.connect(address, timeout_s=30)
    stream = client.generate(ask(max_tokens=LONG))
    await anext(stream)
    time.sleep(3 * TIMEOUT_S)  # as if this process had been stopped
    for _ in range(10):
        await anext(stream)
    assert client.connected
    await stream.aclose()
    await client.close()
    over.set()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


# ---- nothing ends in silence


async def test_a_bug_in_receiving_fails_the_streams_and_is_told(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = await EngineClient.connect(
        (await serve(impatient(FakeCore(CONFIG)))).address, timeout_s=30
    )

    def broken(message: ServerMessage) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(client, "_receive", broken)
    with pytest.raises(EngineUnavailable, match="a bug"):
        await collect(client, ask())
    assert "the connection to unix:" in caplog.text and "KeyError" in caplog.text
    monkeypatch.undo()
    await client.wait_connected(5)
    assert await collect(client, ask("another"))
    await client.close()


async def test_a_bug_in_connecting_is_told_and_tried_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve(impatient(FakeCore(CONFIG)))
    failures = 2

    async def fail_at_first(address: str) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise UnicodeError("label empty or too long")
        return await open_connection(address)

    monkeypatch.setattr("engine.transport.client.open_connection", fail_at_first)
    with caplog.at_level(logging.ERROR):
        client = await EngineClient.connect(server.address, timeout_s=30)
    assert [each.levelno for each in caplog.records if each.levelno >= logging.ERROR] == [40, 40]
    assert await collect(client, ask())
    await client.close()


async def test_a_bug_in_recording_orphans_is_told_and_the_next_is_recorded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.transport.server, "REOFFER_S", 0.05)
    server = await serve(impatient(FakeCore(CONFIG, respond=paced)))
    recorded: list[OrphanedUsage] = []

    async def keep(orphan: OrphanedUsage) -> None:
        recorded.append(orphan)

    client = await EngineClient.connect(server.address, timeout_s=30, on_orphan=keep)
    really, failures = client._orphans._record, 1

    def record(orphan: OrphanedUsage) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise KeyError("a bug")
        return really(orphan)

    monkeypatch.setattr(client._orphans, "_record", record)
    other = await EngineClient.connect(server.address, timeout_s=30)
    await anext(other.generate(ask("lost", max_tokens=LONG)))
    await other.close()
    await until(lambda: bool(recorded))
    assert "no orphaned usage was recorded" in caplog.text
    await client.close()


@pytest.mark.parametrize(
    "address",
    [
        "tcp:a..b:1",
        f"tcp:{'x' * 64}.org:1",
        "tcp:a\0b:1",
        "unix:/a\0b",
        "unix:/\udcff",
        "tcp:h:" + "9" * 5000,
    ],
)
def test_an_address_that_cannot_be_one_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match="address "):
        EngineClient(address)


# ---- the bound


def config_of(**sizes: int) -> ModelConfig:
    """Llama 3's shape, or smaller."""
    hf = {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
    }
    parsed = parse(hf | sizes)
    return model_config("LlamaForCausalLM", parsed, llama.from_hf(parsed))


def test_the_bound_grows_with_the_step_and_shrinks_with_the_machine() -> None:
    large, small = config_of(), config_of(hidden_size=256, num_hidden_layers=4)
    assert operations_per_token(large, 0) == pytest.approx(2 * 7.5e9, rel=0.03)
    of_a_step = partial(derive_step_timeout_s, max_num_batched_tokens=512, max_model_len=8192)
    assert of_a_step(small, "cpu") == of_a_step(large, "cuda") == MIN_STEP_TIMEOUT_S
    assert of_a_step(large, "cpu") > 1000
    assert of_a_step(large, "cuda", max_num_batched_tokens=8192) > 100


def test_an_engine_is_silent_after_more_than_its_largest_step_and_before_it_hangs() -> None:
    core = FakeCore(msgspec.structs.replace(CONFIG, max_num_batched_tokens=1000))
    core.resolved = msgspec.structs.replace(
        core.resolved, step_timeout_s=60.0, max_model_len=10_000
    )
    assert silence_of(core.status()) == 3.0
    core.costs = StepCosts(step_s=0.5, prompt_token_s=0.002, pair_s=1e-7, chunk_context_token_s=0.0)
    assert silence_of(core.status()) == pytest.approx(2 * (0.5 + 2.0 + 1.0))
    core.costs = StepCosts(prompt_token_s=1.0)
    assert silence_of(core.status()) == 60.0
    core.resolved = msgspec.structs.replace(core.resolved, step_timeout_s=400.0)
    core.costs = StepCosts()
    assert silence_of(core.status()) == 20.0, "its largest step may be yet to come"
