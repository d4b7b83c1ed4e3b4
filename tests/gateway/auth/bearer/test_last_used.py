"""When a key was last used: one statement now and then, never while a request waits."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gateway.auth.bearer import last_used
from gateway.auth.bearer.last_used import LastUsed
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.tenancy.tables import api_keys
from tests.databases import counted_queries
from tests.gateway.auth.bearer.test_api_keys import authenticating, make_key

NOWHERE = "postgresql+asyncpg://nobody@/none?host=/nonexistent"


async def used_at(db: AsyncEngine) -> list[datetime | None]:
    async with db.connect() as conn:
        return list(await conn.scalars(sa.select(api_keys.c.last_used_at)))


async def test_uses_are_written_by_one_statement_and_never_go_back(
    db: AsyncEngine, redis: Redis, postgres_url: str
) -> None:
    created = await make_key(db)
    system = create_engine(postgres_url, role=ROLE_SYSTEM)
    now = [1_800_000_000.0]
    noting = LastUsed(system, wall_clock=lambda: now[0])
    async with authenticating(db, redis, on_use=noting.note) as authenticator:
        await authenticator.authenticate(created.secret)
        with counted_queries(db) as on_the_way, counted_queries(system) as behind:
            for _ in range(100):
                now[0] += 1
                await authenticator.authenticate(created.secret)
            assert on_the_way == behind == []
            await noting.flush()
            await noting.flush()
        assert len(behind) == 1
        assert await used_at(db) == [datetime.fromtimestamp(1_800_000_100, tz=UTC)]
        now[0] -= 50  # another process, which noted earlier and writes later
        noting.note(created.row.id)
        await noting.flush()
        assert await used_at(db) == [datetime.fromtimestamp(1_800_000_100, tz=UTC)]
    await system.dispose()


async def test_it_writes_by_itself_and_once_more_at_the_end(db: AsyncEngine, redis: Redis) -> None:
    created = await make_key(db)
    noting = LastUsed(db, interval_s=0.01)
    noting.start()
    noting.note(created.row.id)
    async with asyncio.timeout(30):
        while await used_at(db) == [None]:
            await asyncio.sleep(0.01)
    [before] = await used_at(db)
    noting.note(created.row.id)
    await noting.close()
    [after] = await used_at(db)
    assert before is not None and after is not None and after > before
    await noting.close()


async def test_what_postgres_does_not_take_is_kept_within_bounds(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(last_used, "MAX_NOTED", 3)
    nowhere = create_async_engine(NOWHERE)
    now = [1.0]
    noting = LastUsed(nowhere, wall_clock=lambda: now[0])
    for key_id in ("a", "b", "c", "d"):
        noting.note(key_id)
    now[0] = 2.0
    noting.note("a")
    assert noting._noted == {"a": 2.0, "b": 1.0, "c": 1.0}, "bounded, and known ones go on"
    await noting.flush()
    assert noting._noted == {"a": 2.0, "b": 1.0, "c": 1.0}
    assert "last use of 3 keys not written" in caplog.text
    await noting.close()
    await nowhere.dispose()
