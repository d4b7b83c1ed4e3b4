"""Checks what a start brings to Postgres beside the schema: what had no price is priced, and
counters of spending hear of it, whatever dies in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio
import sqlalchemy as sa
from redis.exceptions import ConnectionError as RedisAway
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ingestion.ingest import ingest
from billing.pricing.price_book import PriceBook
from gateway.limits import recounts
from gateway.limits.counters import index_key
from gateway.processes.database import price_what_waited
from tests.billing.samples import an_attempt, an_event


async def in_suspense(db: AsyncEngine) -> int:
    query = "SELECT count(*) FROM transfers WHERE kind = 'suspense' AND id NOT IN (%s)"
    corrected = "SELECT corrects FROM transfers WHERE corrects IS NOT NULL"
    async with db.connect() as conn:
        return int(await conn.scalar(sa.text(query % corrected)) or 0)


async def test_counters_begin_anew_by_what_has_got_its_price(
    db: AsyncEngine,
    redis: redis.asyncio.Redis,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def die(*_: object) -> None:
        raise RedisAway

    (tmp_path / "book.toml").write_text(
        '[[price]]\nmodel = "new"\nvalid_from = 2026-11-01\n'
        "uncached_input = 1\ncache_read = 1\noutput = 1\n"
    )
    book = PriceBook.load([tmp_path])
    await ingest(db, [an_event(an_attempt(model="new", prices={}))])
    counters = {org: f"spent:{org}" for org in ("org_a", "org_b")}
    for org, counter in counters.items():
        await redis.set(counter, 1)
        await redis.sadd(index_key(org), counter)  # type: ignore[misc]
    with monkeypatch.context() as patched:
        patched.setattr(recounts, "_announce", die)
        await price_what_waited(db, redis_url, book)
    assert await in_suspense(db) == 1, "of what nobody can be told nothing is priced"
    with monkeypatch.context() as patched:
        patched.setattr(recounts, "begin_anew", die)
        await price_what_waited(db, redis_url, book)
    assert await in_suspense(db) == 0
    assert await redis.exists(*counters.values()) == 2
    await price_what_waited(db, redis_url, book)
    assert await redis.exists(counters["org_a"]) == 0, "the next start tells of it"
    assert await redis.exists(counters["org_b"], recounts.ANNOUNCED) == 1
