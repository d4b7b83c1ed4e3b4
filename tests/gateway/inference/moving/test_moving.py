"""A request that waits at an engine, and of which nothing has run, goes to another one that would
begin it much sooner: it is answered and billed once, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.fake.engine import FAKE_CONFIG, FakeCore, drawn
from engine.protocol import OrphanedUsage, StepCosts
from engine.text.tokenizer import Tokenizer
from engine.transport.client import EngineClient
from engine.transport.server import EngineServer
from foundation.request_context import LOG_CONTEXT, LogContext
from gateway.fleet.drain_marks import NEVER_DRAINED, DrainMark
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.errors import FleetError
from gateway.fleet.predicted_time import Prompt
from gateway.inference import hedging
from gateway.inference.attempt import RESUMED
from gateway.inference.delivery import Delivery
from gateway.inference.hedge_budget import HedgeBudget
from gateway.inference.request_mover import RequestMover
from gateway.request_log.route_choice import read_choice
from tests.engine.peers import GatedCore
from tests.gateway.inference.test_hedging import GatedEngine, billed, until
from tests.gateway.inference.test_hedging import gated as gated
from tests.gateway.inference.test_resuming import (
    LENGTH,
    chat,
    core_of,
    of_kind,
    say,
)
from tests.gateway.inference.test_resuming import open_office as open_office
from tests.gateway.office import Office, read

COSTS = StepCosts(step_s=1e-4, prompt_token_s=0.1)
"""Prompts take seconds, as engines say."""
MakeGated = Callable[..., GatedEngine]


class SlowToGiveBack(GatedEngine):
    """Hears what is said to it when `hears` is called, as one amid a step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.wanted_back: list[str] = []

    def take_back(self, request_id: str) -> None:
        self.wanted_back.append(request_id)

    def hears(self) -> None:
        for request_id in self.wanted_back:
            super().take_back(request_id)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Callable[[], SlowToGiveBack]:
    return lambda: SlowToGiveBack(core_of(tokenizer))


OpenOffice = Callable[..., Office]


@pytest.fixture
def moving(open_office: OpenOffice) -> OpenOffice:
    def make(*engines: GatedEngine) -> Office:
        office = open_office(*engines)
        seconds = itertools.count()
        office.services.mover = RequestMover(
            office.services.fleet, clock=lambda: float(next(seconds))
        )
        for number in range(len(engines)):
            say_status(office, number)
        return office

    return make


class Drained(DrainMark):
    @property
    def is_set(self) -> bool:
        return True


def replica_of(office: Office, number: int) -> EngineReplica:
    replica = office.services.fleet.routes[0].replicas[number]
    assert isinstance(replica, EngineReplica)
    return replica


def say_status(office: Office, number: int) -> None:
    """Let an engine say what it has to do."""
    replica = replica_of(office, number)
    if replica.status is not None:
        replica.view.heard(msgspec.structs.replace(replica.status, costs=COSTS))


async def queue_up(
    office: Office, engine: GatedEngine, number: int, deliveries: list[Delivery] | None = None
) -> list[asyncio.Task[bytes]]:
    """Ask so many requests, each of which waits at an engine before the next comes."""
    asked = []
    for _ in range(number):
        delivery = office.begin(request=chat())
        if deliveries is not None:
            deliveries.append(delivery)
        asked.append(asyncio.create_task(read(delivery)))
        await until(lambda: len(engine.asked) == len(asked))
    return asked


def counted(office: Office, outcome: str) -> float:
    labels = {"model": "m", "outcome": outcome}
    return office.telemetry.registry.get_sample_value("tollgate_fleet_moves_total", labels) or 0.0


@pytest.fixture
async def whole(open_office: OpenOffice, gated: MakeGated) -> bytes:
    """The answer of an engine that nothing happens to."""
    engine = gated()
    engine.gate.set()
    return await say(open_office(engine), chat())


async def fill(
    office: Office,
    full: GatedEngine,
    other: GatedEngine,
    deliveries: list[Delivery] | None = None,
) -> list[asyncio.Task[bytes]]:
    """Let six requests wait at an engine while the other one is away, and let that come back."""
    other.lose()
    asked = await queue_up(office, full, 6, deliveries)
    say_status(office, 0)
    other.restore()
    say_status(office, 1)
    return asked


