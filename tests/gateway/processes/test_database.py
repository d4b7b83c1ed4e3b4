"""Checks what a start brings to Postgres beside the schema: what had no price is priced, and
counters of spending hear of it, whatever dies in between."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis.asyncio
import sqlalchemy as sa
from redis.exceptions import ConnectionError as RedisAway
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import PriceChanged
from billing.ingestion.ingest import ingest
from billing.pricing.price_book import PriceBook
from gateway.limits import recounts
from gateway.limits.counters import index_key
from gateway.processes.bootstrap import bootstrap
from gateway.processes.database import TELL_TIMEOUT_S, price_what_waited, take_up
from gateway.settings.load import Settings, load
from gateway.tenancy.changes import CHANNEL, EVERYTHING
from tests.billing.samples import an_attempt, an_event
from tests.pace import within


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


PRICE = """
[[price]]
model = "far"
valid_from = "2026-11-01"
uncached_input = "{}"
output = "1"
"""
FAR = '[[model]]\nname = "far"\nupstream = "http://127.0.0.1:1/v1"\n'


class Installed:
    """A database with its first organization, and the file of its settings."""

    def __init__(self, folder: Path, url: str, redis_url: str, db: AsyncEngine) -> None:
        self.folder, self.urls, self.db = folder, (url, redis_url), db

    def read(self, rpm: int, price: str | None) -> Settings:
        book, config = self.folder / "book.toml", self.folder / "tollgate.toml"
        book.write_text("" if price is None else PRICE.format(price))
        plan = f"[plan.default]\nrequests_per_minute = {rpm}\n"
        config.write_text(f'price_books = ["{book}"]\n{FAR}{plan}')
        return load({"home": self.folder / "home", "config": config}, {})

    async def rows(self, query: str) -> list[object]:
        async with self.db.connect() as conn:
            return list(await conn.scalars(sa.text(query)))

    async def state(self) -> tuple[list[object], list[object], list[object]]:
        return (
            await self.rows("SELECT requests_per_minute FROM plans WHERE name = 'default'"),
            await self.rows("SELECT price_id FROM prices"),
            await self.rows("SELECT action FROM audit_entries"),
        )


@pytest.fixture
async def installed(
    db: AsyncEngine, redis: redis.asyncio.Redis, postgres_url: str, redis_url: str, tmp_path: Path
) -> Installed:
    found = Installed(tmp_path, postgres_url, redis_url, db)
    plans = found.read(7, None).plans
    await bootstrap(db, pepper=b"p" * 32, pepper_id="p", plans=plans, default_plan="default")
    return found


async def test_plans_and_prices_are_taken_up_together_and_workers_hear_of_it(
    installed: Installed, redis: redis.asyncio.Redis
) -> None:
    fresh = installed.read(9, "0.5")
    before = await installed.state()
    assert before[:2] == ([7], [])
    tried = await take_up(fresh, *installed.urls, changes=["~ a"], keeps=False)
    assert tried > 0 and await installed.state() == before
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(CHANNEL)
        assert await take_up(fresh, *installed.urls, changes=["~ a"]) == tried
        async with asyncio.timeout(30):
            async for message in pubsub.listen():
                if message["type"] == "message":
                    break
        assert message["data"] == EVERYTHING.encode()
    plans, prices, actions = await installed.state()
    assert plans == [9] and prices
    new = actions.copy()
    for action in before[2]:
        new.remove(action)
    assert sorted(map(str, new)) == ["plan.updated", "prices.loaded", "settings.reloaded"]
    assert await take_up(fresh, *installed.urls) == 0, "what is in force changes nothing"


async def test_a_price_that_was_edited_changes_no_plan_either(installed: Installed) -> None:
    await take_up(installed.read(9, "0.5"), *installed.urls)
    before = await installed.state()
    with pytest.raises(PriceChanged):
        await take_up(installed.read(11, "0.6"), *installed.urls)
    assert await installed.state() == before


async def test_a_silent_redis_keeps_no_settings_from_being_taken_up(installed: Installed) -> None:
    async def read_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        finally:
            writer.close()

    silent = await asyncio.start_server(read_only, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    try:
        async with within(2 * TELL_TIMEOUT_S):
            url = f"redis://127.0.0.1:{port}"
            assert await take_up(installed.read(9, "0.5"), installed.urls[0], url) > 0
    finally:
        silent.close()
    assert (await installed.state())[0] == [9]
