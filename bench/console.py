"""How long the console's pages take, over the requests of a month.

    python -m bench.console [--requests N ...] [--repeat N] [--at FOLDER] [--dry]

One worker's application on a throw-away Postgres and Redis in a folder of --at. For each size one
organization has that many requests in 30 days: its sums by hour and by day in the request log and
in the ledger, made by SQL, beside those of 20 small organizations; and rows of the requests of the
last 24 hours, four million at most. 1 M requests are of 50 keys, 10 M of 150 and 100 M of 300, each
with two models of one of three lanes. Single events of the ledger are not made.

`pages` are asked as a browser asks them, from the session to the last byte of HTML, --repeat times
after three; `statements` are what the summaries and searches in them ask, as the tenants' role
behind row-level security; `raw` is the same question, asked of the rows of one day, with exact
quantiles. A page has 100 ms: a recorded run ends with 1 where one has not. The result goes to
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
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from bench.auth import application
from bench.tools.record import record
from billing.events import COMPONENTS
from billing.tables import AMOUNTS
from gateway.app.worker import bound_stalls
from gateway.audit.log import COMMAND_LINE
from gateway.auth.login.sessions import start_session
from gateway.db import create_engine, tenant
from gateway.request_log.histograms import DIGITS
from gateway.request_log.search import Search, find_landed, find_request, find_requests
from gateway.request_log.summary import Filters, Group, LatencyChoice, summarize, window_of
from gateway.request_log.tables import COUNTS, GROUPED, HISTOGRAMS
from gateway.routes.shared.browser import HOST_PREFIX, SESSION
from gateway.routes.shared.services import Services
from gateway.telemetry.latency_counts import NUM_BUCKETS
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.members.users import create_user
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project

SMALL_ORGS, MANY_REQUESTS = 20, 1_000_000
"""Beside fewer requests there is one small organization: that is a smoke."""
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


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """The organization that is looked at, and the cookies of its owner's browser."""

    org: str
    projects: list[str]
    keys: list[str]
    cookies: dict[str, str]