async def test_who_waits_goes_to_an_engine_that_comes_back(
    moving: OpenOffice, gated: MakeGated, whole: bytes
) -> None:
    full, other = gated(), gated()
    office = moving(full, other)
    asked = await fill(office, full, other)
    other.gate.set()
    say_status(office, 0)
    await until(lambda: other.asked)
    await until(lambda: any(each.done() for each in asked))
    assert counted(office, "moved") == 1, "one of a tenant at each look"
    assert len(full.core._queued) == 5, "it is not there any more"
    full.gate.set()
    assert await asyncio.gather(*asked) == [whole] * 6
    await office.settled()
    bills = await billed(office)
    assert {each.kind for each in bills} == {"usage"}
    assert [each.quantities.output for each in bills] == [LENGTH] * 6
    ids = {each.id for each in bills}
    (given_back,) = {each.request_id for each in full.asked} - ids
    assert other.asked[0].request_id in ids and given_back not in full.acknowledged
    assert not office.services.spool._open


async def test_the_trace_says_that_it_moved_and_why(
    moving: OpenOffice, gated: MakeGated, whole: bytes
) -> None:
    full, other = gated(), gated()
    office = moving(full, other)
    context = LogContext("req_1")
    token = LOG_CONTEXT.set(context)
    asked = await fill(office, full, other)
    LOG_CONTEXT.reset(token)
    other.gate.set()
    say_status(office, 0)
    await until(lambda: counted(office, "moved"))
    full.gate.set()
    await asyncio.gather(*asked)
    texts = [each.about for each in context.stages if each.name == "route"]
    moves = [each for each in map(read_choice, texts) if each is not None and each.moved]
    (move,) = moves
    assert move.reason == "moved" and move.moved is not None and move.moved.replica == "0"
    (there,) = move.candidates
    assert there.replica == "1" and there.predicted_ttft_s < move.moved.left_s / 2
    outcomes = [each.outcome for each in context.stages if each.name == "attempt"]
    assert sorted(outcomes) == [""] * 6 + ["taken_back"]


async def test_nobody_moves_to_who_is_drained_or_as_busy(
    moving: OpenOffice, gated: MakeGated, whole: bytes
) -> None:
    full, other = gated(), gated()
    office = moving(full, other)
    asked = await fill(office, full, other)
    there = replica_of(office, 1)
    there._drain_mark = Drained()
    say_status(office, 0)
    assert not other.asked
    there._drain_mark = NEVER_DRAINED
    there.view.send(Prompt(100), "interactive")  # as busy as the first
    say_status(office, 0)
    await asyncio.sleep(0)
    assert not other.asked
    full.gate.set()
    await asyncio.gather(*asked)
    assert counted(office, "moved") == counted(office, "begun") == 0


EVENTS = ("it hears", "begins", "source dies", "target dies", "client leaves")


@pytest.mark.parametrize("then", EVENTS)
@pytest.mark.parametrize("happens", EVENTS)
async def test_who_moves_is_answered_and_billed_once(
    happens: str,
    then: str,
    moving: OpenOffice,
    engine: Callable[[], SlowToGiveBack],
    whole: bytes,
) -> None:
    """This holds whatever happens once an engine is asked for a request, and whatever next."""
    full, other = engine(), engine()
    full.comes_back = other.comes_back = True
    office = moving(full, other)
    deliveries: list[Delivery] = []
    asked = await fill(office, full, other, deliveries)
    say_status(office, 0)
    (wanted,) = full.wanted_back
    at = [each.request_id for each in full.asked].index(wanted)

    def die(engine: GatedEngine) -> None:
        engine.lose()
        engine.restore()

    acts: dict[str, Callable[[], object]] = {
        "it hears": full.hears,
        "begins": full.gate.set,
        "source dies": partial(die, full),
        "target dies": partial(die, other),
        "client leaves": deliveries[at].abandon,
    }
    for act in (happens, then):
        acts[act]()
        for _ in range(5):
            await asyncio.sleep(0)
    for each in (full, other):
        each.gate.set()
    full.hears()
    found = await asyncio.gather(*asked, return_exceptions=True)
    await office.settled()
    events = await billed(office)
    bills = of_kind(events, "usage")
    assert len({each.id for each in bills}) == len(bills)
    for number, answer in enumerate(found):
        if not isinstance(answer, FleetError):
            assert isinstance(answer, bytes)
            left = "client leaves" in (happens, then) and number == at
            assert left or answer.replace(RESUMED, b"") == whole
    prompts = [each for each in bills if each.quantities.input_total]
    assert len(prompts) <= 6 and sum(each.quantities.output for each in bills) <= 6 * LENGTH
    if all(isinstance(each, bytes) and each.replace(RESUMED, b"") == whole for each in found):
        assert len(prompts) == 6 and sum(each.quantities.output for each in bills) == 6 * LENGTH
    assert not full.core.has_work() and not other.core.has_work()
    assert not office.services.spool._open


