"""The one way to a Postgres connection pool, and to a tenant's rows.

A pool takes a role that owns nothing (`migrations/walls.py`). Queries name their org; where one
forgets to, Postgres shows what `tenant` named, or nothing. Knows no table: each room has its own
`tables.py`, and `migrations/` makes them.
"""

from __future__ import annotations

import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import sqlalchemy as sa
from sqlalchemy import URL, Column, ColumnElement, delete, make_url, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

ROLE_TENANT = "tollgate_app"
"""Sees the rows of the org that its transaction named."""
ROLE_SYSTEM = "tollgate_system"
"""Sees all: what must look before it knows the tenant, and what serves them all."""
SET_TENANT = text("SELECT set_config('tollgate.org', :org, true)")
"""Names the org until the transaction ends."""
SET_FOR_SUMS = text("""
    SELECT set_config('jit', 'off', true), set_config('work_mem', '64MB', true),
        set_config('enable_indexscan', 'off', true)
""")
DRIVER = "postgresql+asyncpg"
POOL_SIZE = 5
MAX_OVERFLOW = 10
POOL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
STATEMENT_TIMEOUT_S = 30.0
"""The server ends a statement after it."""
COMMAND_TIMEOUT_S = STATEMENT_TIMEOUT_S + 5.0
"""We give up after it: the server, or the network to it, has fallen silent."""
DATABASE_ERRORS = (
    *(SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError),
    *(asyncpg.InternalClientError, OSError),
)
"""All that a lost or refusing Postgres raises; asyncio's TimeoutError is an OSError."""


def normalise(database_url: str) -> str:
    """Rewrite `postgres://` and `postgresql://`, as people write them, for the driver that we use.

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


def create_engine(
    database_url: str, *, role: str | None = None, pool_size: int = POOL_SIZE
) -> AsyncEngine:
    """A lazy, bounded pool; the caller disposes it. A connection that died is replaced before it is
    handed out. role: what its connections act as; None: the user of the URL, who owns the tables.
    """
    acts_as = {} if role is None else {"role": role}
    engine = create_async_engine(
        database_url,
        pool_size=pool_size,
        max_overflow=MAX_OVERFLOW,
        pool_timeout=POOL_TIMEOUT_S,
        pool_pre_ping=True,
        hide_parameters=True,  # an error's text goes to the log, what a row holds does not
        connect_args={
            "timeout": CONNECT_TIMEOUT_S,
            "command_timeout": COMMAND_TIMEOUT_S,
            "server_settings": {
                "application_name": "tollgate",
                "statement_timeout": str(int(STATEMENT_TIMEOUT_S * 1000)),
                "timezone": "UTC",
                **acts_as,
            },
        },
    )
    dialect: Any = engine.sync_engine.dialect
    dialect.do_ping = _is_alive
    return engine


def _is_alive(connection: Any) -> bool:
    """Return whether a pooled connection lives, without asking the server: one that said something
    while nobody had asked has said farewell. SQLAlchemy's own ping is a transaction of three round
    trips each time that a connection is taken."""
    driver: asyncpg.Connection[Any] = connection.driver_connection
    if driver.is_closed():
        return False
    found = select.poll()
    found.register(driver._transport.get_extra_info("socket").fileno(), select.POLLIN)
    return not found.poll(0)


@asynccontextmanager
async def tenant(db: AsyncEngine, org_id: str) -> AsyncIterator[AsyncConnection]:
    """A transaction that sees, and can write, the rows of one org."""
    async with db.begin() as conn:
        await conn.execute(SET_TENANT, {"org": org_id})
        yield conn


async def sum_up_in_memory(conn: AsyncConnection) -> None:
    """Let this transaction group many rows by hashes, compile nothing and read each page once: to
    compile so many sums takes longer than to add them, to sort takes longer than to hash, and in
    the order of an index a page is read again for each of its rows."""
    await conn.execute(SET_FOR_SUMS)


async def delete_some(
    conn: AsyncConnection, key: Column[Any], *conditions: ColumnElement[bool], limit: int
) -> None:
    """Delete at most `limit` of the rows that meet the conditions, and no row that others hold.

    `key` tells the rows of its table apart.
    """
    found = sa.select(key).where(*conditions).limit(limit).with_for_update(skip_locked=True)
    await conn.execute(delete(key.table).where(*conditions, key.in_(found)))
