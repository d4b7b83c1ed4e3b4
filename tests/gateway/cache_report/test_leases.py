"""The books take what engines say of leases, however often, late, or of whom it comes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import pytest
import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.cache_contracts import Breakpoint
from billing.events import Price, PriceSet, Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from engine.fake.engine import FakeEngine
from engine.protocol import LeaseEnded, LeaseGranted
from gateway.cache_report import leases as cache_leases
from gateway.cache_report.leases import CacheLeases, leased_models, place_of
from gateway.db import create_engine
from gateway.fleet.engine.kept_prefixes import KeepRequest
from gateway.ids import uuid7
from gateway.limits import recounts
from gateway.limits.counters import index_key
from gateway.settings.models import AdapterConfig, ModelConfig
from tests.billing.samples import an_attempt, an_event

PENNY = ModelConfig(name="penny", cache_contract="explicit")
PLACE = "tcp:127.0.0.1:1"
PRICES: PriceSet = {
    "uncached_input": Price("in", 100_000),
    "cache_write_5m": Price("write", 125_000),
}


class LeaseKeeper:
    """One process' leases, on an engine that never runs."""

    def __init__(self, db: AsyncEngine, store: redis.asyncio.Redis) -> None:
        self.store = store
        self.counted: Counter[str] = Counter()
        self.engine = FakeEngine()
        self.leases = CacheLeases(db, store, [PENNY], self.count)
        self.leases.watch({PLACE: self.engine})
        self.attempt_id = str(uuid7())

    def count(self, model: str, outcome: str, number: int) -> None:
        assert model == "penny"
        self.counted[outcome] += number

    def ask(self) -> None:
        asked = KeepRequest(
            org_id="org_a",
            model="penny",
            engine_id=self.engine.status.engine_id,
            asked_at=time.time(),
            breakpoints=(Breakpoint(1024),),
            prefixes=(b"p",),
        )
        self.leases.asked(self.attempt_id, asked)

    @property
    def lease_id(self) -> str:
        return f"{self.attempt_id}:0"

    async def granted(self) -> bool:
        event = LeaseGranted(
            lease_id=self.lease_id, request_id=self.attempt_id, num_tokens=1024, ttl_s=300.0
        )
        return await self.leases.heard(PLACE, event)

    async def ended(self, kept_s: float = 7.0) -> bool:
        event = LeaseEnded(lease_id=self.lease_id, num_tokens=1024, ttl_s=300.0, kept_s=kept_s)
        return await self.leases.heard(PLACE, event)

    def event(self) -> UsageEvent:
        attempt = an_attempt(self.attempt_id, prices=PRICES, admitted_at=time.time())
        return an_event(attempt, Quantities(uncached_input=6, cache_write_5m=1024))


@pytest.fixture
def heard(db: AsyncEngine, redis: redis.asyncio.Redis) -> LeaseKeeper:
    return LeaseKeeper(db, redis)


async def refunds(db: AsyncEngine) -> Sequence[int]:
    async with db.connect() as conn:
        found = sa.text("""
            SELECT t.amount_pico - r.amount_pico FROM transfers t JOIN transfers r
                ON r.event_id = t.id AND r.kind = 'repriced' WHERE t.kind = 'usage'
        """)
        return [int(amount) for amount in await conn.scalars(found)]


async def test_an_end_that_is_told_to_two_gateways_and_again_is_refunded_once(
    heard: LeaseKeeper, db: AsyncEngine
) -> None:
    heard.ask()
    assert await heard.granted()
    await ingest(db, [heard.event()])
    neighbour = LeaseKeeper(db, heard.store)
    neighbour.attempt_id = heard.attempt_id
    for gateway in (heard, neighbour, heard):
        assert await gateway.ended()
        await gateway.leases.flush()
    assert await refunds(db) == [1024 * 25_000]
    assert heard.counted + neighbour.counted == {"granted": 1, "evicted": 1}