async def test_what_a_hedged_one_gave_back_is_the_second_tries(
    moving: OpenOffice,
    engine: Callable[[], SlowToGiveBack],
    whole: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine gives back what another one was asked for as well: that one's answer counts."""
    begun: list[hedging.Hedge] = []

    class KnownHedge(hedging.Hedge):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            begun.append(self)

    monkeypatch.setattr(hedging, "Hedge", KnownHedge)
    full, other = engine(), engine()
    office = moving(full, other)
    office.services.hedges = HedgeBudget(0.2)
    asked = await fill(office, full, other)
    begun[0].begin()
    await until(lambda: other.asked)
    full.take_back(full.asked[0].request_id)
    full.hears()
    other.gate.set()
    assert await asked[0] == whole
    full.gate.set()
    assert await asyncio.gather(*asked) == [whole] * 6
    await office.settled()
    assert sorted(each.quantities.output for each in await billed(office)) == [LENGTH] * 6


class SteppedCore(GatedCore):
    """Runs one request at a time, and says that its prompts take seconds."""

    def __init__(self, vocab_size: int) -> None:
        FakeCore.__init__(
            self,
            msgspec.structs.replace(FAKE_CONFIG, max_num_seqs=1, status_interval_s=0.0),
            vocab_size=vocab_size,
            respond=partial(drawn, vocab_size=vocab_size),
        )
        self._gate, self.entered, self.costs = threading.Semaphore(0), 0, COSTS


@pytest.mark.parametrize("dies", ["nobody", "source", "target"])
async def test_an_engine_that_joins_takes_over_what_waits(
    dies: str, open_office: OpenOffice, tokenizer: Tokenizer, whole: bytes, tmp_path: Path
) -> None:
    """Over their sockets: one engine has a queue, another one comes up. Connections are lost amid
    the moves, and every token is in the books once."""
    cores = [SteppedCore(tokenizer.vocab_size) for _ in range(2)]
    servers = [EngineServer(core, f"unix:{tmp_path}/{at}") for at, core in enumerate(cores)]
    orphans: list[OrphanedUsage] = []

    async def keep(orphan: OrphanedUsage) -> None:
        orphans.append(orphan)

    clients = [EngineClient(each.address, on_orphan=keep) for each in servers]
    await servers[0].start()
    for client in clients:
        client.start()
    await clients[0].wait_connected(30)
    office = open_office(*clients)
    office.services.mover = RequestMover(office.services.fleet)
    for number, client in enumerate(clients):
        client.on_status = replica_of(office, number).view.heard
    replica_of(office, 0).view.heard(cores[0].status())
    asked = [asyncio.create_task(read(office.begin(request=chat()))) for _ in range(8)]
    await until(lambda: len(servers[0]._live) == 8)
    await servers[1].start()
    await clients[1].wait_connected(30)
    replica_of(office, 1).view.heard(clients[1].status)

    def lose(number: int) -> None:
        for connection in tuple(servers[number]._connections):
            connection.writer.transport.abort()

    async with asyncio.timeout(60):
        while not servers[1]._live:
            cores[0].allow(1)
            await asyncio.sleep(0.002)
        if dies != "nobody":
            lose(["source", "target"].index(dies))
        while not all(each.done() for each in asked):
            for core in cores:
                core.allow(1)
            await asyncio.sleep(0.002)
    assert [each.result().replace(RESUMED, b"") for each in asked] == [whole] * 8
    await office.settled()
    bills = of_kind(await billed(office), "usage")
    assert len({each.id for each in bills}) == len(bills)
    assert sum(each.quantities.output for each in bills) == 8 * LENGTH
    assert dies != "nobody" or (len(bills) == 8 and not orphans)
    for client in clients:
        await client.close()
    for core, server in zip(cores, servers, strict=True):
        core.allow(10_000)
        await server.close()
        core.check_integrity()
