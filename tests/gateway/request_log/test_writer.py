"""Rows come to Postgres a batch at a time; what it does not take is bounded, counted and harms
nobody."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from datetime import UTC, date, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.request_log import rows, writer
from gateway.request_log.rows import StageRow
from gateway.request_log.writer import RequestLog
from tests.databases import with_cluster
from tests.gateway.request_log.making import ORG, OTHER, new_row
from tests.scratch import make_scratch

PARTITIONS = """
    SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r'
        AND relname LIKE 'request\\_log\\_%' ORDER BY relname
"""


def new_log(db: AsyncEngine, *, keep_days: int = 30, now: float | None = None) -> RequestLog:
    dropped: list[int] = []
    log = RequestLog(
        db,
        keep_days=keep_days,
        on_dropped=dropped.append,
        wall_clock=time.time if now is None else lambda: now,
    )
    log.dropped = dropped  # type: ignore[attr-defined]
    return log


def dropped_of(log: RequestLog) -> int:
    return sum(log.dropped)  # type: ignore[attr-defined]


async def count(db: AsyncEngine, table: str = "request_log") -> int:
    async with db.connect() as conn:
        return int(await conn.scalar(sa.text(f"SELECT count(*) FROM {table}")) or 0)


async def partitions(db: AsyncEngine) -> list[date]:
    async with db.connect() as conn:
        names = await conn.scalars(sa.text(PARTITIONS))
        found = [name.removeprefix("request_log_") for name in names]
    return [date.fromisoformat(name) for name in found]


@pytest.fixture
async def system_db(postgres_url: str) -> AsyncEngine:
    return create_engine(postgres_url, role=ROLE_SYSTEM)


async def test_a_row_is_there_as_it_was_put(system_db: AsyncEngine, postgres_url: str) -> None:
    log = new_log(system_db)
    stages = [StageRow("queue", 0, 12, "penny/0"), StageRow("decode", 12, 900, "", "left")]
    row = new_row(ttft_us=212_000, is_good=True, cost_pico=2**63 - 1, stages=stages)
    log.put(row)
    log.put(new_row(org=OTHER))
    await log.close()
    app_db = create_engine(postgres_url, role=ROLE_TENANT)
    async with tenant(app_db, ORG) as conn:
        [found] = (await conn.execute(sa.text("SELECT * FROM request_log"))).mappings()
    assert found["id"].hex == row.id and found["at"].timestamp() * 1000 == row.at_ms
    assert found["stages"] == [["queue", 0, 12, "penny/0", ""], ["decode", 12, 900, "", "left"]]
    for name in ("org", "project", "key", "model", "lane", "status", "ttft_us", "cost_pico"):
        assert found[name] == getattr(row, name)
    assert found["tpot_us"] is None and found["is_good"] is True
    await app_db.dispose()
    await system_db.dispose()


async def test_a_batch_is_one_statement_whatever_it_has(
    system_db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = rows.write

    async def noted(conn: object, batch: list[bytes], **named: bool) -> int:
        written.append(len(batch))
        return await write(conn, batch, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(rows, "write", noted)
    monkeypatch.setattr(writer, "MAX_BATCH", 100)
    log = new_log(system_db)
    for number in range(250):
        log.put(new_row(key=f"key_{number}"))
    await log.flush()
    assert written == [100, 100, 50]
    assert await count(system_db) == await count(system_db, "requests_hourly") == 250
    await system_db.dispose()


async def test_without_rows_nothing_is_asked() -> None:
    nowhere = create_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    log = new_log(nowhere, now=0.0)
    await log.flush()
    await log.close()
    assert dropped_of(log) == 0


async def test_a_postgres_that_is_away_costs_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 100)
    nowhere = create_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    log = new_log(nowhere)
    for _ in range(130):
        log.put(new_row())
    await log.flush()
    assert dropped_of(log) == 30
    log.put(new_row())
    await log.close()
    assert dropped_of(log) == 131
    await nowhere.dispose()


async def test_content_that_no_table_takes_is_given_up(system_db: AsyncEngine) -> None:
    log = new_log(system_db)
    log.put(new_row(model="a\0b"))
    await log.flush()
    assert dropped_of(log) == 1
    log.put(new_row())
    await log.flush()
    assert await count(system_db) == 1
    await system_db.dispose()


async def test_rows_of_a_transaction_are_there_with_the_rest_of_it(system_db: AsyncEngine) -> None:
    log = new_log(system_db)
    wrong, right, undone = new_row(model="a\0b"), new_row(), new_row()
    await log.keep_days_of([wrong, right, undone])
    with contextlib.suppress(ZeroDivisionError):
        async with system_db.begin() as conn:
            await log.write_within(conn, [undone])
            raise ZeroDivisionError
    async with system_db.begin() as conn:
        await log.write_within(conn, [wrong])
        await log.write_within(conn, [right])
    assert await count(system_db) == await count(system_db, "requests_hourly") == 1
    assert dropped_of(log) == 1
    await system_db.dispose()


async def test_a_slow_postgres_is_waited_for_a_while(
    system_db: AsyncEngine, db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FLUSH_TIMEOUT_S", 0.2)
    log = new_log(system_db)
    log.put(new_row())
    async with db.begin() as conn:
        await conn.execute(sa.text("LOCK TABLE requests_daily IN ACCESS EXCLUSIVE MODE"))
        await log.flush()
    assert await count(db) == 0 and dropped_of(log) == 0
    monkeypatch.undo()
    await log.flush()
    assert await count(db) == 1
    await system_db.dispose()


async def test_days_are_made_before_they_begin_and_dropped_when_they_are_old(
    system_db: AsyncEngine,
) -> None:
    now = datetime(2030, 5, 10, 12, tzinfo=UTC)
    for day in range(6):
        log = new_log(system_db, now=now.timestamp())
        log.put(new_row(at=(now - timedelta(days=day)).timestamp()))
        await log.flush()
    log = new_log(system_db, keep_days=2, now=now.timestamp())
    log._tidy_at = 0.0
    await log.flush()
    today = now.date()
    assert await partitions(system_db) == [today + timedelta(days=n) for n in (-2, -1, 0, 1)]
    assert await count(system_db) == 3 and await count(system_db, "requests_daily") == 6
    log = new_log(system_db, keep_days=0, now=now.timestamp())
    log._tidy_at = 0.0
    log.put(new_row(at=now.timestamp()))
    await log.flush()
    assert await partitions(system_db) == [today + timedelta(days=1)]
    assert await count(system_db) == 0 and await count(system_db, "requests_daily") == 6
    await system_db.dispose()


async def test_a_day_that_another_gateway_dropped_is_made_again(system_db: AsyncEngine) -> None:
    at = datetime(2030, 5, 10, 12, tzinfo=UTC)
    log = new_log(system_db, now=at.timestamp())
    log.put(new_row(at=at.timestamp()))
    await log.flush()
    async with system_db.begin() as conn:
        await rows.drop_days(conn, keep=0, today=at.date() + timedelta(days=1))
    log.put(new_row(at=at.timestamp()))
    await log.flush()  # finds that its day is gone
    await log.flush()
    assert await count(system_db) == 1 and dropped_of(log) == 0
    await system_db.dispose()


async def test_sums_by_hour_are_forgotten_in_time(system_db: AsyncEngine) -> None:
    now = time.time()
    log = new_log(system_db)
    for days in (rows.HOURS_KEPT_DAYS + 1, 1):
        log.put(new_row(at=now - days * 86_400))
    log._tidy_at = 0.0
    await log.flush()
    assert await count(system_db, "requests_hourly") == 1
    assert await count(system_db, "requests_daily") == 2
    await system_db.dispose()


async def test_postgres_killed_under_writing_loses_no_row_that_had_room() -> None:
    folder = make_scratch()
    home = Home(folder)
    with_cluster(home)
    child = await embedded.start_postgres(home)
    db = create_engine(embedded.postgres_url(home), role=ROLE_SYSTEM)
    log = RequestLog(db, keep_days=30, on_dropped=dropped.append, interval_s=0.01)
    log.start()
    made = 0
    stop = asyncio.Event()

    async def answer() -> None:
        nonlocal made
        while not stop.is_set():
            log.put(new_row(key=f"key_{made % 7}"))
            made += 1
            await asyncio.sleep(0.001)

    answering = asyncio.create_task(answer())
    try:
        while not await count(db):
            await asyncio.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        await child.wait()
        before = made
        while made < before + 50:  # answered all the same
            await asyncio.sleep(0.01)
        child = await embedded.start_postgres(home)
        stop.set()
        await answering
        await log.close()
        assert await count(db) == made and dropped == []
        async with db.connect() as conn:
            query = "SELECT sum(num_requests) FROM requests_hourly"
            assert await conn.scalar(sa.text(query)) == made
    finally:
        stop.set()
        await answering
        await log.stop()
        await db.dispose()
        await child.stop(embedded.STOP_TIMEOUT_S)
        shutil.rmtree(folder)


dropped: list[int] = []
