"""How fast usage becomes money: into the spool, into the books, onto a report and an invoice.

    python -m bench.metering [--events N] [--invoice-events N [--no-whole]] [--dry]

One throw-away Postgres with fsync on, in a folder of --at (a disk, not memory). `closes`: into a
spool by 64 streams open at once, each acknowledged by one sync policy and by the other, with the
writes and syncs of each. `events`: batches as the shipper books them, full ledger, by one process
and by two, each on a connection of its own, and what an event costs of processor time on either
side, which a busy machine changes less. `usage`: thirty days by day of a tenant with a hundred
million events, from the rollups, whose rows are made directly. `invoice`: a month of ten million
events, from close to final; made directly are its sums by hour, as booking writes them, the rows of
the events that came late, which it reads by themselves, and those of all others (nine gigabytes and
some minutes), among which it finds these; --no-whole leaves them out. The result goes to
`bench/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from bench.tools.record import record
from billing.events import COMPONENTS, Attempt, PriceSet, Quantities, UsageEvent
from billing.ingestion.ingest import MAX_BATCH, ingest
from billing.invoices.accounts import BillingTerms, set_account
from billing.invoices.closing import close, finalize
from billing.pricing.price_book import PriceBook
from billing.reconciliation.checks import check_ledger
from billing.reports.usage import usage_completions
from billing.spool.spool import Spool
from billing.spool.sync_policy import SyncPolicy
from billing.tables import AMOUNTS, REQUESTS
from gateway.db import create_engine
from gateway.home import Home
from gateway.ids import uuid7
from gateway.processes import embedded_databases as embedded
from migrations.runner import migrate

ORGS, KEYS_OF_ORG, MODELS = 50, 4, ("penny", "another")
SPOOL_WAYS = 64
WARM_UP, WARM_UP_BATCHES = 30, 3
MAX_BOOKING_S = 40.0
WAL_SEGMENTS = 20
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
AT_LEAST = ("events_per_s_of_one", "events_per_s_of_two", "closes_per_s")


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


class Booking(NamedTuple):
    """The work of one shipper's process between the two barriers."""

    num_events: int
    client_cpu_s: float
    backend_cpu_s: float


