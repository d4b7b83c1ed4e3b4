"""Real parts for every test: a throw-away Postgres and a throw-away Valkey per session (per xdist
worker).

`postgres_url`: a fresh database made from a migrated template. `db`: an engine on it. `redis_url`:
flushed before the test. `redis`: a client on it. Both servers die with the session, killed or not
(`gateway.children`).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import asyncpg
import pytest
import redis.asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway import embedded
from gateway.children import Child
from gateway.db import create_engine
from gateway.home import Home
from migrations.runner import migrate

TEMPLATE = "template_migrated"
_database_numbers = count(1)


@pytest.fixture(scope="session")
def throwaway_home() -> Iterator[Home]:
    """A home in /tmp, short enough for sockets, removed at the end of the session."""
    folder = Path(tempfile.mkdtemp(prefix="tg-", dir="/tmp"))
    home = Home(folder)
    home.create()
    yield home
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres_home(throwaway_home: Home) -> Iterator[Home]:
    """The session's cluster, fsync off, with a migrated database to copy from."""

    async def start() -> Child:
        child = await embedded.start_postgres(throwaway_home, durable=False)
        await _administer(throwaway_home, f"CREATE DATABASE {TEMPLATE}")
        await migrate(embedded.postgres_url(throwaway_home, TEMPLATE))
        return child

    child = asyncio.run(start())
    yield throwaway_home
    asyncio.run(child.stop(embedded.STOP_TIMEOUT_S))


@pytest.fixture(scope="session")
def redis_server_url(throwaway_home: Home) -> Iterator[str]:
    """The session's Valkey."""
    child = asyncio.run(embedded.start_redis(throwaway_home, durable=False))
    yield embedded.redis_url(throwaway_home)
    asyncio.run(child.stop(embedded.STOP_TIMEOUT_S))


@pytest.fixture
async def postgres_url(postgres_home: Home) -> AsyncIterator[str]:
    """A database of this test alone with the newest schema, e.g. for `gateway.db.create_engine`."""
    name = f"test_{next(_database_numbers)}"
    await _administer(postgres_home, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    yield embedded.postgres_url(postgres_home, name)
    await _administer(postgres_home, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def db(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    """A pool on this test's database."""
    engine = create_engine(postgres_url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def redis_url(redis_server_url: str) -> str:
    """An empty Redis."""
    client = redis.asyncio.from_url(redis_server_url)
    await client.flushall()
    await client.aclose()
    return redis_server_url


@pytest.fixture(name="redis")
async def redis_client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client on the empty Redis; replies are bytes."""
    client = redis.asyncio.from_url(redis_url)
    yield client
    await client.aclose()


async def _administer(home: Home, statement: str) -> None:
    """Run a statement that Postgres refuses inside a transaction."""
    folder = embedded.postgres_url(home, "postgres").replace("+asyncpg", "")
    connection = await asyncpg.connect(folder)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
