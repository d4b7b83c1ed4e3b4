"""One query finds the invoices that are due, and one gateway at a time makes them."""

from __future__ import annotations

from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.invoices.closing import close, finalize
from billing.invoices.due import orgs_due
from billing.invoices.invoice import latest_invoice
from billing.invoices.invoicer import INVOICING, Invoicer
from tests.billing.invoices.billed import NOVEMBER, OCTOBER, ORG, at, book, open_account, used
from tests.databases import counted_queries

MOMENT = timedelta(microseconds=1)


async def due(db: AsyncEngine, now: datetime) -> list[str]:
    async with db.connect() as conn:
        return list(await orgs_due(conn, now))


async def test_an_org_is_due_when_its_next_period_or_its_grace_has_ended(db: AsyncEngine) -> None:
    assert await due(db, NOVEMBER) == []
    await open_account(db, grace_hours=24)
    await open_account(db, "org_b", billing_day=15, timezone="Asia/Kathmandu")
    in_kathmandu = at(2026, 9, 14, 18, 15)
    assert await due(db, in_kathmandu - MOMENT) == []
    assert await due(db, in_kathmandu) == ["org_b"]
    assert await due(db, OCTOBER - MOMENT) == ["org_b"]
    assert await due(db, OCTOBER) == [ORG, "org_b"]
    draft = await close(db, org_id=ORG, now=OCTOBER)
    assert draft is not None
    grace_ends = OCTOBER + timedelta(hours=24)
    assert await due(db, grace_ends - MOMENT) == ["org_b"]
    assert await due(db, grace_ends) == [ORG, "org_b"]
    await finalize(db, org_id=ORG, invoice_id=draft.id, now=grace_ends)
    assert await due(db, NOVEMBER - MOMENT) == ["org_b"]
    assert await due(db, NOVEMBER) == [ORG, "org_b"]


async def test_usage_before_the_account_makes_its_period_due(db: AsyncEngine) -> None:
    await open_account(db)
    assert await due(db, at(2026, 9, 2)) == []
    await book(db, used(at(2026, 8, 31, 23, 59)))
    assert await due(db, at(2026, 9, 2)) == [ORG]


async def test_accounts_of_which_nothing_is_due_cost_no_query_each(db: AsyncEngine) -> None:
    invoicer = Invoicer(db, wall_clock=at(2026, 9, 2).timestamp)
    numbers = []
    for first in (0, 10):
        for number in range(first, first + 10):
            await open_account(db, f"org_{number}", billing_day=5 + number)
        with counted_queries(db) as statements:
            await invoicer.look()
        numbers.append(len(statements))
    assert numbers[0] == numbers[1]


async def test_one_gateway_looks_at_a_time(db: AsyncEngine) -> None:
    await open_account(db, grace_hours=0)
    invoicer = Invoicer(db, wall_clock=OCTOBER.timestamp)
    async with db.begin() as conn:
        await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(INVOICING)))
        await invoicer.look()
        assert await latest_invoice(conn, org_id=ORG) is None
    await invoicer.look()
    async with db.connect() as conn:
        assert await latest_invoice(conn, org_id=ORG) is not None
