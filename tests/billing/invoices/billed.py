"""An org with a billing account, and usage of it at moments that are easy to read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Price, PriceSet, Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from billing.invoices.accounts import BillingTerms, set_account
from billing.invoices.closing import close, finalize
from billing.invoices.documents.drilldown import has_requests, hours_of, requests_of, tags_of
from billing.invoices.invoice import Invoice, InvoiceLine, get_lines
from billing.reconciliation.checks import check_invoices, check_ledger
from tests.billing.samples import PRICES, an_attempt, an_event

ORG = "org_a"
COUNTED = ("quantity", "amount_pico")
ACCOUNT_MADE = datetime(2026, 9, 1, tzinfo=UTC)


def at(*parts: int) -> datetime:
    """UTC."""
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type,misc]


OCTOBER, NOVEMBER, DECEMBER, JANUARY = (
    at(2026, 10, 1),
    at(2026, 11, 1),
    at(2026, 12, 1),
    at(2027, 1, 1),
)


async def open_account(
    db: AsyncEngine, org: str = ORG, *, now: datetime = ACCOUNT_MADE, **terms: Any
) -> None:
    async with db.begin() as conn:
        known = sa.text("INSERT INTO orgs (id, name) VALUES (:org, :org) ON CONFLICT DO NOTHING")
        await conn.execute(known, {"org": org})
        await set_account(conn, org_id=org, terms=BillingTerms(**terms), now=now)


def used(
    moment: datetime, *, org: str = ORG, output: int = 20, prices: PriceSet = PRICES, **names: str
) -> UsageEvent:
    attempt = an_attempt(org=org, admitted_at=moment.timestamp(), prices=prices, **names)
    return an_event(attempt, Quantities(uncached_input=100, output=output))


def priced(pico: int) -> PriceSet:
    """A token of output for so much, and nothing else has a price."""
    return {"output": Price(f"p:{pico}", pico)}


def tokens(moment: datetime, count: int, pico: int, **names: str) -> UsageEvent:
    """So many at that price."""
    attempt = an_attempt(admitted_at=moment.timestamp(), prices=priced(pico), **names)
    return an_event(attempt, Quantities(output=count))


async def book(db: AsyncEngine, *events: UsageEvent) -> None:
    assert (await ingest(db, events)).inserted == len(events)


async def close_and_finalize(db: AsyncEngine, now: datetime, org: str = ORG) -> Invoice:
    draft = await close(db, org_id=org, now=now)
    assert draft is not None
    return await finalize(db, org_id=org, invoice_id=draft.id, now=now + timedelta(hours=24))


async def lines(db: AsyncEngine, invoice: Invoice) -> list[InvoiceLine]:
    async with db.connect() as conn:
        return await get_lines(conn, org_id=invoice.org_id, invoice_id=invoice.id)


async def assert_leads_down(db: AsyncEngine, invoice: Invoice) -> None:
    """The hours behind each line come to it, exactly, and so do its requests, and their tags."""
    for line in await lines(db, invoice):
        if not has_requests(line):
            continue
        async with db.connect() as conn:
            requests = (await conn.execute(requests_of(invoice, line))).all()
            hours = (await conn.execute(hours_of(invoice, line))).all()
            tagged = (await conn.execute(tags_of(invoice, line))).all()
        for found in (requests, hours, tagged):
            came_to = [sum(int(it._mapping[name]) for it in found) for name in COUNTED]
            assert came_to == [line.quantity, line.exact_pico], line
        assert len({it.id for it in requests}) == len(requests)
        counts = [sum(it.num_requests for it in hours), len(requests)]
        if line.kind != "correction":  # what is taken back of a request counts against it
            assert counts == [line.num_requests] * 2, line


async def receivable(db: AsyncEngine, org: str = ORG) -> int:
    """Return what the ledger has the org owe, in pico-USD."""
    async with db.connect() as conn:
        query = sa.text("SELECT debits_pico - credits_pico FROM balances WHERE account = :id")
        return int(await conn.scalar(query, {"id": f"receivable:{org}"}) or 0)


async def assert_books_agree(db: AsyncEngine) -> None:
    assert await check_ledger(db) == []
    assert await check_invoices(db) == []
