"""Redis forgets all while streams run that nobody has booked: no minute passes more than its bound.

On a real Valkey and a real Postgres; only time is faked, and only where a test says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from billing.ledger.spend_totals import ever_used
from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from foundation.tasks import TaskSet
from gateway.inference.settlement import CrashSettlement as AfterTheFact
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Settlement, Units, burst
from gateway.limits.redis.data_loss import OF_ALL
from gateway.principal import Plan, Principal
from gateway.telemetry.metrics import Telemetry
from tests.billing.samples import an_attempt, an_event
from tests.gateway.limits.limiter_oracle import CLOCK_KEY, move_clock

TPM = 6000
RATE = TPM // 60
ORG_EPOCH = "tollgate:{org_a}:epoch"
WHO = Principal(
    org_id="org_a",
    project_id="proj_a",
    key_id="key_a",
    key_hint="",
    scopes=frozenset(),
    org_plan=Plan(name="p", tokens_per_minute=TPM),
)


class Gateway:
    def __init__(self, store: redis.asyncio.Redis, db: AsyncEngine, spool: Spool) -> None:
        self.spool = spool
        self.ever_used = partial(ever_used, db, spool)
        self.limiter = Limiter(store, ever_used=self.ever_used)
        self.number = 0

    async def ask(self, tokens: int) -> Admission | Refusal:
        self.number += 1
        return await self.limiter.admit(
            WHO,
            "m",
            input_tokens=tokens,
            max_output_tokens=0,
            lease_id=f"{self.spool.directory.name}-{self.number}",
        )

    async def admitted(self, tokens: int) -> Admission:
        verdict = await self.ask(tokens)
        assert isinstance(verdict, Admission)
        return verdict

    async def wait_s(self, tokens: int) -> float:
        verdict = await self.ask(tokens)
        assert isinstance(verdict, Refusal) and verdict.retry_after_s is not None
        return verdict.retry_after_s


@pytest.fixture
async def gateways(
    redis: redis.asyncio.Redis, db: AsyncEngine, tmp_path: Path
) -> AsyncIterator[list[Gateway]]:
    """Open two gateways of an installation in which the last event was booked long ago."""
    await ingest(db, [an_event()])
    async with db.begin() as conn:  # its rows are immutable but for a replica
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        await conn.execute(sa.text("UPDATE usage_events SET ingested_at = now() - interval '1h'"))
    await redis.set(OF_ALL, 0)
    spools = [await Spool.open(tmp_path / name) for name in ("one", "other")]
    made = [Gateway(redis, db, spool) for spool in spools]
    yield made
    for each in made:
        await each.limiter.close()
        await each.spool.shutdown()


async def test_the_first_plan_of_an_installation_in_use_begins_with_full_buckets(
    redis: redis.asyncio.Redis, db: AsyncEngine, tmp_path: Path
) -> None:
    """Use without a plan, which was before it, was taken from no bucket."""
    spool = await Spool.open(tmp_path / "new")
    gateway = Gateway(redis, db, spool)
    await gateway.limiter.start()
    try:
        async with asyncio.timeout(30):
            while await redis.get(OF_ALL) is None:
                await asyncio.sleep(0.01)
        await ingest(db, [an_event()])
        await gateway.admitted(burst(TPM))
    finally:
        await gateway.limiter.close()
        await spool.shutdown()


@pytest.mark.parametrize("asks", [0, 1])
async def test_long_streams_alone_are_use_enough(
    redis: redis.asyncio.Redis,
    gateways: list[Gateway],
    monkeypatch: pytest.MonkeyPatch,
    asks: int,
) -> None:
    """For a hundred seconds they are opened, at the rate, and nothing is booked. Whoever asks
    first, one that knows of them or not."""
    move_clock(monkeypatch)
    for each in gateways:
        each.limiter = Limiter(redis, ever_used=each.ever_used)
    now_us = time.time_ns() // 1000
    for second in range(0, 101, 10):
        await redis.set(CLOCK_KEY, now_us - (100 - second) * 1_000_000)
        await gateways[0].admitted(burst(TPM))
        await gateways[0].limiter.renew()
    await redis.flushdb()
    await redis.set(CLOCK_KEY, now_us)
    assert await gateways[asks].wait_s(burst(TPM)) >= burst(TPM) / RATE


async def test_what_another_gateway_has_not_shipped_is_use_enough(
    redis: redis.asyncio.Redis, gateways: list[Gateway]
) -> None:
    one, other = gateways
    used = await other.admitted(burst(TPM))
    await other.spool.close(an_event())
    await other.limiter.settle(used, Units(input_tokens=burst(TPM)))
    await redis.flushdb()
    assert await one.wait_s(burst(TPM)) > 9


async def test_an_epoch_of_before_is_not_given_to_an_org_after_a_loss(
    redis: redis.asyncio.Redis, gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is emptied between the reading of all's epoch and the writing of the org's."""
    one, _ = gateways
    call, emptied = one.limiter._scripts.pipeline.call, False

    async def emptied_once(command: tuple[object, ...]) -> object:
        nonlocal emptied
        if command[:2] == ("SET", ORG_EPOCH) and not emptied:
            emptied = True
            await redis.flushdb()
        return await call(command)

    monkeypatch.setattr(one.limiter._scripts.pipeline, "call", emptied_once)
    before_us = time.time_ns() // 1000
    await one.limiter._data_loss_detector.begin(ORG_EPOCH)
    assert emptied
    assert await redis.get(ORG_EPOCH) == await redis.get(OF_ALL)
    assert int(await redis.get(ORG_EPOCH)) >= before_us


