"""Reads a database as it was at one moment, while it is written: its schema, rows and sequences.

The schema is what pg_dump(1) says of the same snapshot, in its two sections: what a table needs to
take rows, and what is built over them. The database's user must own the tables: row-level security
hides rows from everybody else, and `row_security = off` makes that an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import asyncpg
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from gateway.backup.archive import BackedUpSequence
from gateway.backup.cutting import RowBatch, RowCutter
from gateway.backup.errors import BackupError
from gateway.db import CONNECT_TIMEOUT_S
from migrations.runner import LOCK_KEY

Section = Literal["pre-data", "post-data"]
SCHEMA = "public"
DUMP_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 600.0
TURN_POLL_S = 0.1
LOCK_TIMEOUT_S = 120
MAX_SHOWN_CHARS = 500
NO_STATEMENTS = (b"\\restrict ", b"\\unrestrict ", b"SET transaction_timeout ")
"""Lines of a dump that only psql(1) knows, or no server before Postgres 17."""
SESSION = {
    "application_name": "tollgate backup",
    "client_encoding": "utf8",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "timezone": "UTC",
    "row_security": "off",
    "statement_timeout": "0",
    "lock_timeout": f"{LOCK_TIMEOUT_S}s",
    "idle_in_transaction_session_timeout": "0",
}
"""How values are written, as pg_dump has it; and a snapshot lives as long as the backup takes."""

TABLES = """
    SELECT c.relname AS name,
        (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
            AND a.attgenerated = '') AS columns,
        (SELECT array_agg(a.attname::text ORDER BY k.place)
            FROM pg_index i, unnest(i.indkey) WITH ORDINALITY AS k(attnum, place), pg_attribute a
            WHERE i.indrelid = c.oid AND i.indisprimary
            AND a.attrelid = c.oid AND a.attnum = k.attnum) AS key
    FROM pg_class c WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace
    ORDER BY c.relname
"""
SEQUENCES = """
    SELECT relname FROM pg_class
    WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace ORDER BY relname
"""


class TableShape(NamedTuple):
    """A table, its columns that are not generated, and those of its primary key."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]


