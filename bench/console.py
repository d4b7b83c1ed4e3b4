"""How long the queries of the console's pages take, over the requests of a month.

    python -m bench.console [--requests N ...] [--repeat N] [--at FOLDER] [--dry]

One throw-away Postgres in a folder of --at. For each size one organization has that many requests
in 30 days: its sums by hour and by day in the request log and in the ledger, made by SQL, beside
those of 20 small organizations; and rows of the requests of the last 24 hours, four million at
most. 1 M requests are of 50 keys, 10 M of 150 and 100 M of 300, each with two models of one of
three lanes. What a page asks is timed as a page asks it, as the tenants' role behind row-level
security, --repeat times after three; `raw` is the same question, asked of the rows of one day, with
exact quantiles. A page has 100 ms: a recorded run ends with 1 where one has not. The result goes to
`bench/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from bench.tools.record import record
from billing.events import COMPONENTS
from billing.tables import AMOUNTS
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.request_log.histograms import DIGITS, NUM_BUCKETS
from gateway.request_log.search import Search, find_landed, find_request, find_requests
from gateway.request_log.summary import Filters, Group, summarize, window_of
from gateway.request_log.tables import COUNTS, GROUPED, HISTOGRAMS
from migrations.runner import migrate

ORG, SMALL_ORGS = "org_bench", 20
DAYS = 30
KEYS = {1_000_000: 50, 10_000_000: 150, 100_000_000: 300}
MAX_ROWS = 4_000_000
WARM_UP = 3
BOUND_MS = 100.0
Ask = Callable[[AsyncConnection], Awaitable[object]]


def pattern(middle: int) -> int:
    """Return a histogram of a hundred latencies around a bucket."""
    return sum(
        round(16 * math.exp(-(((n - middle) / 8) ** 2) / 2)) * 10 ** (DIGITS * n)
        for n in range(NUM_BUCKETS)
    )


async def make(db: AsyncEngine, requests: int, now: datetime) -> int:
    """Make the organization's month. Returns how many rows of requests it has."""
    keys = KEYS.get(requests) or max(4, round(50 * (requests / 1e6) ** 0.4))
    hour = now.replace(minute=0, second=0, microsecond=0)
    named = {"org": ORG, "keys": keys, "start": hour - timedelta(days=DAYS), "end": hour}
    each = requests / (DAYS * 24 * keys * 2)
    async with db.begin() as conn:
        await _add_hours(conn, named | {"each": each, "orgs": 1})
        await _add_hours(conn, named | {"org": "org_small", "keys": 10, "each": 3.0, "orgs": 20})
        await _add_days(conn)
        await _add_ledger(conn)
    rows = min(MAX_ROWS, requests // DAYS)
    for number in range(3):
        async with db.begin() as conn:
            day = (now - timedelta(days=number)).date()
            await conn.execute(sa.text("SELECT keep_request_day(:day)"), {"day": day})
    for done in range(0, rows, 250_000):
        async with db.begin() as conn:
            await _add_rows(conn, now, done, min(250_000, rows - done), rows, keys)
    async with db.connect() as conn:
        conn = await conn.execution_options(isolation_level="AUTOCOMMIT")
        await conn.execute(sa.text("VACUUM ANALYZE"))
    return rows


async def _add_hours(conn: AsyncConnection, named: Mapping[str, Any]) -> None:
    await conn.execute(
        sa.text(f"""
            INSERT INTO requests_hourly (
                org, hour, {", ".join(GROUPED)}, {", ".join(COUNTS)}, cost_pico,
                {", ".join(HISTOGRAMS)}
            )
            SELECT CAST(:org AS text) || CASE WHEN o = 1 THEN '' ELSE o::text END, hour,
                'proj_' || (k % greatest(1, CAST(:keys AS int) / 10)), 'key_' || k,
                'model_' || ((k + c) % 8), (ARRAY['interactive', 'agentic', 'batch'])[1 + k % 3],
                n, n / 200, n / 300, n / 500, n / 400, n, n - n / 50,
                n * 400, n * 900, n * 60, n * 200, n * 20, n * 2000000, n * 30000,
                n * 1250000, t * (1 + n / 100), p * (1 + n / 100)
            FROM generate_series(1, CAST(:orgs AS int)) AS o,
                generate_series(1, CAST(:keys AS int)) AS k,
                generate_series(1, 2) AS c,
                generate_series(CAST(:start AS timestamptz),
                    CAST(:end AS timestamptz) - interval '1 hour', interval '1 hour') AS hour,
                LATERAL (SELECT (1 + CAST(:each AS float8) * (0.6 + 0.8 * random()))::bigint AS n,
                    CAST((CAST(:ttft AS text[]))[1 + k % 4] AS numeric) AS t,
                    CAST((CAST(:tpot AS text[]))[1 + k % 4] AS numeric) AS p) AS made
            ORDER BY 1, 2
        """),
        {
            **named,
            "ttft": [str(pattern(70 + 3 * n)) for n in range(4)],
            "tpot": [str(pattern(40 + 3 * n)) for n in range(4)],
        },
    )


async def _add_days(conn: AsyncConnection) -> None:
    sums = ", ".join(f"sum({name})" for name in (*COUNTS, "cost_pico", *HISTOGRAMS))
    await conn.execute(
        sa.text(f"""
            INSERT INTO requests_daily
            SELECT org, date_trunc('day', hour, 'UTC'), {", ".join(GROUPED)}, {sums}
            FROM requests_hourly GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2
        """)
    )


async def _add_ledger(conn: AsyncConnection) -> None:
    used = {
        "uncached_input": "uncached_tokens",
        "cache_read": "cached_tokens",
        "cache_write_5m": "written_tokens",
        "output": "output_tokens",
    }
    names = (*COMPONENTS, *AMOUNTS, "num_requests", "num_embeddings")
    values = dict.fromkeys(names, "0") | used | {"num_requests": "num_requests"}
    values |= {
        "uncached_input_pico": "uncached_tokens * 1000",
        "output_pico": "output_tokens * 4000",
    }
    values |= {"cache_read_pico": "cached_tokens * 100"}
    for table, source, unit in (
        ("usage_hourly", "requests_hourly", "hour"),
        ("usage_daily", "requests_daily", "day"),
    ):
        sums = ", ".join(f"sum({values[name]})" for name in names)
        await conn.execute(
            sa.text(f"""
                INSERT INTO {table} (org, {unit}, project, key, model, tier, batch,
                    {", ".join(names)})
                SELECT org, {unit}, project, key, model, 'default', lane = 'batch', {sums}
                FROM {source} GROUP BY 1, 2, 3, 4, 5, 6, 7 ORDER BY 1, 2
            """)
        )


async def _add_rows(
    conn: AsyncConnection, now: datetime, done: int, number: int, rows: int, keys: int
) -> None:
    await conn.execute(
        sa.text("""
            INSERT INTO request_log (
                org, at, id, project, key, model, lane, route, status, is_good,
                duration_us, ttft_us, tpot_us, queue_us, uncached_tokens, cached_tokens,
                written_tokens, output_tokens, reasoning_tokens, cost_pico, trace, stages,
                landed_at
            )
            SELECT CAST(:org AS text), TIMESTAMPTZ 'epoch' + ms * interval '1 millisecond', id,
                'proj_' || (k % greatest(1, CAST(:keys AS int) / 10)), 'key_' || k,
                'model_' || ((k + n % 2) % 8),
                (ARRAY['interactive', 'agentic', 'batch'])[1 + k::int % 3],
                '/v1/chat/completions',
                CASE WHEN n % 200 = 0 THEN 503 WHEN n % 300 = 0 THEN 429 ELSE 200 END, n % 50 <> 0,
                (2000000 * (0.5 + random()))::bigint, (200000 * exp(random() * 2))::bigint,
                (20000 * exp(random()))::bigint, (30000 * random())::bigint,
                400, 900, 60, 200, 20, 1250000 + n % 1000, id,
                '[["prepare",100,300,"model/0",""],["queue",400,30000,"model/0",""],
                    ["prefill",30400,180000,"",""],["decode",210000,1700000,"",""]]',
                TIMESTAMPTZ 'epoch' + ms * interval '1 millisecond' + interval '2 s'
            FROM generate_series(CAST(:done AS int), CAST(:until AS int) - 1) AS n,
                LATERAL (SELECT
                    (CAST(:first_ms AS bigint) + n * CAST(:step AS float8))::bigint AS ms,
                    1 + (n::bigint * 7919) % CAST(:keys AS int) AS k) AS a,
                LATERAL (SELECT (lpad(to_hex(ms), 12, '0') || '7'
                    || substr(md5(n::text), 14))::uuid AS id) AS b
        """),
        {
            "org": ORG,
            "keys": keys,
            "done": done,
            "until": done + number,
            "first_ms": int((now - timedelta(hours=24)).timestamp() * 1000),
            "step": 86_400_000 / rows,
        },
    )


def pages(now: datetime, last_id: str, rows: int) -> dict[str, Ask]:
    """Return what each page asks, by its name."""
    day, month = now - timedelta(hours=24), now - timedelta(days=DAYS - 15)

    def sums(start: datetime, *by: Group, **filters: str) -> Ask:
        window = window_of(start, now)
        return lambda conn: summarize(conn, ORG, window, by=by, filters=Filters(**filters))

    def search(after: str | None = None, **wanted: Any) -> Ask:
        asked = Search(start=now - timedelta(days=2), end=now, **wanted)
        return lambda conn: find_requests(conn, ORG, asked, after=after)

    return {
        "overview, 24 hours": sums(day, "project", "model"),
        "overview, 15 days": sums(month, "project", "model"),
        "usage by model, 24 hours": sums(day, "model"),
        "usage by key, 24 hours": sums(day, "key"),
        "usage by key, 15 days": sums(month, "key"),
        "usage by lane, 24 hours": sums(day, "lane"),
        "usage of one key, 24 hours": sums(day, "model", key="key_7"),
        "requests, newest": search(),
        "requests, a page far behind": search(after=last_id),
        "requests of a key": search(key="key_7"),
        "requests that failed": search(outcome="bad"),
        "requests, dearer than any": search(least_pico=10**15),
        "one request": lambda conn: find_request(conn, ORG, last_id),
    }


RAW_OVERVIEW = sa.text("""
    SELECT date_trunc('hour', at) AS hour, project, model, count(*),
        count(*) FILTER (WHERE status >= 500), count(*) FILTER (WHERE is_good),
        sum(uncached_tokens), sum(cached_tokens), sum(output_tokens), sum(cost_pico),
        percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY ttft_us)
    FROM request_log WHERE org = :org AND at >= :start
    GROUP BY GROUPING SETS ((), (date_trunc('hour', at)), (project, model))
""")
RAW_BY_KEY = sa.text("""
    SELECT key, count(*), sum(cost_pico), sum(output_tokens),
        percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY ttft_us)
    FROM request_log WHERE org = :org AND at >= :start GROUP BY key
""")
RAW_PAGE = sa.text("""
    SELECT * FROM request_log WHERE org = :org AND at >= :start AND cost_pico >= 1000000000000000
    ORDER BY at DESC LIMIT 50
""")


def raw(now: datetime) -> dict[str, Ask]:
    named = {"org": ORG, "start": now - timedelta(hours=24)}
    return {
        "overview, 24 hours": lambda conn: conn.execute(RAW_OVERVIEW, named),
        "usage by key, 24 hours": lambda conn: conn.execute(RAW_BY_KEY, named),
        "requests, dearer than any": lambda conn: conn.execute(RAW_PAGE, named),
    }


async def timed(db: AsyncEngine, ask: Ask, repeat: int, warm_up: int = WARM_UP) -> dict[str, float]:
    took = []
    for _ in range(warm_up + repeat):
        begun = time.perf_counter()
        async with tenant(db, ORG) as conn:
            await ask(conn)
        took.append((time.perf_counter() - begun) * 1000)
    kept = sorted(took[warm_up:])
    last = kept[math.ceil(0.95 * len(kept)) - 1]
    return {"p50_ms": round(statistics.median(kept), 1), "p95_ms": round(last, 1)}


async def measure(requests: int, folder: Path, repeat: int) -> dict[str, Any]:
    home = Home(folder)
    home.create()
    child = await embedded.start_postgres(home, durable=False)
    url = embedded.postgres_url(home)
    owner = create_engine(url)
    app, system = create_engine(url, role=ROLE_TENANT), create_engine(url, role=ROLE_SYSTEM)
    try:
        await migrate(url)
        async with owner.begin() as conn:  # making takes longer than a request may
            await conn.execute(sa.text("ALTER DATABASE tollgate SET statement_timeout = 0"))
        maker = create_engine(url)
        now, begun = datetime.now(UTC), time.perf_counter()
        rows = await _unhurried(maker, requests, now)
        found: dict[str, Any] = {"rows_of_requests": rows, "pages": {}, "raw": {}}
        found["made_in_s"] = round(time.perf_counter() - begun, 1)
        async with owner.connect() as conn:
            for table in ("requests_hourly", "requests_daily", "usage_hourly", "usage_daily"):
                counted = await conn.scalar(sa.text(f"SELECT count(*) FROM {table}"))
                found[f"rows_of_{table}"] = counted
            query = "SELECT id FROM request_log WHERE org = :org ORDER BY at OFFSET 1000 LIMIT 1"
            last_id = (await conn.scalar(sa.text(query), {"org": ORG})).hex
        for name, ask in pages(now, last_id, rows).items():
            found["pages"][name] = await timed(app, ask, repeat)
        found["pages"]["live tail, one look"] = await timed_tail(system, repeat)
        for name, ask in raw(now).items():
            found["raw"][name] = await timed(app, ask, 3, warm_up=1)
        return found
    finally:
        for each in (owner, app, system):
            await each.dispose()
        await child.stop(embedded.STOP_TIMEOUT_S)


async def _unhurried(maker: AsyncEngine, requests: int, now: datetime) -> int:
    @sa.event.listens_for(maker.sync_engine, "connect")
    def unbound(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("SET statement_timeout = 0")
        cursor.close()

    try:
        return await make(maker, requests, now)
    finally:
        await maker.dispose()


async def timed_tail(db: AsyncEngine, repeat: int) -> dict[str, float]:
    took = []
    for _ in range(repeat):
        begun = time.perf_counter()
        async with db.connect() as conn:
            await find_landed(conn, [ORG], 6.0, 500)
        took.append((time.perf_counter() - begun) * 1000)
    took.sort()
    last = took[math.ceil(0.95 * len(took)) - 1]
    return {"p50_ms": round(statistics.median(took), 1), "p95_ms": round(last, 1)}


def show(requests: int, found: Mapping[str, Any]) -> bool:
    """Print a table, and tell whether every page is within its bound."""
    print(
        f"{requests:,} requests; {found['rows_of_requests']:,} rows of them, "
        f"{found['rows_of_requests_hourly']:,} sums by hour; made in {found['made_in_s']} s"
    )
    for name, took in found["pages"].items():
        beside = found["raw"].get(name)
        rest = f"   raw {beside['p50_ms']:>9,.1f}" if beside else ""
        print(f"  {name:<30} p50 {took['p50_ms']:>7.1f}  p95 {took['p95_ms']:>7.1f} ms{rest}")
    return all(took["p95_ms"] <= BOUND_MS for took in found["pages"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--at", type=Path, default=None, help="a folder on a disk")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    result: dict[str, Any] = {"load_average_before": round(os.getloadavg()[0], 2), "sizes": {}}
    good = True
    for requests in options.requests:
        folder = Path(tempfile.mkdtemp(prefix="tg-", dir=options.at))
        folder.chmod(0o755)
        try:
            found = asyncio.run(measure(requests, folder, options.repeat))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        good &= show(requests, found)
        result["sizes"][str(requests)] = found
    result["load_average_after"] = round(os.getloadavg()[0], 2)
    if not options.dry:
        print(record("console", result))
        sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
