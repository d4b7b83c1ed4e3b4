"""Makes a backup beside running gateways: nothing is stopped, and no row is locked.

The order makes it consistent. First the witness of the audit log, then the spools, then one
snapshot of Postgres, then the secret: each part may be newer than the one before it, which is what
all of them are made for (`home_files`).

A backup that was killed is begun anew; it takes another snapshot, and writes no chunk again that
the archive has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from gateway.backup.archive import (
    Archive,
    BackedUpTable,
    Chunk,
    ChunkWriter,
    Manifest,
    NewBackup,
    read_recipients,
)
from gateway.backup.cutting import RowBatch
from gateway.backup.home_files import (
    OutsideFile,
    back_up_keys,
    back_up_outside,
    back_up_spools,
    back_up_witness,
)
from gateway.backup.snapshot import DatabaseSnapshot, TableShape, open_snapshot
from gateway.home import Home
from gateway.secret import Secret

NAMING_PURPOSE = "names of backed up chunks for "


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an installation. `pg_dump`: of the server's release or a newer one."""

    home: Home
    secret_file: Path
    database_url: str
    pg_dump: Path
    release: str
    outside: tuple[OutsideFile, ...] = ()


async def create(
    source: Source, archive: Archive, recipients: Sequence[str], say: Callable[[str], None]
) -> NewBackup:
    """Add a backup to an archive, which may be new.

    Raises: BackupError, SecretError, OSError, asyncpg.PostgresError,
    sqlalchemy.exc.SQLAlchemyError.
    """
    keys = read_recipients(recipients)
    current = Secret.load(source.secret_file).current
    # A chunk that only earlier recipients can open is another chunk.
    naming_key = current.derive(NAMING_PURPOSE + " ".join(sorted(set(recipients))))
    with archive.locked():
        writer = ChunkWriter(archive, keys, naming_key)
        created_at = datetime.now(UTC)
        home = source.home
        files = [*back_up_witness(home, writer.put), *back_up_spools(home, writer.put)]
        async with open_snapshot(source.database_url, source.pg_dump) as snapshot:
            revision = await snapshot.revision()
            files += back_up_keys(home, source.secret_file, writer.put)
            files += back_up_outside(source.outside, writer.put)
            before = await snapshot.schema("pre-data")
            after = await snapshot.schema("post-data")
            tables = []
            for table in await snapshot.tables():
                tables.append(await _back_up_table(snapshot, table, writer))
                if tables[-1].rows:
                    say(f"{table.name}: {tables[-1].rows} rows")
            manifest = Manifest(
                created_at=created_at,
                release=source.release,
                revision=revision,
                postgres=snapshot.server_version(),
                naming_key=naming_key,
                schema_before=(writer.put(before),),
                schema_after=(writer.put(after),),
                tables=tuple(tables),
                sequences=tuple(await snapshot.sequences()),
                files=tuple(files),
            )
        return writer.complete(manifest)


async def _back_up_table(
    snapshot: DatabaseSnapshot, table: TableShape, writer: ChunkWriter
) -> BackedUpTable:
    chunks: list[Chunk] = []

    async def use(piece: RowBatch) -> None:
        # Postgres goes on sending while a thread compresses and encrypts.
        put = partial(writer.put, piece.data, rows=piece.rows)
        chunks.append(await asyncio.to_thread(put))

    await snapshot.copy(table, use)
    return BackedUpTable(name=table.name, columns=table.columns, chunks=tuple(chunks))
