"""A generation at an engine that is to be taken away goes on with another one after its time: the
same text, each token on one bill."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from billing.events import failover_waste_id
from engine.protocol import OrphanedUsage
from engine.text.tokenizer import Tokenizer
from engine.transport.client import EngineClient
from engine.transport.server import EngineServer
from gateway.fleet.moving import engine_stay
from gateway.fleet.router import Route
from gateway.inference import attempt as attempt_module
from gateway.inference.attempt import RESUMED
from gateway.inference.delivery import Delivery
from tests.gateway.inference.moving.test_moving import Drained, SteppedCore, replica_of
from tests.gateway.inference.test_hedging import billed, until
from tests.gateway.inference.test_resuming import LENGTH, MortalEngine, chat, core_of, of_kind, say
from tests.gateway.inference.test_resuming import open_office as open_office
from tests.gateway.office import Office, read

OpenOffice = Callable[..., Office]


class SteppedEngine(MortalEngine):
    """Runs as many steps as `allow` was called for."""

    def __init__(self, *arguments: Any, steps: int = 10_000) -> None:
        super().__init__(*arguments)
        self._steps, self._sleep = asyncio.Semaphore(steps), self._wait
        self.num_steps = 0

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._steps.release()

    async def _wait(self, _seconds: float) -> None:
        await self._steps.acquire()
        self.num_steps += 1


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Callable[..., SteppedEngine]:
    return lambda *deaths, **options: SteppedEngine(core_of(tokenizer), *deaths, **options)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_module, "LOOK_S", 0.002)
    monkeypatch.setattr(engine_stay, "STAGGER_S", 0.0)


@pytest.fixture
async def whole(open_office: OpenOffice, engine: Callable[..., SteppedEngine]) -> bytes:
    """The answer of an engine that nothing happens to."""
    return await say(open_office(engine()), chat())


def drain(office: Office, number: int) -> None:
    replica_of(office, number)._drain_mark = Drained()


async def begun(office: Office, engine: SteppedEngine, **fields: Any) -> asyncio.Task[bytes]:
    """Ask for a generation, of which four tokens are there when this returns."""
    delivery = office.begin(request=chat(**fields))
    reading = asyncio.create_task(read(delivery))
    await until(lambda: engine.num_steps == 4 and engine._steps.locked() and delivery.begun)
    return reading


def resumes(office: Office, outcome: str) -> float:
    labels = {"model": "m", "outcome": outcome}
    return office.telemetry.registry.get_sample_value("tollgate_resumes_total", labels) or 0.0


async def test_what_lasts_longer_than_its_time_goes_on_elsewhere(
    open_office: OpenOffice, engine: Callable[..., SteppedEngine], whole: bytes
) -> None:
    first, second = engine(steps=4), engine()
    office = open_office(first, second, drain_timeout_s=0.0)
    reading = await begun(office, first)
    drain(office, 0)
    assert (await reading).replace(RESUMED, b"") == whole
    await office.settled()
    assert not first.core.has_work(), "it was told to end it"
    events = await billed(office)
    bills, waste = of_kind(events, "usage"), of_kind(events, "waste")
    assert [each.attempt.id for each in bills] == [
        first.asked[0].request_id,
        second.asked[0].request_id,
    ]
    assert [each.finish for each in bills] == ["failover", "done"]
    assert sum(each.quantities.output for each in bills) == LENGTH
    assert [each.quantities.input_total > 0 for each in bills] == [True, False]
    assert [each.id for each in waste] == [failover_waste_id(bills[1].id)]
    assert (resumes(office, "drained"), resumes(office, "resumed")) == (1, 0)
    assert not office.services.fleet._failures, "nobody failed"


async def test_nothing_moves_before_its_time(
    open_office: OpenOffice, engine: Callable[..., SteppedEngine], whole: bytes
) -> None:
    first, second = engine(steps=4), engine()
    office = open_office(first, second, drain_timeout_s=600.0)
    reading = await begun(office, first)
    drain(office, 0)
    first.allow(10_000)
    assert await reading == whole and second.asked == []


async def test_the_only_engine_that_serves_ends_what_it_runs(
    open_office: OpenOffice, engine: Callable[..., SteppedEngine], whole: bytes
) -> None:
    first, second = engine(steps=4), engine()
    office = open_office(first, second, drain_timeout_s=0.0)
    second.lose()
    reading = await begun(office, first)
    drain(office, 0)
    first.allow(10_000)
    assert await reading == whole


async def test_an_engine_that_dies_after_it_took_one_over_loses_nothing(
    open_office: OpenOffice, engine: Callable[..., SteppedEngine], whole: bytes
) -> None:
    """To be sent on uses up none of the times that a generation may be resumed."""
    first, second, third = engine(steps=4), engine(3), engine()
    office = open_office(first, second, third, drain_timeout_s=0.0, max_resumes=1)
    reading = await begun(office, first)
    drain(office, 0)
    assert (await reading).replace(RESUMED, b"") == whole
    await office.settled()
    bills = of_kind(await billed(office), "usage")
    assert len(bills) == 3 and sum(each.quantities.output for each in bills) == LENGTH
    assert (resumes(office, "drained"), resumes(office, "resumed")) == (1, 1)


async def test_what_has_ended_holds_no_route_until_the_collector_comes(
    open_office: OpenOffice, engine: Callable[..., SteppedEngine], whole: bytes
) -> None:
    """An engine that is dropped ends when nobody holds its route."""
    first = engine(steps=4)
    office = open_office(first)
    reading = await begun(office, first)
    (route,) = office.services.fleet.routes
    before = weakref.ref(route)
    office.services.fleet.replace([])
    del route
    gc.disable()
    try:
        assert before() is not None
        first.allow(10_000)
        assert await reading == whole
        await office.settled()
        await until(lambda: before() is None)
    finally:
        gc.enable()


async def test_where_nothing_is_resumed_nothing_moves(
    open_office: OpenOffice, engine: Callable[..., SteppedEngine], whole: bytes
) -> None:
    first, second = engine(steps=4), engine()
    office = open_office(first, second, drain_timeout_s=0.0, max_resumes=0)
    reading = await begun(office, first)
    drain(office, 0)
    first.allow(10_000)
    assert await reading == whole and second.asked == []


async def test_engines_that_settings_name_no_more_are_let_go_while_streams_go_on(
    open_office: OpenOffice, engine: Callable[..., SteppedEngine], whole: bytes
) -> None:
    """One stream runs at an engine that is dropped, another one at one that stays: neither keeps
    the engine from being taken away."""
    engines = [engine(steps=4) for _ in range(2)]
    office = open_office(*engines, drain_timeout_s=0.0)
    fleet = office.services.fleet
    asked = []
    for each, other in zip(engines, reversed(engines), strict=True):
        other.connected = False
        asked.append(await begun(office, each))
        other.connected = True
    (route,) = fleet.routes
    before = weakref.ref(route)
    fleet.replace([Route(model="m", kind="engine", replicas=route.replicas[1:])])
    del route
    await until(lambda: len(engines[1].asked) == 2 and before() is None)
    assert not any(each.done() for each in asked)
    engines[1].allow(10_000)
    assert [each.replace(RESUMED, b"") for each in await asyncio.gather(*asked)] == [whole] * 2
    await office.settled()
    bills = of_kind(await billed(office), "usage")
    assert sum(each.quantities.output for each in bills) == 2 * LENGTH


@pytest.mark.parametrize("dies", ["nobody", "source", "target"])
async def test_streams_move_over_sockets_and_every_token_is_in_the_books_once(
    dies: str, open_office: OpenOffice, tokenizer: Tokenizer, whole: bytes, tmp_path: Path
) -> None:
    cores = [SteppedCore(tokenizer.vocab_size) for _ in range(2)]
    servers = [EngineServer(core, f"unix:{tmp_path}/{at}") for at, core in enumerate(cores)]
    orphans: list[OrphanedUsage] = []

    async def keep(orphan: OrphanedUsage) -> None:
        orphans.append(orphan)

    clients = [EngineClient(each.address, on_orphan=keep) for each in servers]
    for server, client in zip(servers, clients, strict=True):
        await server.start()
        client.start()
        await client.wait_connected(30)
    office = open_office(*clients, drain_timeout_s=0.0)
    delivery: Delivery = office.begin(request=chat())
    reading = asyncio.create_task(read(delivery))
    await until(lambda: servers[0]._live)
    cores[0].allow(4)
    await until(lambda: delivery.begun)
    drain(office, 0)
    await until(lambda: servers[1]._live)
    if dies != "nobody":
        cores[1].allow(2)
        for connection in tuple(servers[["source", "target"].index(dies)]._connections):
            connection.writer.transport.abort()
    async with asyncio.timeout(60):
        while not reading.done():
            for core in cores:
                core.allow(1)
            await asyncio.sleep(0.002)
    assert reading.result().replace(RESUMED, b"") == whole
    await office.settled()
    events = await billed(office)
    bills = of_kind(events, "usage")
    assert sum(each.quantities.output for each in bills) == LENGTH
    assert [each.quantities.input_total > 0 for each in bills].count(True) == 1
    for client in clients:
        await client.close()
    for core, server in zip(cores, servers, strict=True):
        core.allow(10_000)
        await server.close()
        core.check_integrity()
