"""Checks once, before anything is started, that the databases that the operator configured answer.

Knows no table. A URL that is wrong is a mistake in the settings, so it is told as one: the setting,
the host and the port, the reason, and never the user or the password.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from os import strerror
from urllib.parse import urlsplit

import asyncpg
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, RedisError

from gateway.settings.file import SettingsError
from gateway.settings.load import Settings

REACH_TIMEOUT_S = 10.0
"""Bounds the attempt to reach each of them."""


async def check_databases(settings: Settings) -> None:
    """Check the configured databases; those without a URL are embedded and not looked at.

    Raises: SettingsError.
    """
    if (database := settings.database_url) is not None:
        address = _postgres_address(database)
        await _answers("database_url", address, lambda: _ask_postgres(database))
    if (redis := settings.redis_url) is not None:
        await _answers("redis_url", _redis_address(redis), lambda: _ask_redis(redis))


async def _answers(key: str, address: str, ask: Callable[[], Awaitable[None]]) -> None:
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            await ask()
    except TimeoutError:
        reason = f"no answer in {REACH_TIMEOUT_S:g} s"
    except (OSError, RedisError) as error:
        reason = _reason(error)
    except (TypeError, ValueError, OverflowError, asyncpg.InterfaceError) as error:
        # What the driver thinks of the URL's port or its parameters.
        reason = f"not a usable URL: {error}"
    else:
        return
    raise SettingsError(f"{key} (TOLLGATE_{key.upper()}): {address}: {reason}")


def _reason(error: Exception) -> str:
    """Return the kernel's reason: redis-py tells it in its own words, and names it as the
    context."""
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return strerror(cause.errno)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause)


async def _ask_postgres(url: str) -> None:
    from sqlalchemy.exc import DBAPIError  # not for a start that embeds its own

    from gateway.db import create_engine

    engine = create_engine(url, pool_size=1)
    try:
        async with engine.connect() as connection:
            await connection.exec_driver_sql("SELECT 1")
    except DBAPIError as error:  # what the server said: a password is wrong, say
        raise ConnectionError(str(error.orig)) from None
    finally:
        await engine.dispose()


async def _ask_redis(url: str) -> None:
    client = Redis.from_url(url)
    try:
        await client.ping()
    except BusyLoadingError:
        return  # it reads its file, and will be ready
    finally:
        await client.aclose()


def _postgres_address(url: str) -> str:
    from sqlalchemy import make_url

    found = make_url(url)
    host = found.query.get("host", found.host or "localhost")
    return f"{host}:{found.port or 5432}"


def _redis_address(url: str) -> str:
    found = urlsplit(url)
    if found.scheme == "unix":
        return found.path
    return f"{found.hostname or 'localhost'}:{found.port or 6379}"
