"""Several gateways on one prepaid balance: a real Valkey, a real Postgres, the ledger between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.credits.balance import Balance, balance_of
from billing.credits.balance_leases import EXPIRY_MARGIN, LEASE_TTL, LeaseRequest
from billing.credits.grants_admin import grant_credit, revoke_credit
from billing.credits.lines import _leases, settle, sweep, top_up
from billing.events import Price, PriceSet, Quantities
from billing.ingestion.ingest import ingest
from billing.ledger.spend_totals import spent_by_org
from billing.money import PICO_PER_USD
from billing.reconciliation.checks import check_credits, check_ledger
from gateway.bookkeeping.spend_reader import PostgresBooks
from gateway.http_errors.table import RateLimited, to_http_error
from gateway.ids import uuid7
from gateway.limits import funding
from gateway.limits.counters import SpentUnknown
from gateway.limits.funding import Funding
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Units
from gateway.limits.spending import MAX_NANO, counter_of
from gateway.principal import SpendCap
from tests.billing.samples import an_attempt, an_event
from tests.gateway.limits.money.money_books import ORG, who

PRICES: PriceSet = {"uncached_input": Price("m:in", 0), "output": Price("m:out", 10**9)}
"""A token a tenth of a cent."""
CENT_TOKENS = 10
CENT = PICO_PER_USD // 100
A_DAY = timedelta(days=1)
PREPAID = who(SpendCap("org", ORG, "total", MAX_NANO, is_funded=True))
COUNTER = (ORG, counter_of("org", ORG, "total", 0).key(ORG))
MOMENTS = (
    ("credit_grants", "expires_at"),
    ("credit_lines", "leased_at"),
    ("credit_lines", "leased_until"),
    ("transfers", "expires_at"),
)
"""Columns with a moment that concerns credit or the leases on it."""


class Lender(PostgresBooks):
    """Counts what it is asked, and may be away."""

    asked = 0
    is_away = False

    async def top_up(
        self, org_id: str, *, spent_nano: int, wanted_nano: int, released: int | None
    ) -> Funding:
        self.asked += 1
        if self.is_away:
            raise OSError("away")
        return await super().top_up(
            org_id, spent_nano=spent_nano, wanted_nano=wanted_nano, released=released
        )


class Gateway:
    def __init__(self, db: AsyncEngine, store: redis.asyncio.Redis) -> None:
        self.db, self.lender = db, Lender(db)
        self.limiter = Limiter(store, books=self.lender, lender=self.lender, grace_s=0)

    async def admit(
        self, cents: int, *, model: str = "m", given: bool = True
    ) -> Admission | Refusal:
        return await self.limiter.admit(
            PREPAID,
            model,
            input_tokens=0,
            max_output_tokens=cents * CENT_TOKENS,
            lease_id=f"req_{uuid7().hex}",
            prices=PRICES,
            min_output_tokens=0 if given else 1,
            admitted_at=time.time(),
        )

    async def run(self, admission: Admission, cents: int) -> None:
        """To its end, and into the books."""
        tokens = cents * CENT_TOKENS
        await self.limiter.settle(
            admission, Units(output_tokens=tokens, cost_nano=cents * CENT // 1000)
        )
        attempt = an_attempt(org=ORG, model=admission.model, prices=PRICES)
        attempt = msgspec.structs.replace(
            attempt, request_id=admission.lease_id, admitted_at=time.time()
        )
        done = an_event(attempt, Quantities(output=tokens))
        await ingest(self.db, [done])
        await self.limiter.counters.book([done])

    async def spend(self, cents: int, *, model: str = "m") -> bool:
        verdict = await self.admit(cents, model=model)
        if isinstance(verdict, Admission):
            await self.run(verdict, cents)
        return isinstance(verdict, Admission)


@pytest.fixture
async def gateways(
    db: AsyncEngine, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[Gateway]]:
    monkeypatch.setattr(funding, "TOP_UP_TIMEOUT_S", 60.0)
    stores = [redis.asyncio.from_url(redis_url) for _ in range(3)]
    made = [Gateway(db, store) for store in stores]
    yield made
    for gateway, store in zip(made, stores, strict=True):
        await gateway.limiter.close()
        await store.aclose()


async def credit(db: AsyncEngine, name: str, cents: int, **terms: object) -> None:
    async with db.begin() as conn:
        await grant_credit(
            conn,
            credit_id=name,
            org=ORG,
            amount_pico=cents * CENT,
            **terms,  # type: ignore[arg-type]
        )


async def pass_time(db: AsyncEngine, store: redis.asyncio.Redis, passed: timedelta) -> None:
    """All that was noted of moments is so much older; what runs meanwhile is not."""
    async with db.begin() as conn:
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        for table, column in MOMENTS:
            older = f"UPDATE {table} SET {column} = {column} - CAST(:passed AS interval)"
            await conn.execute(sa.text(older), {"passed": passed})
    await store.hincrby(COUNTER[1], "e", -int(passed / timedelta(microseconds=1)))


async def assert_books_agree(db: AsyncEngine) -> None:
    assert await check_ledger(db) == []
    assert await check_credits(db) == []


async def balance(db: AsyncEngine) -> Balance:
    async with db.connect() as conn:
        return await balance_of(conn, ORG)


async def spent(db: AsyncEngine) -> int:
    async with db.connect() as conn:
        return await spent_by_org(conn, ORG)


async def test_gateways_share_a_balance_and_overdraw_it_by_nothing(
    gateways: list[Gateway], db: AsyncEngine
) -> None:
    await credit(db, "one", 150)
    await credit(db, "two", 151, priority=0)

    async def client(gateway: Gateway) -> int:
        spent = 0
        while await gateway.spend(7):
            spent += 7
        return spent

    num_spent = sum(await asyncio.gather(*(client(one) for one in gateways for _ in range(8))))
    assert num_spent == 301 // 7 * 7, "all that fits, and no more"
    asked = sum(gateway.lender.asked for gateway in gateways)
    assert asked < 40, "by the lease, not by the request"
    while await sweep(db):
        assert await settle(db, ORG)
        found = await balance(db)
        if not found.unpaid_pico:
            break
    found = await balance(db)
    assert (await spent(db), found.unpaid_pico) == (num_spent * CENT, 0)
    assert found.left_pico == (301 - num_spent) * CENT
    await assert_books_agree(db)


async def test_what_fits_the_balance_and_not_the_lease_waits_for_it(
    gateways: list[Gateway], db: AsyncEngine
) -> None:
    await credit(db, "one", 5000)
    here, there, _ = gateways
    small = await here.admit(1)
    assert isinstance(small, Admission)
    leased = (await balance(db)).leased_pico
    assert leased < 100 * CENT
    large = await there.admit(3000)
    assert isinstance(large, Admission), "it was topped up"
    unset = await here.admit(1500, given=False)
    assert isinstance(unset, Admission)
    assert unset.max_output_tokens == 1500 * CENT_TOKENS, "derived from the balance"
    rest = await here.admit(1500, given=False)
    assert isinstance(rest, Admission)
    assert rest.max_output_tokens == 499 * CENT_TOKENS, "of which so much is left"
    refused = await here.admit(1)
    assert isinstance(refused, Refusal)
    assert (refused.kind, refused.retry_after_s, refused.left_nano) == ("money", None, 0)
    assert refused.limit == 5000 * CENT // 1000
    asked = here.lender.asked
    assert isinstance(await here.admit(1), Refusal)
    assert here.lender.asked == asked, "the ledger is not asked for each"
    await credit(db, "more", 10)
    here.limiter.funds.has_changed(COUNTER)
    assert isinstance(await here.admit(10), Admission), "it has paid"


async def test_a_dead_gateway_takes_no_lease_along(
    gateways: list[Gateway], db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    await credit(db, "one", 100)
    dead, other, _ = gateways
    assert await dead.spend(3)
    await dead.limiter.close()
    assert (await balance(db)).leased_pico > 0
    assert await other.spend(96), "the lease is the org's, not the gateway's"
    await other.limiter.close()
    await pass_time(db, redis, LEASE_TTL + EXPIRY_MARGIN)
    await sweep(db)
    found = await balance(db)
    assert (found.leased_pico, found.unpaid_pico, found.available_pico) == (0, 0, CENT)
    await assert_books_agree(db)


async def test_a_redis_that_forgets_funds_nothing_by_itself(
    gateways: list[Gateway], db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    await credit(db, "one", 100)
    here, there, _ = gateways
    assert await here.spend(60)
    held = await there.admit(30)
    assert isinstance(held, Admission)
    await redis.flushdb()
    await there.limiter.renew()
    assert isinstance(await here.admit(11), Refusal), "60 are spent, 30 held"
    assert isinstance(await here.admit(10), Admission)
    await assert_books_agree(db)


async def test_without_the_ledger_the_lease_is_spent_and_then_nobody_can_say(
    gateways: list[Gateway], db: AsyncEngine
) -> None:
    await credit(db, "one", 5000)
    here = gateways[0]
    assert await here.spend(1)
    here.lender.is_away = True
    spent = 0
    with pytest.raises(SpentUnknown):
        while spent < 100:
            verdict = await here.admit(5)
            assert isinstance(verdict, Admission), "it has paid, and may come back"
            spent += 5
    assert 5 <= spent <= 15, "a lease of the least"
    here.lender.is_away = False
    assert await here.spend(5)


async def test_a_credit_that_is_taken_back_goes_as_far_as_it_is_not_leased(
    gateways: list[Gateway], db: AsyncEngine
) -> None:
    await credit(db, "one", 500)
    here, there, _ = gateways
    held = await here.admit(40)
    assert isinstance(held, Admission)
    async with db.begin() as conn:
        await revoke_credit(conn, ORG, "one")
    await settle(db, ORG)
    assert (await balance(db)).left_pico == (await balance(db)).leased_pico > 0, "kept, no more"
    here.limiter.funds.has_changed(COUNTER)
    assert isinstance(await there.admit(11), Refusal), "what is over is let go of"
    await here.run(held, 40)
    await settle(db, ORG)
    found = await balance(db)
    assert (await spent(db), found.available_pico) == (40 * CENT, 0)
    await assert_books_agree(db)


async def test_a_credit_pays_until_it_expires_and_for_what_was_admitted_before(
    gateways: list[Gateway], db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    here = gateways[0]
    await credit(db, "soon", 100, expires_at=datetime.now(UTC) + A_DAY)
    held = await here.admit(50)
    assert isinstance(held, Admission)
    await pass_time(db, redis, A_DAY)
    assert isinstance(await here.admit(1), Refusal)
    await here.run(held, 50)  # as of now: by `occurred_at` alone it was admitted later
    await sweep(db)
    assert (await balance(db)).unpaid_pico == 50 * CENT, "overdrawn by what ran, at most the lease"
    await credit(db, "next", 60)
    here.limiter.funds.has_changed(COUNTER)
    assert isinstance(await here.admit(11), Refusal), "what is owed is paid first"
    assert isinstance(await here.admit(10), Admission)
    await assert_books_agree(db)


async def test_what_is_leased_of_a_credit_that_is_over_is_let_go_and_another_serves(
    gateways: list[Gateway], db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    expiry = datetime.now(UTC) + LEASE_TTL / 2
    await credit(db, "gone", 5, priority=0)
    await credit(db, "soon", 5, expires_at=expiry)
    await credit(db, "rest", 50)
    here = gateways[0]
    assert await here.spend(1)
    async with db.begin() as conn:
        assert set(await _leases(conn, ORG)) == {"gone", "soon"}
        await revoke_credit(conn, ORG, "gone")
    await pass_time(db, redis, LEASE_TTL / 2)
    asked = here.lender.asked
    assert await here.spend(5), "long before the books take the leases to have ended"
    assert here.lender.asked == asked + 2, "what is over, and what there is instead"
    async with db.connect() as conn:
        assert set(await _leases(conn, ORG)) == {"rest"}
    await assert_books_agree(db)


async def test_a_credit_for_a_model_pays_for_no_other(
    gateways: list[Gateway], db: AsyncEngine
) -> None:
    await credit(db, "any", 20)
    await credit(db, "penny", 50, models=["penny"], priority=0)
    here, there, _ = gateways
    assert await here.spend(45, model="penny")
    assert isinstance(await there.admit(26, model="penny"), Refusal)
    refused = await there.admit(21)
    assert isinstance(refused, Refusal)
    assert to_http_error(RateLimited(refused)).body.message.startswith(
        "What this org has paid in advance for the model 'm' does not allow this request: "
    )
    assert "Credit that is for other models" in to_http_error(RateLimited(refused)).body.message
    assert await there.spend(20)
    assert await here.spend(5, model="penny")
    assert not await here.spend(1)
    await settle(db, ORG)
    assert (await balance(db)).left_pico == 0
    await assert_books_agree(db)


async def test_what_is_left_for_a_model_is_not_waited_for_by_another(
    gateways: list[Gateway], db: AsyncEngine
) -> None:
    await credit(db, "any", 20)
    await credit(db, "penny", 50, models=["penny"])
    here, fresh, _ = gateways
    assert await here.spend(20)
    refused = await fresh.admit(1)
    assert isinstance(refused, Refusal)
    assert (refused.kind, refused.retry_after_s) == ("money", None)
    assert fresh.lender.asked <= 2
    assert isinstance(await fresh.admit(50, model="penny"), Admission), "for which it is left"


async def test_what_is_left_for_a_model_is_not_asked_for_by_each_request_to_another(
    gateways: list[Gateway], db: AsyncEngine
) -> None:
    await credit(db, "penny", 5000, models=["penny"])
    await credit(db, "pound", 10, models=["pound"])
    here = gateways[0]
    assert await here.spend(6, model="pound"), "so little is left that it would be topped up"
    asked = here.lender.asked
    for _ in range(4):
        assert await here.spend(1, model="pound")
        await asyncio.sleep(0.02)  # a top-up that nobody waits for
    assert here.lender.asked == asked, "of which there is no more"
    for _ in range(30):
        assert await here.spend(1, model="penny")
    assert here.lender.asked > asked, "of which there is"


async def test_one_tops_up_at_a_time_and_all_that_wait_are_counted(
    gateways: list[Gateway], db: AsyncEngine
) -> None:
    await credit(db, "one", 10_000)
    here = gateways[0]
    verdicts = await asyncio.gather(*(here.admit(100) for _ in range(100)))
    assert all(isinstance(verdict, Admission) for verdict in verdicts)
    assert here.lender.asked < 10
    assert isinstance(await here.admit(1), Refusal)


async def test_versions_do_not_go_back(db: AsyncEngine) -> None:
    await credit(db, "one", 100)
    first = await top_up(db, ORG, LeaseRequest(spent_pico=0))
    second = await top_up(db, ORG, LeaseRequest(spent_pico=0, wanted_pico=60 * CENT))
    assert first.version < second.version
    assert first.funded_pico < second.funded_pico == 60 * CENT
    everything = await top_up(db, ORG, LeaseRequest(spent_pico=0, wanted_pico=500 * CENT))
    assert (everything.funded_pico, everything.refill_pico) == (100 * CENT, 0)
