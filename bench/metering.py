"""How fast usage becomes money: into the spool, into the books, onto a report and an invoice.

    python -m bench.metering [--events N] [--invoice-events N] [--dry]

One throw-away Postgres with fsync on, in a folder of --at (a disk, not memory). `events`: batches
as the shipper books them, full ledger, by one process and by two, each on a connection of its own.
`closes`: into a spool at 64-way, each acknowledged once it is on disk. `usage`: thirty days by day
of a tenant with a hundred million events, from the rollups, whose rows are made directly.
`invoice`: a month of so many events, whose rows and transfers are made directly, from close to
final. Above: nobody. Below: `billing`. The result goes to `bench/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from bench.record import record
from billing.events import COMPONENTS, Attempt, PriceSet, Quantities, UsageEvent
from billing.ingest import MAX_BATCH, ingest
from billing.invoices.accounts import Terms, set_account
from billing.invoices.closing import close, finalize
from billing.ledger import USES, check
from billing.price_book import PriceBook
from billing.spool import Spool
from billing.tables import AMOUNTS
from billing.usage_report import usage_completions
from gateway import embedded
from gateway.db import create_engine
from gateway.home import Home
from gateway.ids import uuid7
from migrations.runner import migrate

ORGS, KEYS_OF_ORG, MODELS = 50, 4, ("penny", "another")
SPOOL_WAYS = 64
WARM_UP_BATCHES = 3
REPORT_REPEATS = 30
REPORTED_EVENTS = 100_000_000
LARGE = "org_large"
MONTH_END = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
MONTH_START = (MONTH_END - timedelta(days=1)).replace(day=1)
TARGETS = {
    "events_per_s_of_one": 20_000,
    "events_per_s_of_two": 40_000,
    "closes_per_s": 10_000,
    "usage_query_ms": 50,
    "invoice_s": 60,
}


def some_events(count: int, seed: int) -> list[UsageEvent]:
    rng, now = random.Random(seed), time.time()
    book = PriceBook.load()
    prices: PriceSet = book.at("penny", now)
    return [one_event(rng, prices, now) for _ in range(count)]


def one_event(rng: random.Random, prices: PriceSet, now: float) -> UsageEvent:
    org = rng.randrange(ORGS)
    attempt = Attempt(
        id=str(uuid7()),
        request_id=f"req_{uuid7().hex}",
        org=f"org_{org}",
        project=f"proj_{org}",
        key=f"key_{org}_{rng.randrange(KEYS_OF_ORG)}",
        model=rng.choice(MODELS),
        prices=prices,
        admitted_at=now,
    )
    used = Quantities(
        uncached_input=rng.randrange(1, 2000),
        cache_read=16 * rng.randrange(50),
        output=rng.randrange(1, 500),
    )
    return UsageEvent(attempt=attempt, quantities=used, occurred_at=now + 1)


# Into the books.


def book_events(url: str, count: int, seed: int, ready: Barrier) -> None:
    """One shipper's process."""
    events = some_events(count, seed)

    async def work() -> None:
        db = create_engine(url, pool_size=1)
        warm_up, events[:] = events[: WARM_UP_BATCHES * 10], events[WARM_UP_BATCHES * 10 :]
        for start in range(0, len(warm_up), 10):
            await ingest(db, warm_up[start : start + 10])
        await asyncio.to_thread(ready.wait)
        for start in range(0, len(events), MAX_BATCH):
            await ingest(db, events[start : start + MAX_BATCH])
        await asyncio.to_thread(ready.wait)
        await db.dispose()

    asyncio.run(work())


