"""Migrated databases for one test each, lent again when a test has left the schema as it was.

Making a database and dropping it costs a test more than most tests do themselves, so what comes
back is emptied, unless its test changed anything but rows: every change of a schema leaves a
catalog row with a newer xmin, or one row less. That is done over a connection that stays, on the
loop of a thread: to open one takes a backend of Postgres longer than to empty a database.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import asyncpg
import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from migrations.runner import migrate
from tests.scratch import scratch_for_a_while

TEMPLATE = "template_migrated"
MAX_LOANS = 60
"""A database is lent this often at most: emptied tables keep their dead rows until a vacuum."""
LEAVE_TIMEOUT_MS = 20_000
ENDED = (
    *(OSError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError),
    *(asyncpg.AdminShutdownError, asyncpg.CrashShutdownError),
)
"""Raised by a connection that somebody has ended."""
T = TypeVar("T")
CATALOGS = (
    "pg_class",
    "pg_attribute",
    "pg_attrdef",
    "pg_constraint",
    "pg_index",
    "pg_trigger",
    "pg_policy",
    "pg_proc",
    "pg_namespace",
    "pg_type",
)
REVISION = "(SELECT concat(version_num, oldest_revision) FROM alembic_version, schema_support)"
FINGERPRINT = f"SELECT {REVISION}, " + ", ".join(
    f"(SELECT (count(*), max(xmin::text::bigint))::text FROM pg_catalog.{name})"
    for name in CATALOGS
)
ALONE = f"""
SELECT pg_terminate_backend(pid, {LEAVE_TIMEOUT_MS}) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
# As a replica applies changes: neither foreign keys nor what keeps ledgers whole is in the way.
EMPTY = """
SET session_replication_role = replica;
DO $$
DECLARE found record;
BEGIN
    FOR found IN
        SELECT oid::regclass AS name FROM pg_class
        WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
        AND relname NOT IN ('alembic_version', 'schema_support') AND pg_relation_size(oid) > 0
    LOOP
        EXECUTE format('DELETE FROM %s', found.name);
    END LOOP;
    FOR found IN
        SELECT seqrelid::regclass AS name, seqstart FROM pg_sequence
    LOOP
        PERFORM setval(found.name, found.seqstart, false);
    END LOOP;
END $$;
"""


def with_cluster(home: Home) -> None:
    """As a first start leaves it, which takes longer than all else: made, unless it has been."""
    if not home.postgres.exists():
        home.create()
        shutil.copytree(Home(Path(migrated().name)).postgres, home.postgres)


@cache
def migrated() -> tempfile.TemporaryDirectory[str]:
    """A home with a cluster that has the newest schema and no row: made once in a process, and gone
    with it."""
    folder = scratch_for_a_while()
    home = Home(Path(folder.name))
    home.create()

    async def make() -> None:
        child = await embedded.start_postgres(home, durable=False)
        await migrate(embedded.postgres_url(home))
        await child.stop(embedded.STOP_TIMEOUT_S)

    with ThreadPoolExecutor(1) as thread:  # a loop may run in this one
        thread.submit(asyncio.run, make()).result()
    return folder


class Database(msgspec.Struct):
    name: str
    fingerprint: tuple[str, ...] = ()
    loans: int = 0


class Databases:
    """Those of one cluster."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._made = 0
        self._free: list[Database] = []
        self._kept: dict[str, asyncpg.Connection] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="databases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        for name in list(self._kept):
            asyncio.run_coroutine_threadsafe(self._forget(name), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def start(self) -> None:
        """Begin with the database of a cluster that `with_cluster` has made."""
        await self._administer(f"CREATE DATABASE {TEMPLATE} TEMPLATE {embedded.DATABASE}")

    def url(self, name: str) -> str:
        return embedded.postgres_url(self._home, name)

    async def lend(self) -> Database:
        """One with the newest schema and no rows."""
        if self._free:
            found = self._free.pop()
        else:
            self._made += 1
            found = Database(f"test_{self._made}")
            await self.create(found.name, TEMPLATE)
            found.fingerprint = await self._on_thread(self._fingerprint(found.name))
        found.loans += 1
        return found

    async def take_back(self, database: Database) -> None:
        if database.loans < MAX_LOANS and await self._on_thread(self._emptied(database)):
            self._free.append(database)
        else:
            await self._on_thread(self._forget(database.name))
            await self.drop(database.name)

    async def create(self, name: str, template: str) -> None:
        """Make a database that nobody else is lent."""
        await self._administer(f"CREATE DATABASE {name} TEMPLATE {template}")

    async def drop(self, name: str) -> None:
        await self._administer(f"DROP DATABASE {name} WITH (FORCE)")

    async def _emptied(self, database: Database) -> bool:
        """False: its schema is another one now."""
        try:
            return await self._empty(database)
        except ENDED:  # by a test that ends all connections, or Postgres
            await self._forget(database.name)
            return await self._empty(database)

    async def _empty(self, database: Database) -> bool:
        connection = await self._connection(database.name)
        await connection.execute(ALONE)
        if await fingerprint(connection) != database.fingerprint:
            return False
        await connection.execute(EMPTY)
        return True

    async def _fingerprint(self, name: str) -> tuple[str, ...]:
        return await fingerprint(await self._connection(name))

    async def _connection(self, name: str) -> asyncpg.Connection:
        if name not in self._kept:
            self._kept[name] = await self._connect(name)
        return self._kept[name]

    async def _forget(self, name: str) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            with suppress(*ENDED):
                await kept.close()

    async def _on_thread(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _administer(self, statement: str) -> None:
        """Run a statement that Postgres refuses inside a transaction."""
        connection = await self._connect("postgres")
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    async def _connect(self, name: str) -> asyncpg.Connection:
        return await asyncpg.connect(self.url(name).replace("+asyncpg", ""))


async def fingerprint(connection: asyncpg.Connection) -> tuple[str, ...]:
    """Return a digest of all that is not a row of a table, and of the revision, which `EMPTY`
    leaves."""
    row = await connection.fetchrow(FINGERPRINT)
    assert row is not None
    return tuple(row)


@contextmanager
def counted_queries(db: AsyncEngine) -> Iterator[list[str]]:
    """The statements that reach Postgres; what the pool's own ping sends is not among them."""
    statements: list[str] = []

    def note(_conn: object, _cursor: object, statement: str, *_rest: object) -> None:
        statements.append(statement)

    sa.event.listen(db.sync_engine, "before_cursor_execute", note)
    yield statements
    sa.event.remove(db.sync_engine, "before_cursor_execute", note)
