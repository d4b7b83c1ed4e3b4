"""Measures a migration of each table, and says what was found."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from bench.migrations.lock_watch import LockWatch
from bench.migrations.tables import PARENTS, TABLES, Table
from bench.tools.record import record
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from migrations import runner
from migrations.releases import last_release
from tests.upgrade.added_migrations import add_migrations

BOUND_S = 1.0
BEFORE_S = 10.0
"""The clients are measured alone for so long, for comparison."""
PAUSE_S = 0.01
REPORT_S, REPORT_PAUSE_S = 1.5, 0.5
MIGRATION = "tollgate migrate"
READER, WRITER, REPORT, WATCH = "reader", "writer", "report", "watch"
MIGRATE = """
import asyncio, logging, pathlib, sys
from migrations import runner
logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
runner.SCRIPTS = pathlib.Path(sys.argv[2])
asyncio.run(runner.migrate(sys.argv[1]))
"""
ONLINE_CHANGES = """
online.add_column("{table}", "bench_text", "text")
online.add_column("{table}", "bench_count", "integer", default="1")
online.create_index("bench_of_count", "{table} (bench_count)")
online.add_check("{table}", "bench_counted", "bench_count > 0")
online.widen_check("{table}", "bench_counted", "bench_count >= 0")
online.add_foreign_key("{table}", "bench_of_plan", "bench_text", "plans (name)")
online.drop_index("bench_of_count")
"""


Connect = Callable[[str], Awaitable[asyncpg.Connection]]


@asynccontextmanager
async def postgres(home: Home, *, durable: bool) -> AsyncIterator[Connect]:
    """Run Postgres; yields a function that connects under an application's name."""
    child = await embedded.start_postgres(home, durable=durable)

    async def connect(name: str) -> asyncpg.Connection:
        return await asyncpg.connect(
            embedded.postgres_url(home).replace("+asyncpg", ""),
            server_settings={"application_name": name},
        )

    try:
        yield connect
    finally:
        await child.stop(10 * embedded.STOP_TIMEOUT_S)


async def fill(home: Home, table: Table, rows: int) -> dict[str, Any]:
    """Make the last release's schema, or the first with the table, and the rows. Without a log of
    what is written they are made in a third of the time."""
    begun = time.perf_counter()
    async with postgres(home, durable=False) as connect:
        await runner.migrate(
            embedded.postgres_url(home), revision=table.since or last_release().revision
        )
        connection = await connect("maker")
        await connection.execute("ALTER SYSTEM SET wal_level = 'minimal'")
        await connection.execute("ALTER SYSTEM SET max_wal_senders = 0")
        await connection.close()
    async with postgres(home, durable=False) as connect:
        connection = await connect("maker")
        await connection.execute("SET session_replication_role = replica")
        async with connection.transaction():
            await connection.execute(f"TRUNCATE {table.name} CASCADE")
            await connection.execute(PARENTS)
            await connection.execute(f"{table.insert} FROM generate_series(1::bigint, {rows}) AS n")
        await connection.execute(f"ANALYZE {table.name}")
        size = await connection.fetchval("SELECT pg_database_size(current_database())")
        await connection.execute("ALTER SYSTEM RESET ALL")
        await connection.close()
    return {"rows": rows, "bytes": size, "made_in_s": time.perf_counter() - begun}


class Clients:
    """Use a table meanwhile, and keep how long each request took."""

    def __init__(self, table: Table, rows: int) -> None:
        self._table, self._rows = table, rows
        self._added = rows
        self._took: dict[str, list[float]] = {READER: [], WRITER: []}
        self.refused: list[str] = []

    def start_phase(self) -> None:
        for took in self._took.values():
            took.clear()

    def phase(self) -> dict[str, dict[str, float]]:
        return {name: in_ms(took) for name, took in self._took.items()}

    async def read(self, connection: asyncpg.Connection) -> None:
        name = self._table.name
        query = f"SELECT * FROM {name} WHERE {self._table.where}"

        async def one() -> None:
            await connection.fetch(query, random.randint(1, self._rows))

        while True:
            await self._timed(READER, one)

    async def write(self, connection: asyncpg.Connection) -> None:
        name = self._table.name
        insert = f"{self._table.insert} FROM (SELECT $1::bigint AS n) made"
        change = f"UPDATE {name} SET {self._table.touch} WHERE {self._table.where}"

        async def both() -> None:
            self._added += 1
            async with connection.transaction():
                await connection.execute(insert, self._added)
                await connection.execute(change, random.randint(1, self._rows))

        while True:
            await self._timed(WRITER, both)

    async def report(self, connection: asyncpg.Connection) -> None:
        while True:
            async with connection.transaction():
                await connection.fetch(f"SELECT 1 FROM {self._table.name} LIMIT 1")
                await asyncio.sleep(REPORT_S)
            await asyncio.sleep(REPORT_PAUSE_S)

    async def _timed(self, name: str, ask: Callable[[], Awaitable[object]]) -> None:
        begun = time.perf_counter()
        try:
            await ask()
        except asyncpg.PostgresError as error:
            self.refused.append(f"{name}: {error}")
        self._took[name].append(time.perf_counter() - begun)
        await asyncio.sleep(PAUSE_S)


