"""Every migration since the last release runs beside gateways, whatever the size of the tables, and
may be killed anywhere; and a migration that may not is found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import create_engine
from migrations import online
from migrations.releases import last_release
from migrations.runner import MigrationError, migrate
from tests.budget import NIGHTLY, cycles
from tests.upgrade.added_migrations import add_migrations
from tests.upgrade.conftest import OldDatabases
from tests.upgrade.schema import schema_of
from tests.upgrade.watched_migrations import FILES, watched

WAIT_S = 30.0
NEVER = 1 << 30
ALL_CHANGES = """
online.add_column("orgs", "region", "text")
online.add_column("orgs", "copies", "integer", default="1")
online.backfill("orgs", "id", "region = 'plan-' || name", "region IS NULL")
online.create_index("orgs_region", "orgs (region) WHERE region <> ''")
online.create_index("orgs_copies", "orgs (id, copies)", unique=True)
online.add_check("orgs", "orgs_copies_some", "copies > 0")
online.widen_check("orgs", "orgs_copies_some", "copies >= 0")
online.add_foreign_key("orgs", "orgs_of_region", "region", "plans (name)")
online.set_not_null("orgs", "region")
online.drop_index("files_unsealed")
online.drop_column("files", "deleted_at")
online.drop_table("disputed_usage")
"""
"""Every function of `migrations.online`."""
PERMITS = ("not null orgs.region", "drop files.deleted_at", "drop disputed_usage")
BAD = {
    "update": 'op.execute("UPDATE orgs SET name = name")',
    "update by key": "op.execute(\"UPDATE orgs SET name = name WHERE id = 'a'\")",
    "delete": 'op.execute("DELETE FROM usage_daily")',
    "index": 'op.execute("CREATE INDEX added ON usage_events (model)")',
    "unique": 'op.execute("ALTER TABLE files ADD CONSTRAINT added UNIQUE (id, filename)")',
    "check": 'op.execute("ALTER TABLE usage_events ADD CONSTRAINT added CHECK (output >= 0)")',
    "checked column": 'op.execute("ALTER TABLE orgs ADD COLUMN added int CHECK (added > 0)")',
    "not null": 'op.execute("ALTER TABLE files ALTER COLUMN expires_at SET NOT NULL")',
    "reference": """
op.execute("ALTER TABLE files ADD CONSTRAINT added FOREIGN KEY (filename) REFERENCES plans (name)")
""",
    "drawn default": """
op.execute("ALTER TABLE orgs ADD COLUMN added uuid DEFAULT gen_random_uuid()")
""",
    "serial": 'op.execute("ALTER TABLE usage_events ADD COLUMN added bigserial")',
    "type": 'op.execute("ALTER TABLE files ALTER COLUMN size_bytes TYPE numeric")',
    "truncate": 'op.execute("TRUNCATE event_tags")',
    "copy": 'op.execute("CREATE TABLE added AS SELECT * FROM event_tags")',
    "outside": """
with op.get_context().autocommit_block():
    op.execute("ALTER TABLE orgs ADD COLUMN added text")
""",
}
"""Migrations that gateways would wait for, if the table were large."""


@pytest.fixture
def permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last release permit what `ALL_CHANGES` takes away."""
    release = last_release()
    release = msgspec.structs.replace(release, permits=(*release.permits, *PERMITS))
    monkeypatch.setattr(online, "last_release", lambda: release)


async def complaints_of(url: str) -> list[str]:
    """Migrate, and return what gateways would have waited for."""
    db = create_engine(url)
    async with db.connect() as connection:
        found = await connection.execute(text(FILES))
        files: dict[str, int] = dict(found.all())  # type: ignore[arg-type]
    await db.dispose()
    with watched(files) as complaints:
        await migrate(url)
    return complaints


async def test_no_migration_since_the_last_release_keeps_gateways_waiting(old_url: str) -> None:
    assert await complaints_of(old_url) == []


