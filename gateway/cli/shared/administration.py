"""Reach the databases of a home from a command, whether or not `tollgate up` runs there.

Knows no table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import ROLE_SYSTEM, create_engine
from gateway.home import Home, HomeBusy, HomeLock
from gateway.processes.child_processes import end_leftovers
from gateway.processes.embedded_databases import (
    STOP_TIMEOUT_S,
    postgres_url,
    redis_url,
    start_postgres,
    start_redis,
)
from gateway.processes.reachability import check_databases
from gateway.settings.load import Settings


@asynccontextmanager
async def database_urls(settings: Settings) -> AsyncIterator[tuple[str, str]]:
    """Yield (Postgres, Redis): the configured URLs, those of the running `tollgate up`, or embedded
    databases that live as long as this context.

    Raises: SettingsError if a configured one does not answer, EmbeddedError, OSError.
    """
    await check_databases(settings)
    home = Home(settings.home)
    home.create()
    urls = (settings.database_url or postgres_url(home), settings.redis_url or redis_url(home))
    async with AsyncExitStack() as stack:
        if settings.database_url is None or settings.redis_url is None:
            try:
                lock = HomeLock.acquire(home)
            except HomeBusy:
                pass  # whoever holds the home runs them
            else:
                stack.callback(lock.release)
                end_leftovers(home.run)
                if settings.database_url is None:
                    postgres = await start_postgres(home)
                    stack.push_async_callback(postgres.stop, STOP_TIMEOUT_S)
                if settings.redis_url is None:
                    valkey = await start_redis(home)
                    stack.push_async_callback(valkey.stop, STOP_TIMEOUT_S)
        yield urls


@asynccontextmanager
async def connections(settings: Settings) -> AsyncIterator[tuple[AsyncEngine, Redis]]:
    """Open clients of both databases of a home that is there already; they see all orgs and are
    closed at the end.

    Raises: NoHome, and what `database_urls` raises.
    """
    Home(settings.home).check()
    async with database_urls(settings) as (database_url, redis_address):
        db = create_engine(database_url, role=ROLE_SYSTEM, pool_size=1)
        redis = Redis.from_url(redis_address)
        try:
            yield db, redis
        finally:
            await redis.aclose()
            await db.dispose()