def in_ms(took: list[float]) -> dict[str, float]:
    if not took:
        return {"asked": 0}
    kept = sorted(took)
    last = kept[math.ceil(0.99 * len(kept)) - 1]
    found = {"p50_ms": statistics.median(kept), "p99_ms": last, "longest_ms": kept[-1]}
    return {"asked": len(kept)} | {name: round(s * 1000, 1) for name, s in found.items()}


async def measure(home: Home, table: Table, rows: int) -> dict[str, Any]:
    url = embedded.postgres_url(home)
    with tempfile.TemporaryDirectory() as history, pytest.MonkeyPatch.context() as patch:
        async with postgres(home, durable=True) as connect:
            clients, watch = Clients(table, rows), LockWatch()
            tables = await (admin := await connect(WATCH)).fetch(
                "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p')"
                " AND relnamespace = 'public'::regnamespace"
            )
            names = [each["relname"] for each in tables]
            background = [
                asyncio.create_task(each)
                for each in (
                    clients.read(await connect(READER)),
                    clients.write(await connect(WRITER)),
                    clients.report(await connect(REPORT)),
                    watch.run(admin, names),
                )
            ]
            found: dict[str, Any] = {}
            try:
                await asyncio.sleep(BEFORE_S)
                found["before"] = clients.phase()
                clients.start_phase()
                found["migrations_s"] = await migrate_beside(url)
                found["during_migrations"] = clients.phase()
                clients.start_phase()
                if not table.is_partitioned:  # nothing is built CONCURRENTLY on such a one
                    add_migrations(patch, Path(history), ONLINE_CHANGES.format(table=table.name))
                    found["online_changes_s"] = await migrate_beside(url)
                    found["during_online_changes"] = clients.phase()
            finally:
                for task in background:
                    task.cancel()
                ended = await asyncio.gather(*background, return_exceptions=True)
            for error in ended:
                if not isinstance(error, asyncio.CancelledError) and error is not None:
                    raise error
    return found | {"refused": clients.refused, "locks": msgspec.to_builtins(watch)}


async def migrate_beside(url: str) -> float:
    """Migrate in a process of its own, as `tollgate migrate` does, and return how long it took."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", MIGRATE, url, str(runner.SCRIPTS)]
    process = await asyncio.create_subprocess_exec(*command)
    if await process.wait():
        raise SystemExit("the migration failed")
    return round(time.perf_counter() - begun, 2)


def is_good(found: dict[str, Any]) -> bool:
    locks = found["locks"]
    held = {k: s for k, s in locks["longest_hold_s"].items() if k.startswith(MIGRATION)}
    waited = {k: s for k, s in locks["longest_wait_s"].items() if k != MIGRATION}
    return not found["refused"] and max([*held.values(), *waited.values(), 0.0]) <= BOUND_S


def show(table: str, found: dict[str, Any]) -> None:
    """Print what was found."""
    print(
        f"{table}: {found['rows']:,} rows, {found['bytes'] / 1e9:.1f} GB, "
        f"made in {found['made_in_s']:.0f} s; migrations {found['migrations_s']} s, "
        f"online changes {found.get('online_changes_s', '-')} s"
    )
    for phase in ("before", "during_migrations", "during_online_changes"):
        for name, took in found.get(phase, {}).items():
            rest = "  ".join(f"{key} {value:,}" for key, value in took.items())
            print(f"  {phase:<22} {name:<7} {rest}")
    for what in ("longest_wait_s", "longest_hold_s"):
        for name, seconds in found["locks"][what].items():
            print(f"  {what} {name}: {seconds:.3f}")
    print(f"  refused: {len(found['refused'])}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.migrations", description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--at", type=Path, default=None, help="a folder on a disk")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    result: dict[str, Any] = {"load_average_before": round(os.getloadavg()[0], 2), "tables": {}}
    for name in options.tables:
        folder = Path(tempfile.mkdtemp(prefix="tg-", dir=options.at))
        folder.chmod(0o755)
        home = Home(folder)
        home.create()
        try:
            made = asyncio.run(fill(home, TABLES[name], options.rows))
            result["tables"][name] = made | asyncio.run(measure(home, TABLES[name], options.rows))
        finally:
            with suppress(OSError):
                shutil.rmtree(folder)
        show(name, result["tables"][name])
        result["load_average_after"] = round(os.getloadavg()[0], 2)
        if not options.dry:
            print(record("migrations", result), flush=True)
    if not options.dry and not all(is_good(each) for each in result["tables"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
