"""A backup of an older Postgres is restored into the embedded one: how an installation moves to a
newer major."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from billing.ingestion.ingest import ingest
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from migrations.runner import migrate
from tests.billing.samples import an_event
from tests.gateway.backup.test_restored import Installation, dump, folder, running_postgres

__all__ = ["folder"]
OLDER = "16"
ONLY_NEWER = ("--locale-provider", "--builtin-locale")
"""Options of initdb that Postgres 16 does not know."""


@pytest.mark.slow
async def test_a_backup_of_postgres_16_is_restored_into_18(
    folder: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer, run_command = embedded.postgres_bin(), subprocess.run

    def run_older(command: list[str], **options: Any) -> Any:
        return run_command([it for it in command if not it.startswith(ONLY_NEWER)], **options)

    older = Home(folder / "older")
    older.create()
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "POSTGRES_MAJOR", OLDER)
        patch.setattr(embedded, "postgres_bin", lambda: newer.parents[1] / "pginstall" / "bin")
        patch.setattr(subprocess, "run", run_older)
        server = await embedded.start_postgres(older, durable=False)
    database_url = embedded.postgres_url(older)
    try:
        await migrate(database_url)
        installed = Installation(folder, database_url, redis_url)
        db = create_engine(database_url, pool_size=1)
        await ingest(db, [an_event() for _ in range(5)])
        await db.dispose()
        installed.create()
        before = dump(database_url)
    finally:
        await server.stop(embedded.STOP_TIMEOUT_S)
    restored = Home(folder / "other")
    installed.environ |= {"TOLLGATE_HOME": str(restored.root), "TOLLGATE_DATABASE_URL": ""}
    installed.run("backup", "restore", "--identity", installed.key, installed.archive)
    async with running_postgres(restored) as restored_url:
        assert rows_of(dump(restored_url)) == rows_of(before)


def rows_of(lines: list[str]) -> list[str]:
    """The lines without comments and settings: servers of two majors word a schema differently."""
    return [line for line in lines if "\t" in line]
