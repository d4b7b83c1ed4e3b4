"""The one way to a Postgres connection pool. Above: everything with tables. Below: SQLAlchemy Core
on asyncpg.

Knows no table: each room has its own `tables.py`, and `migrations/` makes them.
"""

from __future__ import annotations

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

DRIVER = "postgresql+asyncpg"
POOL_SIZE = 5
MAX_OVERFLOW = 10
POOL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
STATEMENT_TIMEOUT_S = 30.0
"""The server ends a statement after it."""
COMMAND_TIMEOUT_S = STATEMENT_TIMEOUT_S + 5.0
"""We give up after it: the server, or the network to it, has fallen silent."""


def normalise(database_url: str) -> str:
    """`postgres://` and `postgresql://` as people write them, for the driver that we use.

    Raises: ValueError if it is not the URL of a Postgres database.
    """
    try:
        url: URL = make_url(database_url)
    except ArgumentError:
        raise ValueError("not a database URL") from None
    except ValueError:  # its text is a part of the URL, of a password perhaps
        raise ValueError("its port is not a number") from None
    if "@" in (url.host or ""):
        raise ValueError("an '@' in the user or the password is written %40")
    if url.drivername not in ("postgres", "postgresql", DRIVER):
        raise ValueError(f"Postgres only, not {url.drivername!r}")
    if not url.database:
        raise ValueError("it names no database")
    return url.set(drivername=DRIVER).render_as_string(hide_password=False)


def create_engine(database_url: str, *, pool_size: int = POOL_SIZE) -> AsyncEngine:
    """A lazy, bounded pool; the caller disposes it. A connection that died is replaced before it is
    handed out.
    """
    return create_async_engine(
        database_url,
        pool_size=pool_size,
        max_overflow=MAX_OVERFLOW,
        pool_timeout=POOL_TIMEOUT_S,
        pool_pre_ping=True,
        connect_args={
            "timeout": CONNECT_TIMEOUT_S,
            "command_timeout": COMMAND_TIMEOUT_S,
            "server_settings": {
                "application_name": "tollgate",
                "statement_timeout": str(int(STATEMENT_TIMEOUT_S * 1000)),
                "timezone": "UTC",
            },
        },
    )
