"""From the spool to a real Postgres: soon, once, and through every outage."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import SpoolLocked
from billing.events import Price, Quantities, UsageEvent
from billing.ingestion import shipper as worker
from billing.ingestion.ingest import ingest
from billing.ingestion.settle_late import settle_orphan
from billing.ingestion.shipper import Alarms, Shipper, adopt, ship_batch
from billing.ledger.spend_totals import ever_used
from billing.pricing.price_book import PriceBook
from billing.reconciliation.checks import check_ledger
from billing.spool.format import CloseRecord, frame
from billing.spool.quarantine import Quarantine
from billing.spool.spool import Spool
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.billing.ingestion.test_ingest import rows
from tests.billing.samples import an_attempt, an_event
from tests.databases import with_cluster
from tests.pace import within
from tests.scratch import make_scratch


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    opened = await Spool.open(tmp_path / "spools" / "own", segment_bytes=50_000)
    yield opened
    await opened.shutdown()


async def ids(db: AsyncEngine) -> set[str]:
    return {row.id for row in await rows(db, "SELECT id FROM usage_events")}


async def test_usage_is_in_postgres_within_a_second_of_its_close(
    spool: Spool, db: AsyncEngine
) -> None:
    shipper = Shipper(spool, db)
    shipper.start()
    await spool.close(an_event())
    assert await shipper.drain(30.0)  # connects, compiles
    delays = []
    for _ in range(5):
        await spool.close(event := an_event())
        closed = time.monotonic()
        while event.id not in await ids(db):
            await asyncio.sleep(0.005)
        delays.append(time.monotonic() - closed)
    await shipper.stop()
    assert min(delays) < 1.0
    assert shipper.alarms == Alarms()
    assert await check_ledger(db) == []


async def test_a_backlog_ships_in_batches_and_takes_no_room_after(
    spool: Spool, db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_BATCH", 100)
    events = [an_event() for _ in range(350)]
    await asyncio.gather(*map(spool.close, events))
    assert spool.backlog == 350
    shipper = Shipper(spool, db)
    assert not await shipper.drain(0.05)
    shipper.start()
    assert await shipper.drain(30.0)
    await shipper.stop()
    assert await ids(db) == {event.id for event in events}
    assert len(list(spool.directory.glob("*.log"))) == 1
    assert await check_ledger(db) == []


async def test_an_answer_that_was_lost_ships_twice_and_books_once(
    spool: Spool, db: AsyncEngine
) -> None:
    events = [an_event() for _ in range(3)]
    await spool.close(*events)
    await ingest(db, (await spool.read_closed(1000)).events)  # and the commit was never heard of
    alarms = Alarms()
    await ship_batch(db, spool, alarms)
    assert (spool.backlog, alarms) == (0, Alarms())
    assert len(await ids(db)) == 3
    assert await check_ledger(db) == []


async def test_one_broken_event_blocks_no_other(
    spool: Spool, db: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    dear = dict.fromkeys(("cache_read", "output"), Price("dear", 2**63 - 1))
    broken = [
        an_event(quantities=Quantities(output=2**63)),  # more than a bigint
        an_event(an_attempt(model="nul\0")),  # no text of Postgres
        an_event(an_attempt(admitted_at=float("inf"))),  # no moment
        an_event(an_attempt(prices=dear), Quantities(cache_read=2**62, output=2**63 - 1)),
    ]
    good = [an_event() for _ in range(9)]
    await spool.close(*broken[:2], *good[:5], *broken[2:], *good[5:])
    shipper = Shipper(spool, db)
    shipper.start()
    assert await shipper.drain(20.0)
    await shipper.stop()
    assert await ids(db) == {event.id for event in good}
    assert shipper.alarms == Alarms(refused=4)
    kept = list(Quarantine(spool.directory.parent).entries())
    assert {entry.context.reason for entry in kept} == {"refused"}
    assert {entry.data for entry in kept} == {frame(CloseRecord(event)) for event in broken}
    assert caplog.text.count("Postgres refuses event") == 4


async def test_what_damage_takes_behind_our_back_is_an_alarm(
    spool: Spool, db: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    events = [an_event() for _ in range(3)]
    await spool.close(*events)
    [segment] = spool.directory.glob("*.log")
    segment.write_bytes(segment.read_bytes().replace(events[1].id.encode(), b"?" * 36))
    alarms = Alarms()
    await ship_batch(db, spool, alarms)
    assert (spool.backlog, alarms) == (0, Alarms(refused=1))
    assert await ids(db) == {events[0].id, events[2].id}
    assert Quarantine(spool.directory.parent).count_unresolved() == 1
    assert "could not be billed" in caplog.text


async def test_other_content_under_one_id_is_counted(spool: Spool, db: AsyncEngine) -> None:
    event = an_event()
    await spool.close(event, msgspec.structs.replace(event, estimated=True))
    alarms = Alarms()
    await ship_batch(db, spool, alarms)
    assert alarms == Alarms(conflicts=1)
    assert spool.backlog == 0


async def test_an_event_that_ships_late_takes_its_orphans_waste_back(
    spool: Spool, db: AsyncEngine
) -> None:
    event = an_event(an_attempt("019a9c1e-5e80-7000-8000-000000000001"))
    book = PriceBook(())
    await settle_orphan(db, event.id, event.quantities, model="penny", book=book, wait_s=0)
    await spool.close(event)
    await ship_batch(db, spool, Alarms())
    found = await rows(db, "SELECT kind FROM transfers ORDER BY kind")
    assert [row.kind for row in found] == ["reversed", "suspense", "usage"]
    assert spool.backlog == 0


async def test_the_spool_of_a_dead_neighbour_is_adopted(
    spool: Spool, db: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ADOPT_INTERVAL_S", 0.05)
    dead = await Spool.open(tmp_path / "spools" / "dead")
    closed, running, idle = an_event(), an_attempt(), an_attempt()
    await dead.close(closed)
    for attempt in (running, idle):
        dead.attempt_opened(attempt)
    dead.checkpoint(running.id, Quantities(output=3), True)
    alive = await Spool.open(tmp_path / "spools" / "alive")
    recovered: list[UsageEvent] = []
    left: list[UsageEvent] = []
    shipper = Shipper(
        spool,
        db,
        adopt_from=tmp_path / "spools",
        on_recovered=recovered.extend,
        on_left=left.extend,
    )
    shipper.start()
    await asyncio.sleep(0.2)
    assert await ids(db) == set()
    await dead.shutdown()
    async with asyncio.timeout(60):
        while (tmp_path / "spools" / "dead").exists():
            await asyncio.sleep(0.02)
    await shipper.stop()
    assert {event.id: event.quantities.output for event in recovered} == {
        running.id: 3,
        idle.id: 0,
    }
    assert {event.id for event in left} == {closed.id, running.id, idle.id}
    assert await ids(db) == {closed.id, running.id, idle.id}
    assert await rows(db, "SELECT num_requests, output FROM usage_hourly") == [(2, 23)]
    await alive.shutdown()
    assert await check_ledger(db) == []


async def test_what_a_dead_neighbour_left_is_on_the_bill_within_seconds(
    spool: Spool, db: AsyncEngine, tmp_path: Path
) -> None:
    """At once by who starts after the death, and soon by who was there before it."""
    spools = tmp_path / "spools"
    left = [an_event(), an_event()]
    dead = [await Spool.open(spools / f"dead-{number}") for number in range(2)]
    for each, event in zip(dead, left, strict=True):
        await each.close(event)
    await dead[0].shutdown()
    shipper = Shipper(spool, db, adopt_from=spools)
    shipper.start()
    for within_s, each, expected in ((0.9, dead[1], left[:1]), (2.5, None, left)):
        async with within(within_s):
            while await ids(db) != {event.id for event in expected}:
                await asyncio.sleep(0.02)
        if each is not None:
            await each.shutdown()
    await shipper.stop()


async def test_an_adoption_that_fails_leaves_the_directory_for_the_next(
    db: AsyncEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, spool: Spool,
) -> None:  # fmt: skip
    monkeypatch.setattr(worker, "ADOPT_INTERVAL_S", 0.05)
    dead = await Spool.open(tmp_path / "spools" / "dead")
    await dead.close(event := an_event())
    dead.attempt_opened(running := an_attempt())
    recovered: list[UsageEvent] = []
    with pytest.raises(SpoolLocked):
        await adopt(db, dead.directory, Alarms(), recovered.extend)
    await dead.shutdown()
    nowhere = create_engine(f"postgresql+asyncpg://u@/x?host={tmp_path}")
    shipper = Shipper(spool, nowhere, adopt_from=tmp_path / "spools")
    shipper.start()
    while caplog.text.count("adopting waits for Postgres") < 3:
        await asyncio.sleep(0.02)
    await shipper.stop()
    assert len(list(dead.directory.glob("*.log"))) == 1
    assert recovered == []
    with pytest.raises((OSError, sa.exc.SQLAlchemyError)):  # it went away in between
        await adopt(nowhere, dead.directory, Alarms(), recovered.extend)
    await nowhere.dispose()
    assert [each.id for each in recovered] == [running.id]
    await adopt(db, dead.directory, Alarms(), recovered.extend)
    assert [each.id for each in recovered] == [running.id]
    assert await ids(db) == {event.id, running.id}
    assert not dead.directory.exists()


@pytest.mark.slow
async def test_postgres_killed_in_the_middle_of_ingest_books_everything_once(
    tmp_path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the server, twice, while events arrive; closes never notice."""
    monkeypatch.setattr(worker, "MAX_BATCH", 50)
    monkeypatch.setattr(worker, "MAX_BACKOFF_S", 0.5)
    folder = make_scratch()
    home = Home(folder)
    with_cluster(home)
    child = await embedded.start_postgres(home)
    db = create_engine(embedded.postgres_url(home))
    shipper = Shipper(spool, db)
    shipper.start()
    acknowledged: set[str] = set()
    stop = asyncio.Event()

    async def use(number: int) -> None:
        while not stop.is_set():
            event = an_event(an_attempt(org=f"org_{number % 3}"))
            await spool.close(event)
            acknowledged.add(event.id)
            await asyncio.sleep(0.002)

    using = [asyncio.create_task(use(number)) for number in range(8)]
    try:
        for _ in range(2):
            before = len(acknowledged)
            while len(acknowledged) < before + 150 or not await ids(db):
                await asyncio.sleep(0.01)
            child.send_signal(signal.SIGKILL)
            await child.wait()
            await asyncio.sleep(0.3)
            child = await embedded.start_postgres(home)
        stop.set()
        await asyncio.gather(*using)
        assert await shipper.drain(60.0)
        assert await ids(db) == acknowledged
        assert await check_ledger(db) == []
        [(total,)] = await rows(db, "SELECT sum(num_requests) FROM usage_hourly")
        assert total == len(acknowledged) >= 300
        assert shipper.alarms == Alarms()
    finally:
        stop.set()
        await asyncio.gather(*using, return_exceptions=True)
        await shipper.stop()
        await db.dispose()
        await child.stop(embedded.STOP_TIMEOUT_S)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("state", "refused"), [("22003", True), ("23514", True), ("40P01", False), ("57P01", False)]
)
def test_only_the_content_can_be_refused(state: str, refused: bool) -> None:
    class ServerError(Exception):
        sqlstate = state

    error = sa.exc.DBAPIError("INSERT", None, ServerError())
    assert worker.is_refusal(error) is refused
    assert worker.is_refusal(OverflowError())
    assert not worker.is_refusal(sa.exc.DBAPIError("INSERT", None, ConnectionError()))


async def test_that_something_was_used_is_known_as_soon_as_it_is_in_the_spool(
    spool: Spool, db: AsyncEngine
) -> None:
    assert not await ever_used(db, spool), "a new installation"
    await spool.close(an_event())
    assert await ever_used(db, spool)
    shipper = Shipper(spool, db)
    shipper.start()
    assert await shipper.drain(30.0)
    assert not spool.backlog
    assert await ever_used(db, spool)
    await shipper.stop()


async def test_who_comes_back_for_its_own_spool_hears_what_it_had_closed_and_no_more(
    db: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_BATCH", 2)
    monkeypatch.setattr(worker, "GATHER_S", 0.01)
    before = await Spool.open(tmp_path / "own")
    closed = [an_event() for _ in range(3)]
    await before.close(*closed)
    await before.shutdown()
    own = await Spool.open(tmp_path / "own")
    left: list[UsageEvent] = []
    shipper = Shipper(own, db, on_left=left.extend)
    await own.close(an_event())
    shipper.start()
    assert await shipper.drain(30.0)
    await own.close(an_event())
    assert await shipper.drain(30.0)
    assert [event.id for event in left] == [event.id for event in closed]
    await shipper.stop()
    await own.shutdown()
