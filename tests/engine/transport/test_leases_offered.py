"""Leases over the engine's socket, and without one: who hears of them, and until when."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

import engine.transport.server
from engine.fake.engine import FakeCore, FakeEngine
from engine.protocol import Breakpoint, EngineRequest, LeaseEnded, LeaseGranted
from engine.transport.client import Engine, EngineClient
from tests.engine.peers import SMALL, Serve, ask, collect, until

Event = LeaseGranted | LeaseEnded
TIGHT = msgspec.structs.replace(SMALL, num_blocks=256, max_orphans=2)
"""As many blocks as its longest request takes."""
TOLD = LeaseGranted(lease_id="kept:0", request_id="kept", num_tokens=64, ttl_s=300.0)


def keep(name: str, token: int = 1) -> EngineRequest:
    """64 tokens, kept for five minutes."""
    asked = ask(name, [token] * 70, max_tokens=1)
    return msgspec.structs.replace(asked, breakpoints=(Breakpoint(64, 300.0),))


async def flood(engine: Engine) -> None:
    """All blocks there are."""
    await collect(engine, ask("flood", [*range(1, 1000)] * 4 + [7] * 99, max_tokens=1))


@pytest.mark.parametrize("kind", ["client", "fake"])
async def test_a_gateway_hears_what_is_kept_for_it_and_when_it_no_longer_is(
    serve: Serve, kind: str
) -> None:
    heard: list[Event] = []

    async def hear(event: Event) -> None:
        heard.append(event)

    core = FakeCore(TIGHT)
    connected: Engine
    if kind == "client":
        address = (await serve(core)).address
        connected = await EngineClient.connect(address, timeout_s=30, on_lease=hear)
    else:
        connected = FakeEngine(core, on_lease=hear)
    first, second = [(await collect(connected, keep(name)))[-1].usage for name in ("kept", "read")]
    assert (first.kept_tokens, first.written_tokens) == (0, (64,))
    assert (second.kept_tokens, second.written_tokens) == (64, (0,))
    await until(lambda: heard == [TOLD])
    await until(lambda: connected.status.num_leased_blocks == 4)
    await flood(connected)
    await until(lambda: len(heard) == 2)
    ended = heard[1]
    assert isinstance(ended, LeaseEnded) and ended.is_broken
    assert (ended.lease_id, ended.num_tokens) == ("kept:0", 64)
    await connected.close()


async def test_a_broken_lease_is_offered_until_a_gateway_has_it_on_disk(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.transport.server, "REOFFER_S", 0.05)
    address = (await serve(FakeCore(TIGHT))).address
    deaf = await EngineClient.connect(address, timeout_s=30)
    await collect(deaf, keep("kept"))
    await flood(deaf)
    await deaf.close()
    offered: list[str] = []

    async def at_the_third_time(event: Event) -> None:
        offered.append(event.lease_id)
        if len(offered) < 3:
            raise RuntimeError("not yet")

    heir = await EngineClient.connect(address, timeout_s=30, on_lease=at_the_third_time)
    await until(lambda: len(offered) == 3)
    await asyncio.sleep(0.2)
    assert offered == ["kept:0"] * 3
    await heir.close()


async def test_the_oldest_of_too_many_broken_leases_is_dropped_and_told(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    address = (await serve(FakeCore(TIGHT))).address
    deaf = await EngineClient.connect(address, timeout_s=30)
    for number in range(3):
        await collect(deaf, keep(f"kept-{number}", number + 1))
    await flood(deaf)
    await deaf.close()
    offered: set[str] = set()

    async def hear(event: Event) -> None:
        offered.add(event.lease_id)

    heir = await EngineClient.connect(address, timeout_s=30, on_lease=hear)
    await until(lambda: len(offered) == 2)
    dropped = {f"kept-{number}:0" for number in range(3)} - offered
    assert f"broken lease of {dropped.pop()} dropped unacknowledged" in caplog.text
    await heir.close()
