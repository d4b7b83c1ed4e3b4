"""From a line of an invoice down to its hours and its requests: what is there comes to the line,
also where a part of a request was paid back because the cache had not kept it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
import sqlalchemy as sa
from msgspec import UNSET, UnsetType
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.cache_contracts import Ttl
from billing.corrections.cache_leases import Lease, end, grant, sweep
from billing.corrections.rerating import ReratingScope, apply, plan
from billing.events import Band, Price, PriceSet, Quantities, Tags, UsageEvent
from billing.invoices.documents.document import read_bill
from billing.invoices.documents.drilldown import requests_of
from billing.invoices.documents.usage_by_tag import read_tagged, write_tagged
from billing.invoices.invoice import Invoice
from billing.pricing.price_book import PriceBook, PriceEntry
from billing.reconciliation.checks import check_invoices
from tests.billing.invoices.billed import (
    NOVEMBER,
    OCTOBER,
    ORG,
    assert_books_agree,
    assert_leads_down,
    at,
    book,
    close_and_finalize,
    lines,
    open_account,
)
from tests.billing.invoices.lines.test_terms import agree
from tests.billing.samples import an_attempt, an_event

SEPTEMBER = at(2026, 9, 1)
LARGE = 500
"""From so much input on another price."""
PRICES: PriceSet = {
    "uncached_input": Price("in", 100, (Band(LARGE, "in:large", 110),)),
    "cache_write_5m": Price("write", 125, (Band(LARGE, "write:large", 140),)),
    "cache_write_1h": Price("write_1h", 200),
}
FREE = """
[[free_allowance]]
price_list = "acme"
component = "uncached_input"
quantity = 3
valid_from = "2026-01-01"
"""
Told = tuple[str, str, int, int]


def wrote(moment: datetime, *, uncached: int = 0, short: int = 0, long: int = 0) -> UsageEvent:
    """Tokens that were to be kept for five minutes, and for an hour."""
    used = Quantities(uncached_input=uncached, cache_write_5m=short, cache_write_1h=long)
    return an_event(an_attempt(prices=PRICES, admitted_at=moment.timestamp()), used)


async def lose(db: AsyncEngine, event: UsageEvent, num_tokens: int, ttl: Ttl = "5m") -> None:
    """So many of what it wrote are not kept, and that is paid back."""
    lease_id, now = f"{event.id}:{uuid4()}", event.occurred_at
    lease = Lease(
        id=lease_id,
        org_id=ORG,
        event_id=event.id,
        model="penny",
        engine="here",
        engine_id="engine-1",
        ttl=ttl,
        num_tokens=num_tokens,
        end_tokens=num_tokens,
        prefix=lease_id.encode(),
        granted_at=now,
        asked_at=now,
    )
    await grant(db, lease)
    await end(db, lease_id, event.id, is_broken=True)
    await sweep(db, [])


async def rate_anew(db: AsyncEngine, prices: PriceSet) -> None:
    entry = PriceEntry(
        model="penny", valid_from=at(2026, 1, 1), valid_to=None, prices=prices, where="here"
    )
    book = PriceBook([entry])
    span = ReratingScope(org_id=ORG, start=SEPTEMBER, end=NOVEMBER)
    await apply(db, span, book, (await plan(db, span, book)).digest)


async def told(db: AsyncEngine, invoice: Invoice) -> Sequence[Told]:
    found = await lines(db, invoice)
    return [(it.kind, it.price_id, it.quantity, it.exact_pico) for it in found]


async def test_calls_of_tools_are_on_a_final_invoice_whose_line_leads_to_each(
    db: AsyncEngine,
) -> None:
    """Beside tokens, on a line of their server."""
    await open_account(db)
    price: PriceSet = {"tool_call": Price("call", 20_000_000_000)}
    calls = [
        an_event(
            an_attempt(model="mcp/maps", prices=price, admitted_at=at(2026, 9, day).timestamp()),
            Quantities(tool_call=1),
        )
        for day in (3, 3, 17)
    ]
    await book(db, *calls, wrote(at(2026, 9, 3), uncached=10))
    invoice = await close_and_finalize(db, OCTOBER)
    assert invoice.state == "finalized"
    (line,) = (each for each in await lines(db, invoice) if each.component == "tool_call")
    assert (line.model, line.quantity) == ("mcp/maps", 3)
    async with db.connect() as conn:
        found = (await conn.execute(requests_of(invoice, line))).all()
    assert {row.id for row in found} == {call.id for call in calls}
    assert sum(row.amount_pico for row in found) == line.exact_pico == 60_000_000_000
    await assert_leads_down(db, invoice)
    await assert_books_agree(db)


async def test_what_was_kept_in_part_is_on_the_lines_of_both_of_its_prices(
    db: AsyncEngine,
) -> None:
    await open_account(db)
    event = wrote(at(2026, 9, 20), uncached=5, short=100)
    await book(db, event, wrote(at(2026, 9, 20), short=64), wrote(at(2026, 9, 21, 5), short=36))
    await lose(db, event, 48)
    invoice = await close_and_finalize(db, OCTOBER)
    assert await told(db, invoice) == [
        ("usage", "in", 48, 4800), ("usage", "write", 152, 19_000), ("usage", "in", 5, 500),
    ]  # fmt: skip
    await assert_leads_down(db, invoice)
    await assert_books_agree(db)


async def test_what_is_paid_back_in_parts_after_the_invoice_is_corrected_in_parts(
    db: AsyncEngine,
) -> None:
    """A request of the larger band is paid back by both ttls, and at last for all that it wrote."""
    await open_account(db)
    event = wrote(at(2026, 9, 20), short=300, long=200)
    await book(db, event)
    await lose(db, event, 100)
    september = await close_and_finalize(db, OCTOBER)
    assert await told(db, september) == [
        ("usage", "write_1h", 200, 40_000),
        ("usage", "in:large", 100, 11_000),
        ("usage", "write:large", 200, 28_000),
    ]
    await lose(db, event, 200)
    await lose(db, event, 50, "1h")
    october = await close_and_finalize(db, NOVEMBER)
    assert await told(db, october) == [
        ("correction", "in:large", 50, 5500),
        ("correction", "write_1h", -50, -10_000),
        ("correction", "in:large", 200, 22_000),
        ("correction", "write:large", -200, -28_000),
    ]
    for invoice in (september, october):
        await assert_leads_down(db, invoice)
    await assert_books_agree(db)


@pytest.mark.parametrize("lost", [40, 100])
async def test_a_refund_outlives_another_price_and_the_invoice_says_both(
    db: AsyncEngine, lost: int
) -> None:
    await open_account(db)
    event = wrote(at(2026, 9, 20), short=100)
    await book(db, event)
    await lose(db, event, lost)
    september = await close_and_finalize(db, OCTOBER)
    dearer: PriceSet = {
        "uncached_input": Price("in:2", 103), "cache_write_5m": Price("write:2", 130),
    }  # fmt: skip
    await rate_anew(db, dearer)
    october = await close_and_finalize(db, NOVEMBER)
    kept = 100 - lost
    assert [each for each in await told(db, october) if each[2]] == [
        each for each in [
            ("correction", "in", -lost, -100 * lost),
            ("correction", "in:2", lost, 103 * lost),
            ("correction", "write", -kept, -125 * kept),
            ("correction", "write:2", kept, 130 * kept),
        ] if each[2]
    ]  # fmt: skip
    for invoice in (september, october):
        await assert_leads_down(db, invoice)
    await assert_books_agree(db)


async def test_what_requests_were_tagged_with_comes_to_the_lines(
    db: AsyncEngine, tmp_path: Path
) -> None:
    """Nothing of a request of two tags counts twice; what had none, or no request, is there too."""
    await agree(db, tmp_path, FREE)
    of_both = {"team": "search", "env": "prod"}
    events = [
        tagged(wrote(at(2026, 9, 20), uncached=5, short=100), tags)
        for tags in (of_both, {"team": "search"}, {"team": "search"}, UNSET)
    ]
    await book(db, *events)
    await lose(db, events[0], 48)
    invoice = await close_and_finalize(db, OCTOBER)
    await assert_leads_down(db, invoice)
    rows = await exported(db, invoice)
    assert sum(Decimal(row["exact_usd"]) for row in rows) * 10**12 == invoice.exact_pico
    allowance = "acme:free_allowance:*:*:uncached_input:2026-01-01T00:00:00Z"
    one, both = '{"team":"search"}', '{"env":"prod","team":"search"}'
    assert {(it["component"], it["price_id"], it["tags"]): it["quantity"] for it in rows} == {
        ("cache_write_5m", "in", both): "48",
        ("cache_write_5m", "write", both): "52",
        ("cache_write_5m", "write", one): "200",
        ("cache_write_5m", "write", "{}"): "100",
        ("uncached_input", "in", both): "5",
        ("uncached_input", "in", one): "10",
        ("uncached_input", "in", "{}"): "5",
        ("free_allowance", allowance, "{}"): "3",
    }
    await rate_anew(db, {**PRICES, "uncached_input": Price("in:2", 101)})
    october = await close_and_finalize(db, NOVEMBER)
    await assert_leads_down(db, october)
    corrected = await exported(db, october)
    assert {row["tags"] for row in corrected} == {one, both, "{}"}
    exact = sum(Decimal(row["exact_usd"]) for row in corrected)
    assert exact * 10**12 == october.exact_pico


def tagged(event: UsageEvent, tags: Tags | UnsetType) -> UsageEvent:
    attempt = msgspec.structs.replace(event.attempt, tags=tags)
    return msgspec.structs.replace(event, attempt=attempt)


async def exported(db: AsyncEngine, invoice: Invoice) -> list[dict[str, str]]:
    async with db.connect() as conn:
        bill = await read_bill(conn, org_id=invoice.org_id, invoice_id=invoice.id)
    file = io.BytesIO()
    write_tagged(bill, [page async for page in read_tagged(db, bill)], file)
    return list(csv.DictReader(io.StringIO(file.getvalue().decode(), newline="")))


async def test_the_proof_finds_a_line_that_is_not_its_price_times_its_quantity(
    db: AsyncEngine,
) -> None:
    await open_account(db)
    await book(db, wrote(at(2026, 9, 20), uncached=5))
    invoice = await close_and_finalize(db, OCTOBER)
    async with db.begin() as conn:
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        await conn.execute(sa.text("UPDATE invoice_lines SET quantity = quantity + 1"))
    [line] = await lines(db, invoice)
    assert await check_invoices(db) == [
        f"{line.id}: its price times its quantity is not its exact amount"
    ]
