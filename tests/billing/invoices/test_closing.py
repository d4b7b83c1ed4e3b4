"""From events to a final invoice: each event once, exact, rounded once, never changed again."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import BadInvoicing, InvoicingConflict, NoInvoice
from billing.events import Band, Price, PriceSet, Quantities
from billing.ingestion.settle_late import reprice_suspense
from billing.invoices.accounts import BillingTerms, account_of, add_rate, set_account
from billing.invoices.closing import close, finalize, recount
from billing.invoices.invoice import Invoice
from billing.pricing.price_book import PriceBook, PriceEntry
from billing.reconciliation.checks import check_invoices
from tests.billing.invoices.billed import (
    DECEMBER,
    JANUARY,
    NOVEMBER,
    OCTOBER,
    ORG,
    assert_books_agree,
    at,
    book,
    close_and_finalize,
    lines,
    open_account,
    receivable,
    tokens,
    used,
)
from tests.billing.samples import PRICES, an_attempt, an_event

CENT = 10**10


async def test_nothing_is_drafted_before_its_period_is_over(db: AsyncEngine) -> None:
    assert await close(db, org_id=ORG, now=DECEMBER) is None, "no account"
    await open_account(db)
    await book(db, used(at(2026, 11, 10)))
    assert await close(db, org_id=ORG, now=at(2026, 9, 30, 23, 59)) is None
    draft = await close(db, org_id=ORG, now=OCTOBER)
    assert draft is not None and (draft.state, draft.number) == ("draft", None)
    assert (draft.period_start, draft.period_end) == (at(2026, 9, 1), OCTOBER)
    assert await close(db, org_id=ORG, now=DECEMBER) is None, "one draft at a time"


async def test_an_invoice_is_the_sum_of_its_events(db: AsyncEngine) -> None:
    await open_account(db, timezone="America/New_York")
    here = at(2026, 9, 1, 4)
    await book(
        db,
        used(here),
        used(here - timedelta(seconds=1)),  # August still, there
        used(at(2026, 9, 20), project="proj_b"),
        used(at(2026, 10, 1, 3, 59, 59)),
        used(at(2026, 10, 1, 4)),  # October
        used(at(2026, 9, 5), org="org_b"),
    )
    august = await close_and_finalize(db, DECEMBER)
    assert (august.period_start, august.period_end) == (at(2026, 8, 1, 4), here)
    september = await close_and_finalize(db, DECEMBER)
    found = [
        (it.project, it.component, it.quantity, it.num_requests, it.exact_pico, it.pico_per_token)
        for it in await lines(db, september)
    ]
    assert found == [
        ("proj_a", "output", 40, 2, 40 * 400_000, 400_000),
        ("proj_a", "uncached_input", 200, 2, 200 * 100_000, 100_000),
        ("proj_b", "output", 20, 1, 20 * 400_000, 400_000),
        ("proj_b", "uncached_input", 100, 1, 100 * 100_000, 100_000),
    ]
    assert september.exact_pico == 3 * (20 * 400_000 + 100 * 100_000)
    await assert_books_agree(db)


async def test_an_hour_that_a_draft_covers_is_added_to_no_more(db: AsyncEngine) -> None:
    await open_account(db, timezone="Asia/Kathmandu")  # midnight is at a quarter past
    midnight = at(2026, 10, 31, 18, 15)
    moments = [midnight - timedelta(minutes=minutes) for minutes in (1, 30, 61)]
    await book(db, *(tokens(each, 1, 7) for each in moments))
    draft = await close(db, org_id=ORG, now=midnight)
    while draft is not None and draft.period_end < midnight:
        await finalize(db, org_id=ORG, invoice_id=draft.id, now=midnight)
        draft = await close(db, org_id=ORG, now=midnight)
    assert draft is not None and draft.exact_pico == 21
    await book(db, *(tokens(each, 1, 11) for each in moments), tokens(midnight, 1, 5))
    async with db.connect() as conn:
        kept = await conn.execute(sa.text("SELECT sum(output_pico) FROM usage_charges"))
        late = await conn.execute(sa.text("SELECT sum(output_pico) FROM usage_events WHERE late"))
        assert (kept.scalar_one(), late.scalar_one()) == (21 + 5, 33)
    final = await finalize(db, org_id=ORG, invoice_id=draft.id, now=midnight + timedelta(days=3))
    assert final.exact_pico == 21 + 33
    await assert_books_agree(db)


async def test_a_new_price_in_mid_period_is_a_line_of_its_own(db: AsyncEngine) -> None:
    await open_account(db)
    await book(db, tokens(at(2026, 9, 2), 3, 7), tokens(at(2026, 9, 9), 5, 11))
    invoice = await close_and_finalize(db, OCTOBER)
    found = [(it.price_id, it.quantity, it.exact_pico) for it in await lines(db, invoice)]
    assert found == [("p:11", 5, 55), ("p:7", 3, 21)]


async def test_a_request_of_another_size_band_is_on_its_line(db: AsyncEngine) -> None:
    await open_account(db)
    banded: PriceSet = {
        "uncached_input": Price("in", 10, (Band(100, "in:large", 20),)),
        "output": Price("out", 50, (Band(200, "out:large", 90),)),
    }
    small, middle, large = (used(at(2026, 9, 2), prices=banded) for _ in range(3))
    await book(
        db,
        msgspec.structs.replace(small, quantities=Quantities(uncached_input=99, output=1)),
        msgspec.structs.replace(middle, quantities=Quantities(uncached_input=199, output=2)),
        msgspec.structs.replace(large, quantities=Quantities(uncached_input=200, output=4)),
    )
    invoice = await close_and_finalize(db, OCTOBER)
    found = {it.price_id: (it.quantity, it.exact_pico) for it in await lines(db, invoice)}
    assert found == {
        "in": (99, 990), "in:large": (399, 7980), "out": (3, 150), "out:large": (4, 360),
    }  # fmt: skip
    await assert_books_agree(db)


async def test_there_is_no_gap_of_a_cent_between_ledger_and_invoice(db: AsyncEngine) -> None:
    """Each line is rounded, once; the ledger is put right by what that left, to the last pico."""
    await open_account(db)
    half, below = CENT // 2, CENT // 2 - 1
    await book(
        db,
        tokens(at(2026, 9, 2), 1, half, project="p1"),
        tokens(at(2026, 9, 3), 1, half, project="p2"),
        tokens(at(2026, 9, 3), 3, half, project="p3"),
        tokens(at(2026, 9, 4), 1, below, project="p4"),
    )
    invoice = await close_and_finalize(db, OCTOBER)
    found = [(it.amount_coins, it.residual_pico) for it in await lines(db, invoice)]
    assert found == [(1, -half), (1, -half), (2, -half), (0, below)]
    assert (invoice.total_coins, invoice.residual_pico) == (4, below - 3 * half)
    assert await receivable(db) == 4 * CENT
    await assert_books_agree(db)


async def test_late_events_wait_for_the_draft_and_then_join_the_next(db: AsyncEngine) -> None:
    await open_account(db)
    await book(db, used(at(2026, 9, 10)))
    draft = await close(db, org_id=ORG, now=OCTOBER)
    assert draft is not None
    await book(db, used(at(2026, 9, 30)), used(at(2026, 10, 1)))
    counted = await recount(db, org_id=ORG, invoice_id=draft.id)
    assert [it.num_requests for it in await lines(db, counted)] == [2, 2]
    september = await finalize(db, org_id=ORG, invoice_id=draft.id, now=at(2026, 10, 2))
    await book(db, used(at(2026, 9, 29)), used(at(2026, 8, 3)), used(at(2026, 10, 2)))
    october = await close_and_finalize(db, NOVEMBER)
    found = await lines(db, october)
    output = [it for it in found if it.component == "output"]
    assert [(it.kind, it.usage_start, it.num_requests) for it in output] == [
        ("late", at(1970, 1, 1), 1),  # before there was an account
        ("late", september.period_start, 1),
        ("usage", OCTOBER, 2),
    ]  # fmt: skip
    assert found[2].usage_end == september.period_end
    await assert_books_agree(db)


async def test_what_had_no_price_is_charged_when_it_gets_one(db: AsyncEngine) -> None:
    await open_account(db)
    await book(
        db,
        tokens(at(2026, 9, 5), 2, 5),
        an_event(an_attempt(prices={}, admitted_at=at(2026, 9, 6).timestamp())),
    )
    september = await close_and_finalize(db, OCTOBER)
    assert september.exact_pico == 10
    unpriced = [it for it in await lines(db, september) if it.price_id == ""]
    assert {it.component for it in unpriced} == {"uncached_input", "cache_read", "output"}
    assert all((it.exact_pico, it.pico_per_token) == (0, None) for it in unpriced)
    entry = PriceEntry(
        model="penny", valid_from=at(2026, 1, 1), valid_to=None, prices=PRICES, where="here"
    )
    assert await reprice_suspense(db, PriceBook([entry])) == 1
    october = await close_and_finalize(db, NOVEMBER)
    found = await lines(db, october)
    assert {(it.kind, it.usage_start) for it in found} == {("correction", september.period_start)}
    assert [(it.component, it.price_id, it.quantity, it.exact_pico) for it in found] == [
        ("cache_read", "", -16, 0),
        ("cache_read", "penny:cache_read:1", 16, 16 * 10_000),
        ("output", "", -20, 0),
        ("output", "penny:output:1", 20, 20 * 400_000),
        ("uncached_input", "", -100, 0),
        ("uncached_input", "penny:uncached_input:1", 100, 100 * 100_000),
    ]
    await assert_books_agree(db)


async def test_a_final_invoice_never_changes(db: AsyncEngine) -> None:
    await open_account(db)
    await book(db, used(at(2026, 9, 10)))
    invoice = await close_and_finalize(db, OCTOBER)
    again = await finalize(db, org_id=ORG, invoice_id=invoice.id, now=DECEMBER)
    assert again.finalized_at == invoice.finalized_at
    with pytest.raises(InvoicingConflict):
        await recount(db, org_id=ORG, invoice_id=invoice.id)
    for statement in (
        "UPDATE invoices SET total_coins = total_coins + 1, exact_pico = exact_pico + coin_pico",
        "UPDATE invoices SET state = 'draft'",
        "UPDATE invoices SET period_end = period_end + interval '1 day'",
        "DELETE FROM invoices",
        "TRUNCATE invoices CASCADE",
        "DELETE FROM invoice_lines",
        "UPDATE invoice_lines SET amount_coins = 0",
        "INSERT INTO invoice_lines"
        " SELECT (jsonb_populate_record(l, '{\"id\": \"x\", \"position\": 9}')).*"
        " FROM invoice_lines l WHERE position = 1",
        "UPDATE billing_accounts SET currency = 'EUR'",
        "INSERT INTO invoices SELECT (jsonb_populate_record(i, '{\"id\": \"x\", \"number\": \"x\","
        " \"sequence\": 9, \"period_start\": \"2026-09-30T23:00Z\"}')).* FROM invoices i",
    ):  # fmt: skip
        with pytest.raises(DBAPIError, match="stay|immutable|no_overlap"):
            async with db.begin() as conn:
                await conn.execute(sa.text(statement.replace(":", "\\:")))


async def test_numbers_have_no_gap_whoever_finalizes_and_whatever_is_rolled_back(
    db: AsyncEngine,
) -> None:
    orgs = [f"org_{number}" for number in range(8)]
    for org in orgs:
        await open_account(db, org, currency="EUR" if org in orgs[::3] else "USD")
    drafts = [await close(db, org_id=org, now=OCTOBER) for org in orgs]

    async def final(draft: Invoice | None) -> str | None:
        assert draft is not None
        try:
            done = await finalize(db, org_id=draft.org_id, invoice_id=draft.id, now=OCTOBER)
        except InvoicingConflict:  # no rate for the euro, or somebody else counts it
            return None
        return done.number

    numbers = await asyncio.gather(*(final(draft) for draft in drafts * 2))
    async with db.begin() as conn:
        await add_rate(conn, currency="EUR", usd_per_unit="1.1", valid_from=OCTOBER, source="test")
    numbers += await asyncio.gather(*(final(draft) for draft in drafts))
    expected = [f"TG-{number:06}" for number in range(1, 9)]
    assert sorted({number for number in numbers if number is not None}) == expected
    await assert_books_agree(db)


async def test_a_foreign_invoice_is_in_whole_coins_at_the_rate_of_its_periods_end(
    db: AsyncEngine,
) -> None:
    await open_account(db, currency="JPY", timezone="Asia/Tokyo")
    await book(db, tokens(at(2026, 9, 10), 1, 10**12))
    draft = await close(db, org_id=ORG, now=OCTOBER)
    assert draft is not None and draft.total_coins is None and draft.exact_pico == 10**12
    with pytest.raises(InvoicingConflict, match="no rate"):
        await finalize(db, org_id=ORG, invoice_id=draft.id, now=OCTOBER)
    rates = {at(2026, 9, 1): "0.0070", at(2026, 9, 30): "0.0066", OCTOBER: "0.0040"}
    async with db.begin() as conn:
        for valid_from, rate in rates.items():
            await add_rate(
                conn, currency="JPY", usd_per_unit=rate, valid_from=valid_from, source="bank"
            )
        with pytest.raises(InvoicingConflict):
            await add_rate(
                conn, currency="JPY", usd_per_unit="0.0050", valid_from=OCTOBER, source="bank"
            )
    invoice = await finalize(db, org_id=ORG, invoice_id=draft.id, now=OCTOBER)
    assert (invoice.coin_pico, invoice.rate_from) == (6_600_000_000, at(2026, 9, 30))
    assert (invoice.total_coins, invoice.residual_pico) == (152, 10**12 - 152 * 6_600_000_000)
    assert await receivable(db) == 152 * 6_600_000_000
    await assert_books_agree(db)


async def test_an_account_is_kept_with_its_history(db: AsyncEngine) -> None:
    await open_account(db)
    draft = await close(db, org_id=ORG, now=OCTOBER)
    assert draft is not None
    await open_account(db, timezone="Asia/Tokyo", billing_day=15, net_days=10)
    await open_account(db, timezone="Asia/Tokyo", billing_day=15, net_days=10)
    september = await finalize(db, org_id=ORG, invoice_id=draft.id, now=OCTOBER)
    assert september.due_at == at(2026, 11, 1), "by the terms that it was drafted by"
    october = await close_and_finalize(db, JANUARY)
    assert (october.period_start, october.period_end) == (OCTOBER, at(2026, 10, 14, 15))
    assert (september.account_version, october.account_version) == (1, 2)
    async with db.connect() as conn:
        first = await account_of(conn, ORG, version=1)
    assert first is not None and first.terms == BillingTerms()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("currency", "XAU"),
        ("currency", "ABC"),
        ("timezone", "Mars/Olympus"),
        ("billing_day", 0),
        ("net_days", 366),
        ("grace_hours", 721),
    ],
)
async def test_terms_are_refused_by_name(db: AsyncEngine, field: str, value: object) -> None:
    with pytest.raises(BadInvoicing) as refused:
        async with db.begin() as conn:
            await set_account(conn, org_id=ORG, terms=BillingTerms(**{field: value}))
    assert refused.value.param == field


async def test_another_orgs_invoice_is_not_there(db: AsyncEngine) -> None:
    await open_account(db)
    draft = await close(db, org_id=ORG, now=OCTOBER)
    assert draft is not None
    with pytest.raises(NoInvoice):
        await finalize(db, org_id="org_b", invoice_id=draft.id, now=OCTOBER)


async def test_the_proof_finds_a_charge_that_no_invoice_has(db: AsyncEngine) -> None:
    await open_account(db)
    await book(db, used(at(2026, 9, 10)))
    await close_and_finalize(db, OCTOBER)
    async with db.begin() as conn:
        # An event whose transfer says that it was booked before the cutoff, and was not.
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        await conn.execute(sa.text("UPDATE transfers SET amount_pico = amount_pico + 1"))
        await conn.execute(sa.text("UPDATE invoice_counters SET last = 7"))
    problems = await check_invoices(db)
    assert [problem.split(":")[0] for problem in problems] == [
        "org_a",
        "inv_org_a_20260901T0000",
        "TG invoice",
    ]