class DatabaseSnapshot:
    """One repeatable read; get it from `open_snapshot`."""

    def __init__(self, connection: Any, database_url: str, pg_dump: Path, name: str) -> None:
        self._connection, self._url = connection, database_url
        self._pg_dump, self._name = pg_dump, name

    async def revision(self) -> str:
        """Return the revision of the schema. Raises: BackupError if there is none."""
        try:
            return str(await self._connection.fetchval("SELECT version_num FROM alembic_version"))
        except asyncpg.UndefinedTableError:
            raise BackupError("the database lacks Tollgate's tables: nothing to back up") from None

    def server_version(self) -> int:
        """Return the major version of the server."""
        return int(self._connection.get_server_version().major)

    async def schema(self, section: Section) -> bytes:
        """Return a section of the schema as SQL. Raises: BackupError, OSError."""
        process = await asyncio.create_subprocess_exec(
            str(self._pg_dump),
            *("--section", section, "--snapshot", self._name),
            *("--no-owner", "--no-comments", "--no-password"),
            env=libpq_environment(self._url),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(DUMP_TIMEOUT_S):
                dump, errors = await process.communicate()
        except TimeoutError:
            raise BackupError(f"pg_dump: not done in {DUMP_TIMEOUT_S:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise BackupError(f"pg_dump: {errors.decode(errors='replace')[:MAX_SHOWN_CHARS]}")
        lines = dump.splitlines(keepends=True)
        return b"".join(line for line in lines if not line.startswith(NO_STATEMENTS))

    async def tables(self) -> list[TableShape]:
        return [
            TableShape(row["name"], tuple(row["columns"] or ()), tuple(row["key"] or ()))
            for row in await self._connection.fetch(TABLES)
        ]

    async def copy(self, table: TableShape, use: Callable[[RowBatch], Awaitable[None]]) -> None:
        """Call `use` with the rows of a table, in the order of its primary key, in COPY's text
        format.

        Raises: BackupError if the database's user may not see them all, and what `use` raises.
        """
        columns = ", ".join(map(quote, table.columns))
        order = f" ORDER BY {', '.join(map(quote, table.key))}" if table.key else ""
        query = f"SELECT {columns} FROM {SCHEMA}.{quote(table.name)}{order}"
        cutter = RowCutter()

        async def take(data: bytes) -> None:
            for piece in cutter.feed(data):
                await use(piece)

        try:
            await self._connection.copy_from_query(query, output=take, format="text")
        except asyncpg.InsufficientPrivilegeError as error:
            raise BackupError(f"the database's user must own the tables: {error}") from None
        for piece in cutter.finish():
            await use(piece)

    async def sequences(self) -> list[BackedUpSequence]:
        """Read where sequences stand now, which is not before the rows of the snapshot."""
        found = []
        for (name,) in await self._connection.fetch(SEQUENCES):
            row = await self._connection.fetchrow(
                f"SELECT last_value, is_called FROM {SCHEMA}.{quote(name)}"
            )
            found.append(BackedUpSequence(name=name, **dict(row)))
        return found


@asynccontextmanager
async def connected(database_url: str) -> AsyncIterator[Any]:
    """Connect as asyncpg does it, by an URL of SQLAlchemy's.

    Raises: asyncpg.PostgresError, OSError.
    """
    engine = create_async_engine(
        database_url,
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
        connect_args={"timeout": CONNECT_TIMEOUT_S, "server_settings": SESSION},
    )
    try:
        async with engine.connect() as connection:
            yield (await connection.get_raw_connection()).driver_connection
    finally:
        await engine.dispose()


@asynccontextmanager
async def open_snapshot(database_url: str, pg_dump: Path) -> AsyncIterator[DatabaseSnapshot]:
    """Begin a read of the database as it is now, which others may use by its name.

    Migrations wait for its end, and it for theirs: a table that is rewritten looks empty to older
    snapshots. Rows are written all the while. Raises: BackupError, asyncpg.PostgresError, OSError.
    """
    async with connected(database_url) as connection:
        await _take_turn(connection)
        tables = ", ".join(
            f"{SCHEMA}.{quote(row['name'])}" for row in await connection.fetch(TABLES)
        )
        # No query before the locks: the first one takes the snapshot.
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if tables:
            await connection.execute(f"LOCK TABLE {tables} IN ACCESS SHARE MODE")
        name = await connection.fetchval("SELECT pg_export_snapshot()")
        yield DatabaseSnapshot(connection, database_url, pg_dump, name)
        await connection.execute("ROLLBACK")


async def _take_turn(connection: Any) -> None:
    """Wait for migrations, by asking again: a statement that waits holds a snapshot, for which
    their CREATE INDEX CONCURRENTLY would wait in turn."""
    deadline = time.monotonic() + TURN_TIMEOUT_S
    while not await connection.fetchval(f"SELECT pg_try_advisory_lock_shared({LOCK_KEY})"):
        if time.monotonic() > deadline:
            raise BackupError(f"the database has been migrated for {TURN_TIMEOUT_S:.0f} s")
        await asyncio.sleep(TURN_POLL_S)


def libpq_environment(database_url: str) -> dict[str, str]:
    """Return the variables that lead libpq to the database: no password on a command line."""
    url = make_url(database_url)
    query = {name: value for name, value in url.query.items() if isinstance(value, str)}
    found = {
        "PGHOST": url.host or query.get("host"),
        "PGPORT": str(url.port) if url.port is not None else query.get("port"),
        "PGUSER": url.username,
        "PGPASSWORD": url.password,
        "PGDATABASE": url.database,
        "PGSSLMODE": query.get("sslmode") or query.get("ssl"),
        "PGCONNECT_TIMEOUT": str(int(CONNECT_TIMEOUT_S)),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    return {name: value for name, value in found.items() if value is not None}


def quote(name: str) -> str:
    """Quote an identifier."""
    return '"' + name.replace('"', '""') + '"'
