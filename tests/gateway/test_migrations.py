"""The one history makes what the rooms' tables say, for a newcomer and for an old database."""

from __future__ import annotations

import re

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

import billing.invoices.tables
import billing.tables
import gateway.audit.tables
import gateway.auth.tables
import gateway.batches.tables
import gateway.cache_report.rows
import gateway.files.tables
import gateway.installation.items
import gateway.limits.cells.store
import gateway.mcp.tables
import gateway.registry.tables
import gateway.request_log.tables
import gateway.responses.tables
import gateway.tenancy.member_tables
import gateway.tenancy.tables
import gateway.vault.credentials
import gateway.webhooks.tables
import migrations.tables
from migrations.runner import MigrationError, migrate

ROOMS = (
    gateway.tenancy.tables.metadata,
    gateway.batches.tables.metadata,
    gateway.cache_report.rows.metadata,
    gateway.files.tables.metadata,
    gateway.installation.items.metadata,
    gateway.limits.cells.store.metadata,
    gateway.mcp.tables.metadata,
    gateway.registry.tables.metadata,
    gateway.vault.credentials.metadata,
    gateway.webhooks.tables.metadata,
    billing.tables.metadata,
    billing.invoices.tables.metadata,
    gateway.auth.tables.metadata,
    gateway.audit.tables.metadata,
    gateway.request_log.tables.metadata,
    gateway.responses.tables.metadata,
    migrations.tables.metadata,
)


PARTITION = re.compile(r"\brequest_(log|content)_[0-9]{8}\b")


def differences(connection: Connection) -> list[str]:
    """Tables, columns, types and nullability: what queries are written against. Keys, indexes and
    triggers belong to the history alone, and the rooms' tests try them.
    """
    context = MigrationContext.configure(
        connection, opts={"compare_type": True, "target_metadata": list(ROOMS)}
    )
    found = compare_metadata(context, list(ROOMS))
    flat = [part for each in found for part in (each if isinstance(each, list) else [each])]
    kinds = ("add_table", "remove_table", "add_column", "remove_column", "modify_")
    return [
        str(part)
        for part in flat
        if part[0].startswith(kinds)
        and "alembic_version" not in str(part[1])
        and not PARTITION.search(str(part[1]))
    ]


async def test_the_schema_is_what_the_tables_say(db: AsyncEngine) -> None:
    async with db.connect() as connection:
        assert await connection.run_sync(differences) == []
        names = await connection.scalars(text("SELECT tablename FROM pg_tables"))
        assert {name for room in ROOMS for name in room.tables} <= set(names)


async def test_a_difference_would_be_seen(db: AsyncEngine) -> None:
    async with db.begin() as connection:
        await connection.execute(text("ALTER TABLE orgs DROP COLUMN created_at"))
    async with db.connect() as connection:
        assert len(await connection.run_sync(differences)) == 1


def test_history_is_one_line() -> None:
    config = Config()
    config.set_main_option("script_location", "migrations")
    config.set_main_option("path_separator", "os")
    history = list(ScriptDirectory.from_config(config).walk_revisions())
    assert [step.revision for step in reversed(history)] == [
        f"{number:04}" for number in range(1, len(history) + 1)
    ]


async def test_a_second_run_changes_nothing(db: AsyncEngine, postgres_url: str) -> None:
    async with db.begin() as connection:
        await connection.execute(text("INSERT INTO plans (name) VALUES ('kept')"))
    await migrate(postgres_url)
    async with db.connect() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM plans")) == 1


async def test_a_database_of_a_newer_version_is_refused(db: AsyncEngine, postgres_url: str) -> None:
    async with db.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        await connection.execute(text("UPDATE schema_support SET oldest_revision = '9998'"))
    try:
        await migrate(postgres_url)
    except MigrationError as error:
        assert "9999" in str(error)
    else:
        raise AssertionError("a schema nobody here knows was taken for ours")