async def test_only_what_is_in_the_books_is_acknowledged(heard: LeaseKeeper) -> None:
    assert not await heard.ended(), "its gateway may yet record it, or book its event"
    heard.attempt_id = "019aa0c5-0000-7000-8000-000000000001"  # of long ago
    assert await heard.ended(), "nobody will any more"
    heard.attempt_id = "not ours"
    assert await heard.ended() and not await heard.granted()
    nowhere = create_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    cut_off = LeaseKeeper(nowhere, heard.store)
    assert not await cut_off.ended()
    await cut_off.leases.flush()
    await nowhere.dispose()


async def test_a_lease_that_postgres_does_not_take_is_refunded(
    heard: LeaseKeeper, db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_leases, "RECORD_FOR_S", 0.02)
    monkeypatch.setattr(cache_leases, "RECORD_RETRY_S", 0.01)
    nowhere = create_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    cut_off = LeaseKeeper(nowhere, heard.store)
    cut_off.ask()
    assert not await cut_off.granted()
    await nowhere.dispose()
    event = cut_off.event()
    await ingest(db, [event])
    await heard.leases.booked([event])
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE cache_writes SET booked_at = '2026-01-01'"))
    await heard.leases.flush()
    assert await refunds(db) == [1024 * 25_000]
    assert heard.counted == {"unrecorded": 1}


async def count(store: redis.asyncio.Redis) -> None:
    """Store what was spent of org_a and of another org, as the limiter counts."""
    for org_id in ("org_a", "org_b"):
        await store.set(f"spent:{org_id}", 1)
        await store.sadd(index_key(org_id), f"spent:{org_id}")  # type: ignore[misc]


async def test_counters_begin_anew_by_what_was_refunded(
    heard: LeaseKeeper, db: AsyncEngine
) -> None:
    heard.ask()
    await heard.granted()
    await ingest(db, [heard.event()])
    await count(heard.store)
    await heard.leases.flush()
    assert await heard.store.exists("spent:org_a", "spent:org_b") == 2
    await heard.ended()
    await heard.leases.flush()
    assert await refunds(db) == [1024 * 25_000]
    assert await heard.store.exists("spent:org_a") == 0
    assert await heard.store.exists("spent:org_b") == 1
    await count(heard.store)
    await heard.leases.flush()
    assert await heard.store.exists("spent:org_a") == 1, "once"


async def test_a_refund_whose_gateway_died_is_counted_by_another(
    heard: LeaseKeeper, db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(store: object, org_id: str) -> None:
        raise ConnectionError

    heard.ask()
    await heard.granted()
    await ingest(db, [heard.event()])
    await heard.ended()
    await count(heard.store)
    with monkeypatch.context() as patched:
        patched.setattr(recounts, "begin_anew", die)
        await heard.leases.flush()
    assert await refunds(db) == [1024 * 25_000]
    assert await heard.store.exists("spent:org_a") == 1
    await LeaseKeeper(db, heard.store).leases.flush()
    assert await heard.store.exists("spent:org_a") == 0


async def test_an_engine_in_anothers_place_has_nothing_of_what_that_had(
    heard: LeaseKeeper, db: AsyncEngine
) -> None:
    heard.ask()
    assert await heard.granted()
    await ingest(db, [heard.event()])
    heard.engine.lose()
    await heard.leases.flush()
    assert await refunds(db) == [], "it may come back"
    heard.leases.watch({PLACE: FakeEngine()})
    for _ in range(2):
        await heard.leases.flush()
    assert await refunds(db) == [1024 * 25_000]
    assert heard.counted == {"granted": 1, "engine_lost": 1}


def test_which_models_sell_leases_and_where_their_engines_are() -> None:
    adapted = ModelConfig(
        name="a", cache_contract="explicit", adapters=(AdapterConfig(name="tuned"),)
    )
    assert leased_models([adapted, ModelConfig(name="b"), PENNY]) == ["a", "tuned", "penny"]
    assert place_of(PLACE) == PLACE
    assert place_of("unix:/x").endswith("/unix:/x") and place_of("unix:/x") != "/unix:/x"