def book_events(url: str, count: int, seed: int, ready: Barrier, done: Queue[Booking]) -> None:
    """One shipper's process: events as a spool gives them, each with prices of its own."""
    decoder, encoder = msgspec.msgpack.Decoder(UsageEvent), msgspec.msgpack.Encoder()
    events = [decoder.decode(encoder.encode(event)) for event in some_events(count, seed)]
    gc.freeze()  # they are the benchmark's, not the shipper's

    async def work() -> None:
        db = create_engine(url, pool_size=1)
        for start in range(0, WARM_UP, WARM_UP // WARM_UP_BATCHES):
            await ingest(db, events[start : start + WARM_UP // WARM_UP_BATCHES])
        async with db.connect() as connection:
            backend = await connection.scalar(sa.text("SELECT pg_backend_pid()"))
        await asyncio.to_thread(ready.wait)
        began_s, cpu_s, backend_s = time.perf_counter(), time.process_time(), cpu_of(backend)
        num_events = 0
        for start in range(WARM_UP, count, MAX_BATCH):
            num_events += len(batch := events[start : start + MAX_BATCH])
            await ingest(db, batch)
            if time.perf_counter() - began_s > MAX_BOOKING_S:
                break
        await asyncio.to_thread(ready.wait)
        used_s = time.process_time() - cpu_s, cpu_of(backend) - backend_s
        done.put(Booking(num_events, *used_s))
        await db.dispose()

    asyncio.run(work())


def cpu_of(pid: int) -> float:
    """Seconds of processor time, its user's and its system's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def events_per_s(url: str, count: int, processes: int) -> tuple[float, dict[str, float]]:
    """By so many processes together, and what an event costs each of its two sides."""
    context = multiprocessing.get_context("spawn")
    ready, done = context.Barrier(processes + 1), context.Queue()
    workers = [
        context.Process(target=book_events, args=(url, count, seed, ready, done))
        for seed in range(processes)
    ]
    for worker in workers:
        worker.start()
    ready.wait()
    began_s = time.perf_counter()
    ready.wait()
    took_s = time.perf_counter() - began_s
    found = [done.get() for _ in workers]
    for worker in workers:
        worker.join()
    total = sum(each.num_events for each in found)
    each_us = {
        name: round(1e6 * sum(getattr(each, f"{name}_cpu_s") for each in found) / total, 1)
        for name in ("client", "backend")
    }
    return total / took_s, each_us


async def age(db: AsyncEngine) -> None:
    """A server that has run for a while writes over the files of its log; a new one makes each,
    twice as much to write. And nothing is left to write of what was measured before."""
    async with db.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        for _ in range(WAL_SEGMENTS):
            await connection.execute(
                sa.text(
                    "SELECT pg_logical_emit_message(false, 'bench', repeat('x', 16 * 1024 * 1024))"
                )
            )
        await connection.execute(sa.text("CHECKPOINT"))


# Into the spool.


async def closes_per_s(folder: Path, count: int, policy: SyncPolicy) -> dict[str, float]:
    spool = await Spool.open(folder, policy=policy)
    events = some_events(count, 7)
    took: list[float] = []

    async def close_some(mine: list[UsageEvent]) -> None:
        for event in mine:
            spool.attempt_opened(event.attempt)
            await asyncio.sleep(0)  # all are open at once, as streams are: no close is alone
            began_s = time.perf_counter()
            await spool.close(event)
            took.append(time.perf_counter() - began_s)

    began_s = time.perf_counter()
    await asyncio.gather(*(close_some(events[way::SPOOL_WAYS]) for way in range(SPOOL_WAYS)))
    rate = count / (time.perf_counter() - began_s)
    counts = spool.counts
    await spool.shutdown()
    quantiles = statistics.quantiles(took, n=100)
    return {
        "closes_per_s": rate,
        "p50_ms": quantiles[49] * 1e3,
        "p99_ms": quantiles[98] * 1e3,
        "writes_each": counts.writes / count,
        "syncs_each": counts.syncs / count,
        "bytes_each": counts.bytes / count,
    }


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
HOURS, PROJECTS, OUTPUT, PICO = 28 * 24, 4, 20, 8_000_000
GROUPS = HOURS * PROJECTS * 3
"""By hour, project and model."""
_PLACED = f"""
    CROSS JOIN LATERAL (SELECT n % {GROUPS} AS g) g
    CROSS JOIN LATERAL (SELECT 'proj_' || g / {HOURS} % {PROJECTS} AS project,
        'model_' || g / {HOURS * PROJECTS} AS model,
        CAST(:start AS timestamptz) + g % {HOURS} * interval '1 hour'
            + n / {GROUPS} % 3600 * interval '1 second' AS at) p
"""
_COUNTED = ", ".join((*COMPONENTS, *AMOUNTS))
_NUMBERED = "FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n"


def _each(factor: str, *names: str) -> str:
    """SQL: so many times what one event used and costs, by column."""
    one = {"output": OUTPUT, "output_pico": PICO, "output_requests": 1}
    return ", ".join(f"{factor} * {one[name]}" if name in one else "0" for name in names)


_EVENTS = f"""
    INSERT INTO usage_events (id, request_id, org, project, key, model, lane, tier, kind, finish,
        estimated, {_COUNTED}, suspended, price_set, band, late, price_list, digest, admitted_at,
        occurred_at)
    SELECT 'event-' || n, 'req-' || n, '{LARGE}', project, 'key_' || n % 20, model, 'interactive',
        'default', 'usage', 'done', false, {_each("1", *COMPONENTS, *AMOUNTS)}, false,
        '{PRICE_SET}', 0, CAST(:late AS boolean), 'default', '', at, at
    {_NUMBERED} {_PLACED}
"""
_TRANSFERS = f"""
    INSERT INTO transfers (id, event_id, debit, credit, amount_pico, kind, admitted_at)
    SELECT 'event-' || n, 'event-' || n, 'receivable:{LARGE}', 'revenue:' || model, {PICO},
        'usage', at
    {_NUMBERED} {_PLACED}
"""
_CHARGES = f"""
    INSERT INTO usage_charges (org, hour, project, model, tier, price_set, band, {_COUNTED},
        {", ".join(REQUESTS)})
    SELECT '{LARGE}', at, project, model, 'default', '{PRICE_SET}', 0,
        {_each("CAST(:each AS bigint)", *COMPONENTS, *AMOUNTS, *REQUESTS)}
    {_NUMBERED} {_PLACED}
"""
AT_A_TIME = 100_000


async def write_month(db: AsyncEngine, count: int, num_late: int, *, whole: bool) -> int:
    """A month's events: their sums by hour as they are booked, the rows of those that came late,
    and, if `whole`, of all others. Returns how many there are."""
    each = -(-count // GROUPS)
    on_time = each * GROUPS
    async with db.begin() as connection:
        known = sa.text(f"INSERT INTO orgs (id, name) VALUES ('{LARGE}', 'Large')")
        await connection.execute(known)
        priced = sa.text("INSERT INTO price_sets VALUES (:id, CAST(:prices AS jsonb))")
        await connection.execute(priced, {"id": PRICE_SET, "prices": PRICE})
        named = [f"receivable:{LARGE}", *(f"revenue:model_{n}" for n in range(3))]
        made = sa.text("INSERT INTO accounts (id) SELECT unnest(CAST(:ids AS text[]))")
        await connection.execute(made, {"ids": named})
        await set_account(connection, org_id=LARGE, terms=BillingTerms(), now=MONTH_START)
        sums = {"first": 0, "last": GROUPS - 1, "start": MONTH_START, "each": each}
        await connection.execute(sa.text(_CHARGES), sums)
    spans = [(on_time, on_time + num_late, True), *([(0, on_time, False)] if whole else [])]
    for begin, end, late in spans:
        for first in range(begin, end, AT_A_TIME):
            bounds = {"first": first, "last": min(first + AT_A_TIME, end) - 1}
            async with db.begin() as connection:
                named_too = {"start": MONTH_START, **bounds}
                await connection.execute(sa.text(_EVENTS), named_too | {"late": late})
                await connection.execute(sa.text(_TRANSFERS), named_too)
    async with db.begin() as connection:
        await connection.execute(sa.text("ANALYZE usage_events, transfers, usage_charges"))
    return on_time + num_late


async def invoice_s(db: AsyncEngine, num_events: int) -> float:
    """From close to final."""
    now = datetime.now(UTC)
    began_s = time.perf_counter()
    draft = await close(db, org_id=LARGE, now=now)
    assert draft is not None
    final = await finalize(db, org_id=LARGE, invoice_id=draft.id, now=now + timedelta(days=30))
    assert final.exact_pico == num_events * PICO, f"{final.exact_pico} for {num_events} events"
    return time.perf_counter() - began_s


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    home = Home(folder / "home")
    home.create()
    found: dict[str, Any] = await closes_per_s(folder / "spool", options.closes, "group")
    waiting = await closes_per_s(folder / "other-spool", options.closes, "before_answer")
    found |= {f"{name}_before_answer": figure for name, figure in waiting.items()}
    server = await embedded.start_postgres(home)
    url = embedded.postgres_url(home)
    try:
        await migrate(url)
        db = create_engine(url)
        for processes, name in ((1, "one"), (2, "two")):
            await age(db)
            rate, costs = await asyncio.to_thread(events_per_s, url, options.events, processes)
            found[f"events_per_s_of_{name}"] = round(rate)
            found |= {f"{side}_us_each_of_{name}": cost for side, cost in costs.items()}
        problems = await check_ledger(db)
        assert problems == [], problems
        found |= await usage_query_ms(db)
        count, late = options.invoice_events, options.late_events
        found["invoice_events"] = await write_month(db, count, late, whole=options.whole)
        found["invoice_s"] = await invoice_s(db, found["invoice_events"])
        await db.dispose()
    finally:
        await server.stop(embedded.STOP_TIMEOUT_S)
    return found


def verdict(name: str, value: float) -> str:
    target = TARGETS.get(name)
    if target is None:
        return ""
    is_met = value >= target if name in AT_LEAST else value <= target
    bound = "at least" if name in AT_LEAST else "at most"
    return f"   {bound} {target:,}: {'met' if is_met else 'NOT met'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000, help="of each shipper")
    parser.add_argument("--closes", type=int, default=50_000)
    parser.add_argument("--invoice-events", type=int, default=10_000_000)
    parser.add_argument("--late-events", type=int, default=100_000)
    parser.add_argument(
        "--whole",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write every event of the invoice, not their sums alone",
    )
    parser.add_argument("--at", type=Path, default=Path("/tmp"), help="a folder on a disk")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tg-metering-", dir=options.at))
    try:
        found = asyncio.run(measure(folder, options))
    finally:
        shutil.rmtree(folder)
    for name, value in found.items():
        print(f"{name:28} {value:14,.2f}{verdict(name, value)}")
    if not options.dry:
        print(record("metering", {"events": options.events, "whole": options.whole, **found}))


if __name__ == "__main__":
    main()
