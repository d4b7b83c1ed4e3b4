"""How migrations run beside gateways: one process at a time, each migration by itself, never long
in anybody's way, and a schema of a newer release is left alone."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import create_engine
from migrations import runner
from migrations.runner import MigrationError, migrate
from tests.upgrade.added_migrations import add_migrations, newest_revision

WAIT_S = 30.0
REVISION = "SELECT version_num FROM alembic_version"
HAS_COLUMN = """
SELECT count(*) FROM information_schema.columns
WHERE table_name = 'plans' AND column_name = 'added'
"""
ADD_COLUMN = 'op.execute("ALTER TABLE plans ADD COLUMN added text")'


async def scalar(db: AsyncEngine, query: str) -> object:
    async with db.connect() as connection:
        return await connection.scalar(text(query))


async def until_logged(caplog: pytest.LogCaptureFixture, words: str, times: int = 1) -> None:
    async with asyncio.timeout(WAIT_S):
        while sum(words in each.getMessage() for each in caplog.records) < times:
            await asyncio.sleep(0.01)


async def test_a_process_that_waits_its_turn_holds_up_no_index(
    db: AsyncEngine, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """CREATE INDEX CONCURRENTLY waits for every older snapshot, a sleeping statement's as well."""
    caplog.set_level(logging.INFO, runner.__name__)
    async with db.connect() as owner:
        await owner.execution_options(isolation_level="AUTOCOMMIT")
        await owner.execute(text("SELECT pg_advisory_lock(:key)"), {"key": runner.LOCK_KEY})
        waiting = asyncio.create_task(migrate(postgres_url))
        await until_logged(caplog, "waiting for it")
        await owner.execute(text("CREATE INDEX CONCURRENTLY plans_tried ON plans (name)"))
        assert not waiting.done()
        await owner.execute(text("SELECT pg_advisory_unlock_all()"))
        await waiting


async def test_a_turn_that_never_comes_is_an_error(
    db: AsyncEngine, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TURN_TIMEOUT_S", 0.0)
    async with db.connect() as owner:
        await owner.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": runner.LOCK_KEY})
        with pytest.raises(MigrationError, match="another process"):
            await migrate(postgres_url)


async def test_a_table_in_use_is_let_go_and_asked_for_again(
    db: AsyncEngine,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Between two attempts others get at the table, although who holds it does not let go."""
    add_migrations(monkeypatch, tmp_path, ADD_COLUMN)
    caplog.set_level(logging.INFO, runner.__name__)
    other = create_engine(postgres_url)
    async with db.connect() as user:
        await user.execute(text("INSERT INTO plans (name) VALUES ('held')"))
        running = asyncio.create_task(migrate(postgres_url))
        await until_logged(caplog, "tries again", times=2)
        assert await scalar(other, "SELECT count(*) FROM plans") == 0
        await user.commit()
        await running
    assert await scalar(other, HAS_COLUMN) == 1
    await other.dispose()


async def test_a_table_that_is_never_free_is_an_error_that_changes_nothing(
    db: AsyncEngine, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_migrations(monkeypatch, tmp_path, ADD_COLUMN)
    monkeypatch.setattr(runner, "MAX_ATTEMPTS", 1)
    async with db.connect() as user:
        await user.execute(text("INSERT INTO plans (name) VALUES ('held')"))
        with pytest.raises(MigrationError, match="in use"):
            await migrate(postgres_url)
    assert await scalar(db, HAS_COLUMN) == 0
    assert await scalar(db, REVISION) == newest_revision()


async def test_a_statement_that_takes_long_is_ended(
    db: AsyncEngine, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits longer for a lock that it holds."""
    add_migrations(monkeypatch, tmp_path, f'{ADD_COLUMN}\nop.execute("SELECT pg_sleep(60)")')
    monkeypatch.setattr(runner, "MAX_ATTEMPTS", 1)
    with pytest.raises(MigrationError, match="statement timeout"):
        await migrate(postgres_url)
    assert await scalar(db, HAS_COLUMN) == 0


async def test_a_migration_that_fails_undoes_itself_alone(
    db: AsyncEngine, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = 'op.execute("ALTER TABLE plans DROP COLUMN added")\nop.execute("SELECT 1 / 0")'
    done, _ = add_migrations(monkeypatch, tmp_path, ADD_COLUMN, failing)
    with pytest.raises(Exception, match="division by zero"):
        await migrate(postgres_url)
    assert await scalar(db, REVISION) == done
    assert await scalar(db, HAS_COLUMN) == 1


@pytest.mark.parametrize("oldest", ["0060", "own", "9000"])
async def test_the_schema_of_a_newer_release_is_left_alone_or_refused(
    db: AsyncEngine, postgres_url: str, caplog: pytest.LogCaptureFixture, oldest: str
) -> None:
    """It says itself from which revision on the releases are that it serves."""
    caplog.set_level(logging.INFO, runner.__name__)
    oldest = newest_revision() if oldest == "own" else oldest
    async with db.begin() as connection:
        changed = text("UPDATE schema_support SET oldest_revision = :oldest")
        await connection.execute(changed, {"oldest": oldest})
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    if oldest <= newest_revision():
        await migrate(postgres_url)
        await until_logged(caplog, "9999, which serves this release")
    else:
        with pytest.raises(MigrationError, match="9999, and serves releases from revision 9000"):
            await migrate(postgres_url)
    assert await scalar(db, REVISION) == "9999"
