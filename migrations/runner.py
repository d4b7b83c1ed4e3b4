"""Bring a database to the newest schema.

Two gateways that start at once take turns (an advisory lock), and a migration that fails leaves the
schema as it was: Postgres runs DDL inside transactions, and the whole upgrade is one.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from migrations.errors import MigrationError

__all__ = ["MigrationError", "migrate"]

LOCK_KEY = 0x746F6C6C67617465
"""pg_advisory_xact_lock: the bytes of "tollgate"."""
LOCK_TIMEOUT_S = 120


async def migrate(database_url: str) -> None:
    """Upgrade to the newest revision. `database_url` is SQLAlchemy's, for asyncpg.

    Raises: MigrationError, sqlalchemy.exc.SQLAlchemyError.
    """
    engine = create_async_engine(database_url, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade)
    except CommandError as error:
        raise MigrationError(f"the database cannot be migrated: {error}") from error
    finally:
        await engine.dispose()


def _upgrade(connection: Connection) -> None:
    connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
