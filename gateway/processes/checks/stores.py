"""Checks the databases: whether they answer, their versions, their clocks, and the schema."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

import migrations
from gateway.home import Home, HomeBusy, HomeLock
from gateway.processes.checks.diagnosis import Diagnosis
from gateway.processes.embedded_databases import POSTGRES_MAJOR, postgres_url, redis_url
from gateway.processes.reachability import check_databases
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings

OLDEST_REDIS = 7
MAX_CLOCK_DIFFERENCE_S = 2.0
"""Beyond it, what expires or is billed by the hour does so at the wrong time."""
TIMEOUT_S = 5.0


async def check_stores(settings: Settings) -> AsyncIterator[Diagnosis]:
    """Look at both databases: the configured ones, or those that run embedded."""
    runs = is_in_use(Home(settings.home))
    for key, name in (("database_url", "postgres"), ("redis_url", "redis")):
        url = getattr(settings, key)
        if url is None and not runs:
            bundled = f"Postgres {POSTGRES_MAJOR}" if name == "postgres" else "Valkey"
            yield Diagnosis(name, "ok", f"{bundled} is embedded; it starts with `tollgate up`")
            continue
        if url is not None:
            alone = {"database_url": None, "redis_url": None, key: url}
            try:
                await check_databases(msgspec.structs.replace(settings, **alone))
            except SettingsError as error:
                yield Diagnosis(name, "fails", str(error), "start it, or correct the URL")
                continue
        home = Home(settings.home)
        if name == "postgres":
            yield await look_at_postgres(url or postgres_url(home))
        else:
            yield await look_at_redis(url or redis_url(home))


def is_in_use(home: Home) -> bool:
    """Tell whether a `tollgate up` runs on this home."""
    if not home.lock.exists():
        return False
    try:
        HomeLock.acquire(home).release()
    except HomeBusy:
        return True
    except OSError:
        return False
    return False


async def look_at_postgres(url: str) -> Diagnosis:
    """Ask for the version, the time, and the revision of the schema."""
    import sqlalchemy as sa
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.db import create_engine

    engine = create_engine(url, pool_size=1)
    try:
        async with engine.connect() as conn:
            number = int(await conn.scalar(sa.text("SHOW server_version_num")) or 0)
            before = time.time()
            theirs = float(
                await conn.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())"))
            )
            ours = (before + time.time()) / 2
            revision = await only_value(conn, "alembic_version", "version_num")
            serves = await only_value(conn, "schema_support", "oldest_revision")
    except (SQLAlchemyError, OSError, TypeError, ValueError) as error:
        reason = getattr(error, "orig", None) or error
        return Diagnosis("postgres", "fails", f"{reason}"[:200], "see its log")
    finally:
        await engine.dispose()
    schema = SchemaState(revision=revision, serves=serves, newest=newest_revision())
    return judge_postgres(number, theirs - ours, schema)


async def only_value(connection: Any, table: str, column: str) -> str | None:
    """Return what a table of one row holds, None where there is no such table."""
    import sqlalchemy as sa

    if await connection.scalar(sa.text("SELECT to_regclass(:name)"), {"name": table}) is None:
        return None
    found: str | None = await connection.scalar(sa.text(f"SELECT {column} FROM {table}"))
    return found


class SchemaState(msgspec.Struct, frozen=True, kw_only=True):
    """Revisions: that of a database, the oldest one whose release it serves, and ours."""

    revision: str | None
    serves: str | None
    newest: str


def newest_revision() -> str:
    """Return the revision that this program's migrations end with: they are numbered."""
    versions = Path(migrations.__file__ or "").parent / "versions"
    return max(path.name.partition("_")[0] for path in versions.glob("[0-9]*_*.py"))


def judge_postgres(number: int, difference_s: float, schema: SchemaState) -> Diagnosis:
    """Judge what a server says. `number`: its server_version_num; `difference_s`: how far its clock
    is ahead of ours."""
    from migrations.runner import POSTGRES_MAJORS

    oldest, newest = POSTGRES_MAJORS
    major = number // 10_000
    found = f"version {major}.{number % 10_000}"
    if major < oldest:
        return Diagnosis("postgres", "fails", found, f"use Postgres {oldest} to {newest}")
    if (clock := judge_clock("postgres", found, difference_s)) is not None:
        return clock
    if schema.revision is None:
        return Diagnosis(
            "postgres", "warning", f"{found}, without tables", "run `tollgate migrate`"
        )
    found += f", schema {schema.revision}"
    if schema.revision > schema.newest:
        found += f", newer than this program's {schema.newest}"
        if schema.serves is None or schema.serves > schema.newest:
            advice = "run the release that made it, or a newer one"
            return Diagnosis("postgres", "fails", found, advice)
        found += ", and serves it"
    elif schema.revision != schema.newest:
        found += f" of {schema.newest}"
        return Diagnosis("postgres", "warning", found, "run `tollgate migrate`")
    if major > newest:
        return Diagnosis("postgres", "warning", found, f"tested with Postgres {oldest} to {newest}")
    return Diagnosis("postgres", "ok", found)


async def look_at_redis(url: str) -> Diagnosis:
    """Ask for the version and the time."""
    client: Any = Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, decode_responses=True
    )
    try:
        server = await client.info("server")
        before = time.time()
        seconds, micros = await client.time()
        ours = (before + time.time()) / 2
    except (RedisError, OSError, ValueError) as error:
        return Diagnosis("redis", "fails", f"{error}"[:200], "see its log")
    finally:
        await client.aclose()
    return judge_redis(server, int(seconds) + int(micros) / 1e6 - ours)


def judge_redis(server: dict[str, Any], difference_s: float) -> Diagnosis:
    name = "Valkey" if "valkey_version" in server else "Redis"
    version = str(server.get("valkey_version") or server.get("redis_version", ""))
    found = f"{name} {version}"
    major = version.partition(".")[0]
    if not major.isdigit() or int(major) < OLDEST_REDIS:
        advice = f"use Valkey or Redis {OLDEST_REDIS} or newer"
        return Diagnosis("redis", "fails", found, advice)
    return judge_clock("redis", found, difference_s) or Diagnosis("redis", "ok", found)


def judge_clock(name: str, found: str, difference_s: float) -> Diagnosis | None:
    if abs(difference_s) <= MAX_CLOCK_DIFFERENCE_S:
        return None
    how = "ahead of" if difference_s > 0 else "behind"
    found = f"{found}; its clock is {abs(difference_s):.1f} s {how} this machine's"
    return Diagnosis(name, "warning", found, "let both machines keep time by NTP")
