"""A point in time, as docs/backup.md describes it: a base backup, an archive of WAL, and a restore
of the embedded Postgres to the moment before a mistake."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import asyncpg

from gateway.backup.snapshot import libpq_environment
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.databases import with_cluster
from tests.gateway.backup.test_restored import folder, running_postgres

__all__ = ["folder"]

ARCHIVED = "SELECT last_archived_wal >= $1 FROM pg_stat_archiver"
TIMEOUT_S = 60


async def connect(database_url: str) -> asyncpg.Connection:
    return await asyncpg.connect(database_url.replace("+asyncpg", ""))


async def until(connection: asyncpg.Connection, query: str, *arguments: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await connection.fetchval(query, *arguments):
            await asyncio.sleep(0.02)


async def test_postgres_is_restored_to_the_moment_before_a_mistake(folder: Path) -> None:
    home, restored = Home(folder / "home"), Home(folder / "other")
    wal = folder / "wal"
    wal.mkdir()
    wal.chmod(0o777)  # where we are root, Postgres runs as another user for each home
    os.chmod(folder, 0o711)
    with_cluster(home)
    with (home.postgres / "postgresql.conf").open("a") as file:
        file.write(f"archive_mode = on\narchive_command = 'cp %p {wal}/%f'\n")
    async with running_postgres(home) as database_url:
        connection = await connect(database_url)
        restored.create()
        subprocess.run(
            [
                *(str(embedded.postgres_bin() / "pg_basebackup"), "--checkpoint=fast"),
                *("--pgdata", str(restored.postgres), "--no-password"),
            ],
            env=libpq_environment(database_url),
            check=True,
            capture_output=True,
        )
        await connection.execute("INSERT INTO orgs (id, name) VALUES ('org_kept', 'kept')")
        moment = await connection.fetchval("SELECT clock_timestamp()::text")
        await connection.execute("DROP TABLE orgs CASCADE")  # the mistake
        last = await connection.fetchval("SELECT pg_walfile_name(pg_switch_wal())")
        await until(connection, ARCHIVED, last)
        await connection.close()
    for segment in wal.iterdir():
        segment.chmod(0o644)
    with (restored.postgres / "postgresql.conf").open("a") as file:
        file.write(
            f"archive_mode = off\nrestore_command = 'cp {wal}/%f %p'\n"
            f"recovery_target_time = '{moment}'\nrecovery_target_action = 'promote'\n"
        )
    (restored.postgres / "recovery.signal").touch()
    async with running_postgres(restored) as database_url:
        connection = await connect(database_url)
        await until(connection, "SELECT NOT pg_is_in_recovery()")
        assert await connection.fetchval("SELECT array_agg(id::text) FROM orgs") == ["org_kept"]
        await connection.close()
