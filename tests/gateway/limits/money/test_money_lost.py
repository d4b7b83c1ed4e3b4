"""FLUSHALL while requests run: two gateways with spools of their own, one Postgres, one Valkey.
What was admitted never exceeds the cap, and the counter ends as the books do."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Attempt, Quantities, UsageEvent
from billing.ingestion.shipper import Shipper
from billing.ledger.spend_totals import ever_used
from billing.pricing.rating import rate
from billing.reconciliation.checks import check_ledger
from billing.spool.spool import Spool
from billing.tables import AMOUNTS, usage_events
from gateway.bookkeeping.spend_reader import PostgresBooks
from gateway.ids import uuid7
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Units
from gateway.limits.spending import counter_of, to_nano
from gateway.principal import SpendCap
from tests.gateway.limits.money.money_books import ORG, PRICES, PROJECT, who

INPUT, OUTPUT = 100, 20
CAP_NANO = 60_000
"""Allows for some hundred requests: each holds 510 nano and spends some 400."""
CAPPED = who(SpendCap("org", ORG, "total", CAP_NANO))
AT_ONCE = 8


class Gateway(msgspec.Struct):
    limiter: Limiter
    spool: Spool
    shipper: Shipper
    refused: int = 0

    async def request(self, draw: random.Random) -> None:
        """As `inference` does it."""
        attempt = Attempt(
            id=str(uuid7()),
            request_id=f"req_{uuid7().hex}",
            org=ORG,
            project=PROJECT,
            key="key_a",
            model="m",
            prices=PRICES,
            admitted_at=time.time(),
        )
        verdict = await self.limiter.admit(
            CAPPED,
            "m",
            input_tokens=INPUT,
            max_output_tokens=OUTPUT,
            lease_id=attempt.request_id,
            prices=PRICES,
            admitted_at=attempt.admitted_at,
        )
        if not isinstance(verdict, Admission):
            self.refused += 1
            await asyncio.sleep(0.005)
            return
        self.spool.attempt_opened(attempt)
        await asyncio.sleep(draw.random() * 0.15)
        used = Quantities(uncached_input=INPUT - 50, cache_read=50, output=draw.randint(1, OUTPUT))
        await self.spool.close(
            UsageEvent(attempt=attempt, quantities=used, occurred_at=time.time())
        )
        cost = to_nano(rate(used, PRICES).amount_pico)
        await self.limiter.settle(
            verdict, Units(input_tokens=INPUT, output_tokens=used.output, cost_nano=cost)
        )


@pytest.fixture
async def gateways(
    db: AsyncEngine, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[Gateway]]:
    for interval in ("WATCH_S", "IDLE_WATCH_S"):
        monkeypatch.setattr(f"gateway.limits.limiter.{interval}", 0.1)
    made = []
    async with AsyncExitStack() as stack:
        for name in ("one", "other"):
            store = redis.asyncio.from_url(redis_url)
            stack.push_async_callback(store.aclose)
            spool = await Spool.open(tmp_path / name)
            stack.push_async_callback(spool.shutdown)
            limiter = Limiter(
                store,
                books=PostgresBooks(db),
                ever_used=partial(ever_used, db, spool),
                grace_s=0.6,
            )
            await limiter.start()
            stack.push_async_callback(limiter.close)
            shipper = Shipper(spool, db, on_booked=limiter.counters.book)
            shipper.start()
            stack.push_async_callback(shipper.stop)
            made.append(Gateway(limiter, spool, shipper))
        yield made


async def test_a_flush_under_load_lets_nobody_exceed_a_cap(
    gateways: list[Gateway], db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    draw, over = random.Random(7), asyncio.Event()

    async def client(gateway: Gateway) -> None:
        while not over.is_set():
            await gateway.request(draw)

    clients = [asyncio.create_task(client(gateway)) for gateway in gateways for _ in range(AT_ONCE)]
    for _ in range(3):
        await asyncio.sleep(0.3 + draw.random() * 0.3)
        await redis.flushdb()
    async with asyncio.timeout(30):
        while min(gateway.refused for gateway in gateways) < 50:
            await asyncio.sleep(0.05)
    over.set()
    await asyncio.gather(*clients)
    refused = gateways[0].refused
    while gateways[0].refused == refused:  # what the last of them held and did not use is there
        await gateways[0].request(draw)
    for gateway in gateways:
        assert await gateway.shipper.drain(30)
    async with db.connect() as conn:
        total = sum((usage_events.c[name] for name in AMOUNTS), sa.literal(0))
        rows = list(await conn.scalars(sa.select(total)))
    spent = sum(to_nano(int(row)) for row in rows)
    assert len(rows) > 100, "it ran"
    assert CAP_NANO - 2 * 510 < spent <= CAP_NANO
    key = counter_of("org", ORG, "total", 0).key(ORG)
    async with asyncio.timeout(30):  # the books round once, settles each for itself
        while not 0 <= spent - int(await redis.hget(key, "n") or -1) <= len(rows):
            await asyncio.sleep(0.05)
    assert await check_ledger(db) == []