async def test_no_online_change_keeps_gateways_waiting(
    old_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permitted: None
) -> None:
    add_migrations(monkeypatch, tmp_path, ALL_CHANGES)
    assert await complaints_of(old_url) == []
    found = await schema_of(old_url)
    assert found.columns["orgs.region"].is_required
    assert found.columns["orgs.copies"].may_be_left_out
    assert {"orgs_region", "orgs_copies"} <= found.indexes.keys()
    assert all(each.text.endswith("valid: true") for each in found.indexes.values())
    assert {"orgs.orgs_copies_some", "orgs.orgs_of_region"} <= found.constraints.keys()
    assert "NOT VALID" not in str(found.constraints)
    assert "files.deleted_at" not in found.columns and "disputed_usage" not in found.tables


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
async def test_a_migration_that_keeps_gateways_waiting_is_found(
    body: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_migrations(monkeypatch, tmp_path, body)
    assert await complaints_of(postgres_url) != []


class Cut(Exception):
    """The process was killed here."""


@contextmanager
def cut_at(number: int) -> Iterator[list[str]]:
    """Let no statement from that one on reach the server; yields those that did."""
    statements: list[str] = []

    def before(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        if len(statements) >= number:
            raise Cut
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", before)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", before)


async def test_migrations_may_be_killed_anywhere_and_repeated(
    old_databases: OldDatabases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    permitted: None,
) -> None:
    """Those since the last release, and one that does all that `online` can."""
    add_migrations(monkeypatch, tmp_path, ALL_CHANGES)
    async with old_databases.lend() as url:
        with cut_at(NEVER) as statements:
            await migrate(url)
        whole = await schema_of(url)
    assert len(statements) > 40
    for number in range(2, len(statements), 1 if NIGHTLY else 7):
        async with old_databases.lend() as url:
            with cut_at(number), pytest.raises(Cut):
                await migrate(url)
            await migrate(url)
            assert await schema_of(url) == whole, statements[number]


async def test_an_index_that_was_cut_short_is_built_anew(
    db: AsyncEngine, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_migrations(monkeypatch, tmp_path, 'online.create_index("added", "orgs (name)")')
    async with db.begin() as connection:
        await connection.execute(text("CREATE INDEX added ON orgs (name)"))
        await connection.execute(
            text("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'added'::regclass")
        )
    await migrate(postgres_url)
    assert (await schema_of(postgres_url)).indexes["added"].text.endswith("valid: true")


BACKFILL = 'online.backfill("orgs", "id", "region = name", "region IS NULL")'


async def test_a_backfill_reaches_every_row_and_waits_for_none_in_use(
    db: AsyncEngine,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    add_migrations(monkeypatch, tmp_path, BACKFILL)
    monkeypatch.setattr(online, "BATCH_ROWS", 10)
    caplog.set_level(logging.INFO, online.__name__)
    async with db.begin() as connection:
        await connection.execute(text("ALTER TABLE orgs ADD COLUMN region text"))
        await connection.execute(
            text("INSERT INTO orgs (id, name) SELECT 'org_' || n, n FROM generate_series(1, 25) n")
        )
    async with db.connect() as user:
        await user.execute(text("UPDATE orgs SET name = 'x' WHERE id = 'org_17'"))
        with cut_at(NEVER) as statements:
            running = asyncio.create_task(migrate(postgres_url))
            async with asyncio.timeout(WAIT_S):
                while not any("are in use" in each.getMessage() for each in caplog.records):
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.01)
            await user.commit()
            await running
    batches = [each for each in statements if "batch AS MATERIALIZED" in each]
    assert len(batches) >= 5, "three that change rows, one again, one that finds none"
    async with db.connect() as connection:
        wrong = text("SELECT count(*) FROM orgs WHERE region IS DISTINCT FROM name")
        assert await connection.scalar(wrong) == 0


async def test_nothing_is_taken_away_before_the_last_release_permits_it(
    db: AsyncEngine, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_migrations(monkeypatch, tmp_path, 'online.drop_column("files", "deleted_at")')
    with pytest.raises(MigrationError, match=r"drop files\.deleted_at: .* does not permit it"):
        await migrate(postgres_url)
    assert "files.deleted_at" in (await schema_of(postgres_url)).columns


async def test_a_schema_that_lost_something_serves_no_older_release(
    db: AsyncEngine,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_migrations(monkeypatch, tmp_path, 'online.drop_column("files", "deleted_at")')
    release = msgspec.structs.replace(last_release(), revision="0999", permits=PERMITS)
    monkeypatch.setattr(online, "last_release", lambda: release)
    await migrate(postgres_url)
    async with db.connect() as connection:
        found = await connection.scalar(text("SELECT oldest_revision FROM schema_support"))
    assert found == "0999"


ON_ROWS = """
online.add_column("orgs", "region", "text", default="'here'")
online.add_column("orgs", "shown", "text")
online.backfill("orgs", "id", "shown = name", "shown IS NULL")
online.create_index("orgs_shown", "orgs (shown)")
online.add_check("orgs", "orgs_shown_some", "shown <> '' OR shown IS NULL")
"""


@pytest.mark.slow
async def test_a_writer_beside_a_migration_waits_for_no_lock_for_a_second(
    db: AsyncEngine, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server itself would end a statement of his that does."""
    add_migrations(monkeypatch, tmp_path, ON_ROWS)
    rows = cycles(500_000, 20_000)
    async with db.begin() as connection:
        await connection.execute(text("SET LOCAL statement_timeout = 0"))
        await connection.execute(
            text(
                "INSERT INTO orgs (id, name)"
                f" SELECT 'org_' || n, n FROM generate_series(1, {rows}) n"
            )
        )
    running = asyncio.create_task(migrate(postgres_url))
    written, refused = 0, []
    async with db.connect() as connection:
        await connection.execute(text("SET lock_timeout = '1s'"))
        await connection.commit()
        while not running.done():
            number = written % rows + 1
            try:
                await connection.execute(
                    text("UPDATE orgs SET name = name || '+' WHERE id = :id"),
                    {"id": f"org_{number}"},
                )
                added = text("INSERT INTO orgs (id, name) VALUES (:id, :id)")
                await connection.execute(added, {"id": f"added_{written}"})
                await connection.commit()
            except DBAPIError as error:
                refused.append(str(error.orig))
                await connection.rollback()
            written += 1
    await running
    assert refused == []
    assert written > 10
