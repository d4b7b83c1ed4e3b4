"""A point in time, by the words of docs/backup.md: a base backup, an archive of WAL, and a restore
of the embedded Postgres to the moment before a mistake."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from pathlib import Path

import asyncpg

from gateway.backup.snapshot import libpq_environment
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.databases import with_cluster
from tests.docs.runner import blocks_of
from tests.gateway.backup.test_restored import folder, running_postgres
from tests.stack import ROOT

__all__ = ["folder"]

ARCHIVED = "SELECT last_archived_wal >= $1 FROM pg_stat_archiver"
MOMENT = "2026-11-28 12:00:00+00"
TIMEOUT_S = 60


def documented() -> tuple[str, str, str]:
    """Return settings of the archive, the command of a base backup, settings of the recovery."""
    blocks = blocks_of(ROOT / "docs" / "backup.md")
    archiving, recovery = (f"{block.text}\n" for block in blocks if block.language == "ini")
    (command,) = (block.text for block in blocks if "pg_basebackup" in block.text)
    assert "/srv/wal" in archiving and MOMENT in recovery and "/srv/base" in command
    return archiving, command, recovery


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
    archiving, base_backup, recovery = documented()
    with (home.postgres / "postgresql.conf").open("a") as file:
        file.write(archiving.replace("/srv/wal", str(wal)))
    async with running_postgres(home) as database_url:
        connection = await connect(database_url)
        restored.create()
        command = base_backup.replace("HOME/postgres", libpq_environment(database_url)["PGHOST"])
        subprocess.run(
            shlex.split(command.replace("/srv/base", str(restored.postgres))),
            env={**os.environ, "PATH": f"{embedded.postgres_bin()}:{os.environ['PATH']}"},
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
        recovery = recovery.replace("/srv/wal", str(wal)).replace(MOMENT, moment)
        file.write(recovery)
    (restored.postgres / "recovery.signal").touch()
    async with running_postgres(restored) as database_url:
        connection = await connect(database_url)
        await until(connection, "SELECT NOT pg_is_in_recovery()")
        assert await connection.fetchval("SELECT array_agg(id::text) FROM orgs") == ["org_kept"]
        await connection.close()