def events_per_s(url: str, count: int, processes: int) -> float:
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(processes + 1)
    workers = [
        context.Process(target=book_events, args=(url, count // processes, seed, ready))
        for seed in range(processes)
    ]
    for worker in workers:
        worker.start()
    ready.wait()
    began_s = time.perf_counter()
    ready.wait()
    took_s = time.perf_counter() - began_s
    for worker in workers:
        worker.join()
    return (count - processes * WARM_UP_BATCHES * 10) / took_s


# Into the spool.


async def closes_per_s(folder: Path, count: int) -> dict[str, float]:
    spool = await Spool.open(folder)
    events = some_events(count, 7)
    took: list[float] = []

    async def close_some(mine: list[UsageEvent]) -> None:
        for event in mine:
            spool.attempt_opened(event.attempt)
            began_s = time.perf_counter()
            await spool.close(event)
            took.append(time.perf_counter() - began_s)

    began_s = time.perf_counter()
    await asyncio.gather(*(close_some(events[way::SPOOL_WAYS]) for way in range(SPOOL_WAYS)))
    rate = count / (time.perf_counter() - began_s)
    await spool.shutdown()
    quantiles = statistics.quantiles(took, n=100)
    return {"closes_per_s": rate, "p50_ms": quantiles[49] * 1e3, "p99_ms": quantiles[98] * 1e3}


# Onto a report.

_ZEROS = ", ".join("0" for _ in COMPONENTS)


def _rolled_up(table: str, unit: str, steps: int) -> str:
    """SQL: twenty keys and three models, used in every step of the last thirty days."""
    each = REPORTED_EVENTS // (steps * 20 * 3)
    return f"""
        INSERT INTO {table} (org, {unit}, project, key, model, tier, batch,
            {", ".join((*COMPONENTS, *AMOUNTS))}, num_requests)
        SELECT '{LARGE}', date_trunc('{unit}', now(), 'UTC') - s * interval '1 {unit}',
            'proj_' || k % 4, 'key_' || k, 'model_' || m, 'default', false,
            {", ".join(f"{each * 10}" for _ in COMPONENTS)},
            {", ".join(f"{each * 1000}" for _ in AMOUNTS)}, {each}
        FROM generate_series(0, {steps - 1}) s, generate_series(1, 20) k, generate_series(1, 3) m
    """


async def usage_query_ms(db: AsyncEngine) -> dict[str, float]:
    async with db.begin() as connection:
        await connection.execute(sa.text(_rolled_up("usage_hourly", "hour", 30 * 24)))
        await connection.execute(sa.text(_rolled_up("usage_daily", "day", 30)))

    def open_rows(_: str) -> AbstractAsyncContextManager[AsyncConnection]:
        return db.connect()

    async def median_ms(**query: Any) -> float:
        took = []
        for _ in range(REPORT_REPEATS):
            began_s = time.perf_counter()
            start = int(time.time()) - 29 * 86_400
            await usage_completions(open_rows, org=LARGE, start_time=start, limit=31, **query)
            took.append(time.perf_counter() - began_s)
        return statistics.median(took) * 1e3

    return {
        "usage_query_ms": await median_ms(),
        "by_key_and_model_ms": await median_ms(group_by=["api_key_id", "model"]),
    }


# Onto an invoice.

PRICE = '{"output": {"price_id": "penny:output:1", "pico_per_token": 400000}}'
PRICE_SET = UUID(int=1)
_EVENTS = f"""
    INSERT INTO usage_events (id, request_id, org, project, key, model, lane, tier, kind, finish,
        estimated, {", ".join((*COMPONENTS, *AMOUNTS))}, suspended, price_set, band, late,
        price_list, digest, admitted_at, occurred_at)
    SELECT 'event-' || n, 'req-' || n, '{LARGE}', 'proj_' || n % 4, 'key_' || n % 20,
        'model_' || n % 3, 'interactive', 'default', 'usage', 'done', false,
        {", ".join("20" if name == "output" else "0" for name in COMPONENTS)},
        {", ".join("8000000" if name == "output_pico" else "0" for name in AMOUNTS)},
        false, '{PRICE_SET}', 0, false, '', '', s.at, s.at
    FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n
        CROSS JOIN LATERAL (SELECT CAST(:start AS timestamptz)
            + n % (28 * 86400) * interval '1 second' AS at) s
"""
_TRANSFERS = f"""
    INSERT INTO transfers (id, event_id, debit, credit, amount_pico, kind, admitted_at)
    SELECT 'event-' || n, 'event-' || n, 'receivable:{LARGE}', 'revenue:model_' || n % 3, 8000000,
        'usage', CAST(:start AS timestamptz) + n % (28 * 86400) * interval '1 second'
    FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n
"""
_CHARGES = f"""
    INSERT INTO usage_charges
    SELECT org, date_trunc('hour', admitted_at, 'UTC'), project, model, tier, price_set, band,
        {", ".join(f"sum({name})" for name in (*COMPONENTS, *AMOUNTS))}, {USES}
    FROM usage_events WHERE org = '{LARGE}' GROUP BY 1, 2, 3, 4, 5, 6, 7
"""
AT_A_TIME = 100_000


async def invoice_s(db: AsyncEngine, count: int) -> float:
    now = datetime.now(UTC)
    async with db.begin() as connection:
        known = sa.text(f"INSERT INTO orgs (id, name) VALUES ('{LARGE}', 'Large')")
        await connection.execute(known)
        named = [f"receivable:{LARGE}", *(f"revenue:model_{n}" for n in range(3))]
        priced = sa.text("INSERT INTO price_sets VALUES (:id, CAST(:prices AS jsonb))")
        await connection.execute(priced, {"id": PRICE_SET, "prices": PRICE})
        made = sa.text("INSERT INTO accounts (id) SELECT unnest(CAST(:ids AS text[]))")
        await connection.execute(made, {"ids": named})
        await set_account(connection, org_id=LARGE, terms=Terms(), now=MONTH_START)
    for first in range(1, count + 1, AT_A_TIME):
        last = min(first + AT_A_TIME - 1, count)
        bounds = {"first": first, "last": last, "start": MONTH_START}
        async with db.begin() as connection:
            await connection.execute(sa.text(_EVENTS), bounds)
            await connection.execute(sa.text(_TRANSFERS), bounds)
    async with db.begin() as connection:
        await connection.execute(sa.text(_CHARGES))
        await connection.execute(sa.text("ANALYZE usage_events, transfers"))
    began_s = time.perf_counter()
    draft = await close(db, org_id=LARGE, now=now)
    assert draft is not None
    final = await finalize(db, org_id=LARGE, invoice_id=draft.id, now=now + timedelta(days=30))
    assert final.exact_pico == count * 8_000_000, f"{final.exact_pico} for {count} events"
    return time.perf_counter() - began_s


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    home = Home(folder / "home")
    home.create()
    server = await embedded.start_postgres(home)
    url = embedded.postgres_url(home)
    found: dict[str, Any] = {}
    try:
        await migrate(url)
        db = create_engine(url)
        for processes, name in ((1, "one"), (2, "two")):
            rate = await asyncio.to_thread(events_per_s, url, options.events, processes)
            found[f"events_per_s_of_{name}"] = round(rate)
        assert await check(db) == []
        found |= await closes_per_s(folder / "spool", options.closes)
        found |= await usage_query_ms(db)
        found["invoice_events"] = options.invoice_events
        found["invoice_s"] = await invoice_s(db, options.invoice_events)
        await db.dispose()
    finally:
        await server.stop(embedded.STOP_TIMEOUT_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--closes", type=int, default=50_000)
    parser.add_argument("--invoice-events", type=int, default=10_000_000)
    parser.add_argument("--at", type=Path, default=Path("/tmp"), help="a folder on a disk")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tg-metering-", dir=options.at))
    try:
        found = asyncio.run(measure(folder, options))
    finally:
        shutil.rmtree(folder)
    for name, value in found.items():
        target = f"   (target {TARGETS[name]:,})" if name in TARGETS else ""
        print(f"{name:24} {value:14,.2f}{target}")
    if not options.dry:
        print(record("metering", {"events": options.events, **found}))


if __name__ == "__main__":
    main()
