"""Restores a backup into an empty home and an empty database; after a kill, a repeat goes on.

HOME/restore.json is there from the first step to the last: it names the backup, and nothing else
uses a home that has it. What the database has of the backup stands in the database itself, written
in the transactions that brought it: each chunk of rows is there once, and no index is built twice.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from gateway.backup.archive import (
    Archive,
    BackedUpTable,
    Chunk,
    Identity,
    Manifest,
    unfinished,
    write_whole,
)
from gateway.backup.errors import BackupError
from gateway.backup.home_files import is_empty, open_attempts, place_files, void_attempts
from gateway.backup.snapshot import SCHEMA, connected, quote
from gateway.home import Home
from gateway.secret import sync_folder
from migrations.walls import create_roles_on

PROGRESS = "tollgate_restore"
"""The schema that holds what was done; it is dropped at the end."""
FOREIGN = """
    SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace
    AND relkind IN ('r', 'p', 'S', 'v', 'm')
"""

ENTRY = re.compile(r"^--\n-- Name: .*\n--$", re.MULTILINE)
"""The heading of an object in a dump; pg_dump escapes newlines in it."""
Work = Callable[[Any], Awaitable[Any]]


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """The content of HOME/restore.json. `digest`: of the backup's sealed manifest;
    `has_database`: all of the database is there."""

    backup: str
    digest: str
    has_database: bool = False


class Restoration:
    """One restore, begun or continued; `database_url` is given once its server runs."""

    def __init__(
        self,
        archive: Archive,
        name: str,
        identities: Sequence[Identity],
        home: Home,
        secret_file: Path,
    ) -> None:
        """Raises: BackupError, OSError."""
        self._archive, self._identities = archive, identities
        self._home, self._secret_file = home, secret_file
        self.manifest: Manifest = archive.read_manifest(name, identities)
        self._journal = Journal(backup=name, digest=archive.digest_of(name))

    def begin(self, *, allowed: Sequence[str] = ()) -> None:
        """Write the journal, or find that of this backup. The caller holds the home's lock;
        `allowed` names what may be in the home besides.

        Raises: BackupError if the home is not empty, or another backup was begun; OSError.
        """
        path = self._home.restore_journal
        if path.exists():
            self._journal = self._read_journal(path)
        elif not is_empty(self._home, *allowed, unfinished(path).name):
            raise BackupError(f"home: {self._home.root} is not empty; restore into a new folder")
        else:
            self._write_journal(self._journal)

    async def restore_database(self, database_url: str, say: Callable[[str], None]) -> None:
        """Bring schema and rows to an empty database.

        Raises: BackupError, MigrationError if it lacks roles that its user may not create, OSError,
        asyncpg.PostgresError, sqlalchemy.exc.SQLAlchemyError.
        """
        if not self._journal.has_database:
            async with connected(database_url) as connection:
                database = RestoredDatabase(connection, self._journal.digest)
                await database.begin()
                await self._create_roles(database_url)
                before = await self._script(self.manifest.schema_before)
                await database.run_once("before", partial(_execute, before))
                for table in self.manifest.tables:
                    await self._restore_rows(database, table)
                    if table.rows:
                        say(f"{table.name}: {table.rows} rows")
                await self._set_sequences(database)
                await self._build_over(database)
                await connection.execute("ANALYZE")
            self._journal = msgspec.structs.replace(self._journal, has_database=True)
            self._write_journal(self._journal)
        async with connected(database_url) as connection:
            await connection.execute(f"DROP SCHEMA IF EXISTS {PROGRESS} CASCADE")

    async def restore_files(self, database_url: str) -> None:
        """Write the files of the home, with spools that agree with the restored database.

        Raises: BackupError, OSError, asyncpg.PostgresError.
        """
        await asyncio.to_thread(
            place_files, self.manifest, self._home, self._secret_file, self._read
        )
        attempts = open_attempts(self._home)
        async with connected(database_url) as connection:
            rows = await connection.fetch(
                f"SELECT id FROM {SCHEMA}.usage_events WHERE id = ANY($1::text[])", list(attempts)
            )
        void_attempts((row["id"], attempts[row["id"]]) for row in rows)

    def finish(self) -> None:
        """Remove the journal: the home is one as any other. Raises: OSError."""
        self._home.restore_journal.unlink()
        sync_folder(self._home.root)

    def _read(self, chunk: Chunk) -> bytes:
        return self._archive.read_chunk(chunk, self.manifest.naming_key, self._identities)

    def _read_journal(self, path: Path) -> Journal:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Journal)
        except msgspec.DecodeError as error:
            raise BackupError(f"{path}: {error}") from None
        if found.digest != self._journal.digest:
            raise BackupError(
                f"home: a restore of {found.backup} was begun there; go on with --backup "
                f"{found.backup}, or restore into a new folder"
            )
        return found

    def _write_journal(self, journal: Journal) -> None:
        write_whole(self._home.restore_journal, msgspec.json.encode(journal))
        sync_folder(self._home.root)

    async def _create_roles(self, database_url: str) -> None:
        engine = create_async_engine(database_url, poolclass=NullPool)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(create_roles_on)
        finally:
            await engine.dispose()

    async def _script(self, chunks: Sequence[Chunk]) -> str:
        return b"".join([await asyncio.to_thread(self._read, chunk) for chunk in chunks]).decode()

    async def _build_over(self, database: RestoredDatabase) -> None:
        """Make what is built over the rows; each index and each constraint is a step."""
        script = await self._script(self.manifest.schema_after)
        session, *entries = ENTRY.split(script)
        await database.execute(session)
        for number, entry in enumerate(entries):
            await database.run_once(f"after.{number}", partial(_execute, entry))

    async def _restore_rows(self, database: RestoredDatabase, table: BackedUpTable) -> None:
        async def copy(chunk: Chunk, connection: Any) -> None:
            rows = await asyncio.to_thread(self._read, chunk)
            await _copy(connection, table, rows, chunk.rows)

        for number, chunk in enumerate(table.chunks):
            await database.run_once(f"rows.{table.name}.{number}", partial(copy, chunk))

    async def _set_sequences(self, database: RestoredDatabase) -> None:
        async def work(connection: Any) -> None:
            for each in self.manifest.sequences:
                name = f"{SCHEMA}.{quote(each.name)}"
                await connection.execute(
                    "SELECT setval($1::text::regclass, $2, $3)",
                    name,
                    each.last_value,
                    each.is_called,
                )

        await database.run_once("sequences", work)


class RestoredDatabase:
    """The restored database, and what it has by now; `begin` comes first."""

    def __init__(self, connection: Any, backup: str) -> None:
        self._connection, self._backup = connection, backup
        self._done: set[str] = set()

    async def begin(self) -> None:
        """Read which steps are done. Raises: BackupError if the database is not empty."""
        known = await self._connection.fetchval(f"SELECT to_regclass('{PROGRESS}.steps')::text")
        if known is None:
            if await self._connection.fetchval(FOREIGN):
                raise BackupError("the database is not empty: restore into a new one")
            async with self._connection.transaction():
                await self._connection.execute(f"CREATE SCHEMA {PROGRESS}")
                await self._connection.execute(
                    f"CREATE TABLE {PROGRESS}.steps (name text PRIMARY KEY)"
                )
                await self._note(f"backup {self._backup}")
        rows = await self._connection.fetch(f"SELECT name FROM {PROGRESS}.steps")
        self._done = {row["name"] for row in rows}
        if f"backup {self._backup}" not in self._done:
            raise BackupError("a restore of another backup was begun in this database")

    async def execute(self, script: str) -> None:
        await self._connection.execute(script)

    async def run_once(self, step: str, work: Work) -> None:
        """Run a step that is not done yet."""
        if step not in self._done:
            await self.run(step, work)

    async def run(self, step: str, work: Work) -> None:
        """Run a step and note it, in one transaction."""
        async with self._connection.transaction():
            await work(self._connection)
            await self._note(step)

    async def _note(self, step: str) -> None:
        await self._connection.execute(f"INSERT INTO {PROGRESS}.steps VALUES ($1)", step)


async def _execute(script: str, connection: Any) -> None:
    await connection.execute(script)


async def _copy(connection: Any, table: BackedUpTable, rows: bytes, count: int) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield rows

    status = await connection.copy_to_table(
        table.name,
        schema_name=SCHEMA,
        columns=table.columns,
        source=source(),
        format="text",
    )
    if status != f"COPY {count}":
        raise BackupError(f"{table.name}: {status}, and not {count} rows")
