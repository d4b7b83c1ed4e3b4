"""Bring a database to the newest schema while gateways of this release and of the last one use it.

Processes that start at once take turns: each asks for an advisory lock again and again. None
waits inside a statement for it, since its snapshot would hold up the other's CREATE INDEX
CONCURRENTLY. The migrations up to `BASELINE` make an empty database and are one transaction. Each
later one is its own, waits for a lock for `LOCK_TIMEOUT_MS` at most and gives a statement
`STATEMENT_TIMEOUT_MS`: what others ask of the table queues behind it meanwhile. Where that is not
enough it lets everything go and tries again. docs/upgrading.md says what a migration may do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from migrations.errors import MigrationError

__all__ = ["BASELINE", "HEAD", "MigrationError", "migrate"]

log = logging.getLogger(__name__)

HEAD = "head"
SCRIPTS = Path(__file__).parent
BASELINE = "0060"
"""The schema of the first release: nobody runs an older one while it is upgraded."""
POSTGRES_MAJORS = (16, 18)
"""The oldest and the newest Postgres that is supported; the tests run on both."""
LOCK_KEY = 0x746F6C6C67617465
"""pg_try_advisory_lock: the bytes of "tollgate"."""
TURN_TIMEOUT_S = 3600.0
"""Bounds the wait for another process: an index of a large table takes it minutes."""
TURN_POLL_S = 0.1
BASELINE_LOCK_TIMEOUT_S = 120
LOCK_TIMEOUT_MS = 400
STATEMENT_TIMEOUT_MS = 900
"""Bounds a statement, its wait for a lock included."""
MAX_ATTEMPTS = 30
"""Bounds the attempts at one revision: about two minutes of pauses."""
PAUSES_S = (0.2, 5.0)
"""The first pause between two attempts and the longest; each is twice the one before."""
BUSY = ("55P03", "57014", "40P01")
"""Postgres: lock_not_available, query_canceled, deadlock_detected."""
OLDEST = text("SELECT oldest_revision FROM schema_support")


async def migrate(database_url: str, *, revision: str = HEAD) -> None:
    """Upgrade to `revision`. `database_url` is SQLAlchemy's, for asyncpg, of the tables' owner.

    A database of a newer release is left as it is, if its schema still serves this one. Idempotent,
    and safe to repeat after a kill. Raises: MigrationError, sqlalchemy.exc.SQLAlchemyError.
    """
    bounds = {
        "application_name": "tollgate migrate",
        "lock_timeout": str(LOCK_TIMEOUT_MS),
        "statement_timeout": str(STATEMENT_TIMEOUT_MS),
    }
    engine = create_async_engine(
        database_url, poolclass=NullPool, connect_args={"server_settings": bounds}
    )
    try:
        async with engine.connect() as connection:
            await _check_version(connection)
            await _take_turn(connection)
            await _upgrade(connection, revision)
    except CommandError as error:
        raise MigrationError(f"the database cannot be migrated: {error}") from error
    finally:
        await engine.dispose()  # the lock ends with the connection


async def _check_version(connection: AsyncConnection) -> None:
    found = int(await connection.scalar(text("SHOW server_version_num")) or 0) // 10_000
    await connection.rollback()
    oldest, newest = POSTGRES_MAJORS
    if found < oldest:
        raise MigrationError(f"this is Postgres {found}: Tollgate needs {oldest} to {newest}")
    if found > newest:
        log.warning("this is Postgres %d; Tollgate is tested with %d to %d", found, oldest, newest)


async def _take_turn(connection: AsyncConnection) -> None:
    deadline = time.monotonic() + TURN_TIMEOUT_S
    ask, is_waiting = text("SELECT pg_try_advisory_lock(:key)"), False
    while not await connection.scalar(ask, {"key": LOCK_KEY}):
        await connection.rollback()
        if not is_waiting:
            log.info("another process migrates this database; waiting for it")
            is_waiting = True
        if time.monotonic() > deadline:
            raise MigrationError(f"another process has migrated for {TURN_TIMEOUT_S:.0f} s")
        await asyncio.sleep(TURN_POLL_S)
    await connection.commit()


async def _upgrade(connection: AsyncConnection, revision: str) -> None:
    config = _config()
    script = ScriptDirectory.from_config(config)
    current = await connection.run_sync(_current)
    if current is not None and not _knows(script, current):
        return await connection.run_sync(_check_support, current, script.get_current_head())
    if current is None or current < BASELINE:
        await connection.run_sync(_run, config, min(revision, BASELINE), is_baseline=True)
    attempt = 0
    while True:
        try:
            return await connection.run_sync(_run, config, revision)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in BUSY:
                raise
            await connection.rollback()
            reached = await connection.run_sync(_current)
            attempt, current = 1 if reached != current else attempt + 1, reached
            if attempt >= MAX_ATTEMPTS:
                raise MigrationError(
                    f"a table was in use at each of {attempt} attempts ({error.orig}): the schema"
                    f" is at revision {current}; repeat this when long transactions have ended"
                ) from error
            pause_s = min(PAUSES_S[0] * 2 ** (attempt - 1), PAUSES_S[1])
            log.info("a table is in use, so the migration tries again in %.1f s", pause_s)
            await asyncio.sleep(pause_s)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _current(connection: Connection) -> str | None:
    found: str | None = MigrationContext.configure(connection).get_current_revision()
    connection.rollback()
    return found


def _knows(script: ScriptDirectory, revision: str) -> bool:
    return any(each.revision == revision for each in script.walk_revisions())


def _check_support(connection: Connection, current: str, head: str | None) -> None:
    """Raises: MigrationError if the schema of a newer release does not serve this one."""
    oldest: Any = None
    if sa.inspect(connection).has_table("schema_support"):
        oldest = connection.scalar(OLDEST)
    connection.rollback()
    if oldest is None or head is None or head < oldest:
        needed = f", and serves releases from revision {oldest} on" if oldest is not None else ""
        raise MigrationError(
            f"the database has the schema of a newer release: its revision is {current}{needed};"
            f" this release knows those up to {head}"
        )
    log.info("the database has the newer schema %s, which serves this release, too", current)


def _run(
    connection: Connection, config: Config, revision: str, *, is_baseline: bool = False
) -> None:
    if is_baseline:
        connection.execute(text(f"SET lock_timeout = '{BASELINE_LOCK_TIMEOUT_S}s'"))
        connection.execute(text("SET statement_timeout = 0"))
        connection.commit()
    config.attributes["connection"] = connection
    config.attributes["transaction_per_migration"] = not is_baseline
    command.upgrade(config, revision)
    connection.rollback()  # of what Alembic read, where there was nothing to do
    if is_baseline:
        connection.execute(text("RESET lock_timeout"))
        connection.execute(text("RESET statement_timeout"))
        connection.commit()