async def make_tenant(services: Services, number: int) -> Tenant:
    """Make an organization with a signed-in owner and so many keys, ten in a project."""
    auth = services.authorization
    pepper_id, pepper = services.authenticator.pepper
    async with services.system_db.begin() as conn:
        org = await create_org(conn, name="bench", actor=COMMAND_LINE)
    async with tenant(services.system_db, org.id) as conn:
        who: dict[str, Any] = {"org_id": org.id, "actor": COMMAND_LINE}
        projects = [
            (await create_project(conn, name=f"project {n}", **who)).id
            for n in range(max(1, number // 10))
        ]
        keys = []
        for n in range(number):
            made = await create_key(
                conn,
                project_id=projects[n % len(projects)],
                name=f"key {n}",
                scopes=["inference"],
                pepper=pepper,
                pepper_id=pepper_id,
                **who,
            )
            keys.append(made.row.id)
        user = await create_user(
            conn, email="owner@bench.example", name="Owner", role="owner", **who
        )
        signed_in: dict[str, Any] = {"user_id": user.id, "amr": ["pwd"], "now": datetime.now(UTC)}
        token = await start_session(conn, auth.sessions, **who, **signed_in)
    name = HOST_PREFIX + SESSION if auth.secure else SESSION
    return Tenant(org=org.id, projects=projects, keys=keys, cookies={name: token})


async def make(db: AsyncEngine, whose: Tenant, requests: int, now: datetime) -> int:
    """Make the organization's month. Returns how many rows of requests it has."""
    hour = now.replace(minute=0, second=0, microsecond=0)
    named: dict[str, Any] = {"org": whose.org, "projects": whose.projects, "keys": whose.keys}
    named |= {"start": hour - timedelta(days=DAYS), "end": hour}
    each = requests / (DAYS * 24 * len(whose.keys) * 2)
    num_orgs = SMALL_ORGS if requests >= MANY_REQUESTS else 1
    few = {"org": "org_small", "projects": ["proj_small"], "keys": [f"key_{n}" for n in range(10)]}
    async with db.begin() as conn:
        await _add_hours(conn, named | {"each": each, "orgs": 1})
        await _add_hours(conn, named | few | {"each": 3.0, "orgs": num_orgs})
        await _add_days(conn)
        await _add_ledger(conn)
    rows = max(1, min(MAX_ROWS, requests // DAYS))
    for number in range(3):
        async with db.begin() as conn:
            day = (now - timedelta(days=number)).date()
            await conn.execute(sa.text("SELECT keep_request_day(:day)"), {"day": day})
    for done in range(0, rows, 250_000):
        async with db.begin() as conn:
            await _add_rows(conn, whose, now, done, min(250_000, rows - done), rows)
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
                p.ids[1 + k % cardinality(p.ids)], p.keys[k],
                'model_' || ((k + c) % 8), (ARRAY['interactive', 'agentic', 'batch'])[1 + k % 3],
                n, n / 200, n / 300, n / 500, n / 400, n, n - n / 50,
                n * 400, n * 900, n * 60, n * 200, n * 20, n * 2000000, n * 30000,
                n * 1250000, t * (1 + n / 100), b * (1 + n / 100),
                b * (2 + n / 10)
            FROM (SELECT CAST(:projects AS text[]) AS ids, CAST(:keys AS text[]) AS keys) AS p,
                generate_series(1, CAST(:orgs AS int)) AS o,
                generate_series(1, cardinality(p.keys)) AS k,
                generate_series(1, 2) AS c,
                generate_series(CAST(:start AS timestamptz),
                    CAST(:end AS timestamptz) - interval '1 hour', interval '1 hour') AS hour,
                LATERAL (SELECT (1 + CAST(:each AS float8) * (0.6 + 0.8 * random()))::bigint AS n,
                    CAST((CAST(:ttft AS text[]))[1 + k % 4] AS numeric) AS t,
                    CAST((CAST(:tpot AS text[]))[1 + k % 4] AS numeric) AS b) AS made
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
    conn: AsyncConnection, whose: Tenant, now: datetime, done: int, number: int, rows: int
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
                p.ids[1 + k % cardinality(p.ids)], p.keys[k],
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
            FROM (SELECT CAST(:projects AS text[]) AS ids, CAST(:keys AS text[]) AS keys) AS p,
                generate_series(CAST(:done AS int), CAST(:until AS int) - 1) AS n,
                LATERAL (SELECT
                    (CAST(:first_ms AS bigint) + n * CAST(:step AS float8))::bigint AS ms,
                    1 + (n::bigint * 7919) % cardinality(p.keys) AS k) AS a,
                LATERAL (SELECT (lpad(to_hex(ms), 12, '0') || '7'
                    || substr(md5(n::text), 14))::uuid AS id) AS b
        """),
        {
            "org": whose.org,
            "projects": whose.projects,
            "keys": whose.keys,
            "done": done,
            "until": done + number,
            "first_ms": int((now - timedelta(hours=24)).timestamp() * 1000),
            "step": 86_400_000 / rows,
        },
    )


def statements(whose: Tenant, now: datetime, last_id: str) -> dict[str, Ask]:
    """Return what the pages' summaries and searches ask, by name."""
    day, month = now - timedelta(hours=24), now - timedelta(days=DAYS - 15)

    def sums(start: datetime, *by: Group, key: str = "") -> Ask:
        wanted = LatencyChoice(names=("ttft",), in_time=False, by=by)
        if len(by) > 1:
            wanted = LatencyChoice(by=("model",))
        asked: dict[str, Any] = {"by": by, "filters": Filters(key=key), "latencies": wanted}
        asked["compares_groups"] = len(by) == 1
        return lambda conn: summarize(conn, whose.org, window_of(start, now), **asked)

    def search(after: str | None = None, **wanted: Any) -> Ask:
        asked = Search(start=now - timedelta(days=2), end=now, **wanted)
        return lambda conn: find_requests(conn, whose.org, asked, after=after)

    return {
        "overview, 24 hours": sums(day, "project", "model"),
        "overview, 15 days": sums(month, "project", "model"),
        "usage by key, 24 hours": sums(day, "key"),
        "usage by key, 15 days": sums(month, "key"),
        "usage of one key, 24 hours": sums(day, "model", key=whose.keys[7]),
        "requests, newest": search(),
        "requests, dearer than any": search(least_pico=10**15),
        "one request": lambda conn: find_request(conn, whose.org, last_id),
    }


def pages(whose: Tenant, last_id: str) -> dict[str, str]:
    """Return the addresses of the pages that read much, below /console, by name."""
    key, project = whose.keys[7], whose.projects[0]
    usage = {
        f"usage by {by}, {words}": f"usage?by={by}&range={range_}"
        for by in ("model", "project", "key", "lane")
        for range_, words in (("24h", "24 hours"), ("30d", "30 days"))
    }
    return {
        "overview, 24 hours": "overview?range=24h",
        "overview, 7 days": "overview?range=7d",
        "overview, 30 days": "overview?range=30d",
        "overview of a model, 24 hours": "overview?range=24h&model=model_3",
        **usage,
        "usage by tag, 30 days": "usage?by=tag&tag=team&range=30d",
        "usage of one key, 24 hours": f"usage?by=model&key={key}&range=24h",
        "requests, newest": "requests?range=24h",
        "requests, a page far behind": f"requests?range=24h&after=req_{last_id}",
        "requests of a key": f"requests?range=24h&key={key}",
        "requests of a project": f"requests?range=24h&project={project}",
        "requests that failed": "requests?range=24h&outcome=failed",
        "requests, an error that none had": "requests?range=24h&error_code=none",
        "requests, dearer than any": "requests?range=24h&cost=1000",
        "one request": f"requests/req_{last_id}",
        "keys": "keys",
        "one key": f"keys/{key}",
        "projects": "projects",
        "billing": "billing",
        "credits": "billing/credits",
        "audit log": "audit",
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


def raw(whose: Tenant, now: datetime) -> dict[str, Ask]:
    named = {"org": whose.org, "start": now - timedelta(hours=24)}
    return {
        "overview, 24 hours": lambda conn: conn.execute(RAW_OVERVIEW, named),
        "usage by key, 24 hours": lambda conn: conn.execute(RAW_BY_KEY, named),
        "requests, dearer than any": lambda conn: conn.execute(RAW_PAGE, named),
    }


async def timed(
    db: AsyncEngine, org: str, ask: Ask, repeat: int, warm_up: int = WARM_UP
) -> dict[str, float]:
    async def once() -> None:
        async with tenant(db, org) as conn:
            await ask(conn)

    return await timed_calls(once, repeat, warm_up)


async def timed_calls(
    call: Callable[[], Awaitable[object]], repeat: int, warm_up: int = WARM_UP
) -> dict[str, float]:
    took = []
    for _ in range(warm_up + repeat):
        begun = time.perf_counter()
        await call()
        took.append((time.perf_counter() - begun) * 1000)
    kept = sorted(took[warm_up:])
    last = kept[math.ceil(0.95 * len(kept)) - 1]
    return {"p50_ms": round(statistics.median(kept), 1), "p95_ms": round(last, 1)}


async def measure(requests: int, folder: Path, repeat: int) -> dict[str, Any]:
    async with application(folder) as (app, settings, _):
        assert settings.database_url is not None
        services: Services = app.state.services
        number = KEYS.get(requests) or max(8, round(50 * (requests / 1e6) ** 0.4))
        whose = await make_tenant(services, number)
        now, begun = datetime.now(UTC), time.perf_counter()
        rows = await _unhurried(create_engine(settings.database_url), whose, requests, now)
        found: dict[str, Any] = {"rows_of_requests": rows}
        found["made_in_s"] = round(time.perf_counter() - begun, 1)
        print(f"{requests:,} requests; made in {found['made_in_s']} s", flush=True)
        found["load_average"] = round(os.getloadavg()[0], 2)
        async with services.system_db.connect() as conn:
            for table in ("requests_hourly", "requests_daily", "usage_hourly", "usage_daily"):
                counted = await conn.scalar(sa.text(f"SELECT count(*) FROM {table}"))
                found[f"rows_of_{table}"] = counted
            query = "SELECT id FROM request_log WHERE org = :org ORDER BY at OFFSET :place LIMIT 1"
            named = {"org": whose.org, "place": min(1000, rows // 2)}
            last_id = (await conn.scalar(sa.text(query), named)).hex
        found["pages"] = await timed_pages(app, whose, pages(whose, last_id), repeat)
        found["statements"] = {
            name: await timed(services.db, whose.org, ask, repeat)
            for name, ask in statements(whose, now, last_id).items()
        }
        tail = partial(look_at_tail, services.system_db, whose.org)
        found["statements"]["live tail, one look"] = await timed_calls(tail, repeat)
        found["raw"] = {
            name: await timed(services.db, whose.org, ask, 3, warm_up=1)
            for name, ask in raw(whose, now).items()
        }
        return found


async def timed_pages(
    app: Litestar, whose: Tenant, addresses: Mapping[str, str], repeat: int
) -> dict[str, dict[str, float]]:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    found = {}
    bound_stalls()  # as a worker does once it has started
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8000", cookies=whose.cookies
    ) as client:
        for name, address in addresses.items():

            async def ask(path: str = f"/console/{address}") -> None:
                answer = await client.get(path)
                if answer.status_code != 200:
                    raise SystemExit(f"{path}: {answer.status_code} {answer.text[:500]}")

            found[name] = await timed_calls(ask, repeat)
    return found


async def _unhurried(maker: AsyncEngine, whose: Tenant, requests: int, now: datetime) -> int:
    """Make the month on connections without a bound on statements, which take longer than a request
    may."""

    @sa.event.listens_for(maker.sync_engine, "connect")
    def unbound(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("SET statement_timeout = 0")
        cursor.close()

    try:
        return await make(maker, whose, requests, now)
    finally:
        await maker.dispose()


async def look_at_tail(db: AsyncEngine, org: str) -> None:
    async with db.connect() as conn:
        await find_landed(conn, [org], 6.0, 500)


def show(requests: int, found: Mapping[str, Any]) -> bool:
    """Print a table, and tell whether every page is within its bound."""
    print(
        f"{requests:,} requests; {found['rows_of_requests']:,} rows of them, "
        f"{found['rows_of_requests_hourly']:,} sums by hour"
    )
    for kind in ("pages", "statements", "raw"):
        print(f" {kind}")
        for name, took in found[kind].items():
            print(f"  {name:<30} p50 {took['p50_ms']:>9,.1f}  p95 {took['p95_ms']:>9,.1f} ms")
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