async def test_a_gateway_that_died_before_the_loss_is_debited_by_the_empty_buckets(
    redis: redis.asyncio.Redis, gateways: list[Gateway]
) -> None:
    """Nobody knows of its lease; what it used was used before the epoch."""
    dead, other = gateways
    lost = await dead.admitted(burst(TPM))
    await redis.flushdb()
    assert await other.wait_s(100) == pytest.approx(1, abs=0.5)
    used = Units(input_tokens=burst(TPM), output_tokens=300)
    settle = other.limiter.settle_lease
    assert await settle("org_a", lost.lease_id, used) is Settlement.UNKNOWN
    assert await other.wait_s(500) == pytest.approx(5, abs=1), "it was not taken twice"
    assert await settle("org_a", lost.lease_id, used) is Settlement.REPLAYED
    assert await dead.limiter.renew() == 0
    assert await redis.zcard("tollgate:{org_a}:leases") == 0, "what was settled opens no more"


async def test_a_gateway_that_died_after_the_loss_is_debited_for_what_it_used_since(
    redis: redis.asyncio.Redis, gateways: list[Gateway]
) -> None:
    dead, other = gateways
    running = await dead.admitted(100)
    dead.limiter.progress(running, Units(input_tokens=100))
    await redis.flushdb()
    await dead.limiter.renew()
    assert await other.wait_s(100) == pytest.approx(1, abs=0.5)
    used = Units(input_tokens=100, output_tokens=300)
    settle = other.limiter.settle_lease
    assert await settle("org_a", running.lease_id, used) is Settlement.SETTLED
    assert await other.wait_s(100) == pytest.approx(4, abs=1), "300 beyond what was known"
    assert await settle("org_a", running.lease_id, used) is Settlement.REPLAYED


async def test_a_gateway_that_dies_between_close_and_settle_is_refunded_by_what_it_closed(
    redis: redis.asyncio.Redis, db: AsyncEngine, gateways: list[Gateway]
) -> None:
    """And not by what it had last told, which may be nothing."""
    dead, other = gateways
    closed = await dead.admitted(600)
    attempt = msgspec.structs.replace(an_attempt(org="org_a"), request_id=closed.lease_id)
    event = UsageEvent(
        attempt=attempt, quantities=Quantities(uncached_input=600), occurred_at=time.time()
    )
    tasks = TaskSet()
    after = AfterTheFact(
        db=db,
        limiter=other.limiter,
        tasks=tasks,
        price_book=PriceBook(()),
        telemetry=Telemetry(models=["m"]),
    )
    for _ in range(2):
        after.left([event])
        await asyncio.gather(*tasks._tasks)
    assert await redis.zcard("tollgate:{org_a}:leases") == 0
    assert await other.wait_s(burst(TPM)) == pytest.approx(6, abs=1)
