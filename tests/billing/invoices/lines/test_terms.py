"""Terms that were agreed for a period stand on its invoice, and in the ledger."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections.rerating import ReratingScope, apply, plan
from billing.invoices.closing import close, finalize
from billing.ledger.price_sets import sync_price_book
from billing.pricing.price_book import PriceBook, PriceEntry
from tests.billing.invoices.billed import (
    NOVEMBER,
    OCTOBER,
    ORG,
    assert_books_agree,
    at,
    book,
    close_and_finalize,
    lines,
    open_account,
    priced,
    receivable,
    tokens,
)

CENT = 10**10
TERMS = """
[[free_allowance]]
price_list = "acme"
model = "penny"
component = "output"
quantity = 10
valid_from = "2026-01-01"
[[tiered_price]]
price_list = "acme"
kind = "graduated"
model = "a:b"
component = "output"
steps = [{ up_to = 5, price = "10000" }, { price = "20000" }]
valid_from = "2026-01-01"
[[commitment]]
price_list = "acme"
amount = "1"
percent = 10
valid_from = "2026-10-01"
[[free_allowance]]
price_list = "default"
quantity = 1_000_000
valid_from = "2026-01-01"
"""


async def agree(db: AsyncEngine, folder: Path, terms: str, timezone: str = "UTC") -> None:
    (folder / "book.toml").write_text(terms)
    await sync_price_book(db, PriceBook.load([folder]))
    await open_account(db, timezone=timezone)
    async with db.begin() as conn:
        await conn.execute(sa.text("INSERT INTO plans (name, price_list) VALUES ('g', 'acme')"))
        await conn.execute(sa.text("UPDATE orgs SET plan = 'g' WHERE id = :org"), {"org": ORG})


async def test_the_terms_of_the_orgs_list_are_lines_that_are_posted(
    db: AsyncEngine, tmp_path: Path
) -> None:
    await agree(db, tmp_path, TERMS)
    await book(
        db,
        tokens(at(2026, 9, 2), 25, CENT),
        tokens(at(2026, 9, 3), 8, CENT, model="a:b"),
        tokens(at(2026, 10, 2), 30, CENT),
    )
    september = await close_and_finalize(db, OCTOBER)
    found = [
        (it.component, it.model, it.price_id, it.quantity, it.exact_pico)
        for it in await lines(db, september)
        if it.kind == "adjustment"
    ]
    since = "2026-01-01T00:00:00Z"
    assert found == [
        ("free_allowance", "penny", f"acme:free_allowance:penny:*:output:{since}", 10, -10 * CENT),
        ("graduated", "a:b", f"acme:tiered_price:a:b:*:output:{since}", 8, 3 * CENT),
    ]
    assert september.total_coins == 25 - 10 + 8 + 3
    assert await receivable(db) == (26 + 30) * CENT, "as the ledger has it"
    await assert_books_agree(db)
    october = await close_and_finalize(db, NOVEMBER)
    shortfall = [it.exact_pico for it in await lines(db, october) if it.component == "shortfall"]
    assert (shortfall, october.total_coins) == ([80 * CENT], 100), "10 of 30 are free, 100 are due"
    await assert_books_agree(db)


FREE = """
[[free_allowance]]
price_list = "acme"
component = "output"
quantity = 20
valid_from = "2026-01-01"
[[free_allowance]]
price_list = "acme"
model = "a"
quantity = 3
valid_from = "2026-01-01"
[[tiered_price]]
price_list = "acme"
kind = "graduated"
component = "output"
steps = [{ up_to = 4, price = "10000" }, { price = "20000" }]
valid_from = "2026-01-01"
"""


@pytest.mark.parametrize(
    "apart", [timedelta(days=3), timedelta(minutes=3), timedelta(milliseconds=3), timedelta(0)]
)
async def test_what_is_free_is_what_was_used_first(
    db: AsyncEngine, tmp_path: Path, apart: timedelta
) -> None:
    await agree(db, tmp_path, FREE)
    start = at(2026, 9, 2, 10, 59, 59)
    used = [("z", 2), ("a", 7), ("z", 3), ("a", 9)]  # the model and the cents of a token
    events = [
        tokens(start + number * apart, 8, cents * CENT, model=model, project=f"p{9 - number}")
        for number, (model, cents) in enumerate(used)
    ]
    if not apart:  # of one moment those with the lower id come first
        by_id = sorted(range(len(events)), key=lambda number: events[number].id)
        used = [used[number] for number in by_id]
    await book(db, *reversed(events[:3]))
    draft = await close(db, org_id=ORG, now=OCTOBER)
    assert draft is not None
    await book(db, events[3])  # late, and in its place all the same
    final = await finalize(db, org_id=ORG, invoice_id=draft.id, now=NOVEMBER)
    units = [each for each in used for _ in range(8)]
    first, rest = units[:20], units[20:]
    of_a = [each for each in rest if each[0] == "a"]
    left = len(rest) - len(of_a[:3])
    booked = sum(cents for _, cents in rest) - sum(cents for _, cents in of_a[:3])
    adjusted = [
        (it.component, it.quantity, it.exact_pico // CENT)
        for it in await lines(db, final)
        if it.kind == "adjustment"
    ]
    expected = [
        ("free_allowance", 20, -sum(cents for _, cents in first)),
        ("free_allowance", len(of_a[:3]), -sum(cents for _, cents in of_a[:3])),
        ("graduated", left, min(left, 4) + 2 * max(0, left - 4) - booked),
    ]
    assert adjusted == [each for each in expected if each[2]], "what changes nothing is no line"
    await assert_books_agree(db)


@pytest.mark.parametrize("free", [20, 30])
async def test_what_was_rated_anew_is_free_as_it_costs_now_in_an_hour_cut_by_midnight(
    db: AsyncEngine, tmp_path: Path, free: int
) -> None:
    terms = FREE.split("[[")[1].replace("20\n", f"{free}\n", 1)
    await agree(db, tmp_path, "[[" + terms, "Asia/Kathmandu")
    midnight = at(2026, 8, 31, 18, 15)  # of the first of September
    starts = [midnight + timedelta(minutes=minutes) for minutes in (-2, 1, 2, 5, 90)]
    models = ("z", "z", "b", "a", "a")
    await book(
        db,
        *(
            tokens(start, 8, 2 * CENT, model=model)
            for start, model in zip(starts, models, strict=True)
        ),
    )
    dear = PriceEntry(
        model="b", valid_from=at(2026, 1, 1), valid_to=None, prices=priced(7 * CENT), where="here"
    )
    anew, span = PriceBook([dear]), ReratingScope(org_id=ORG, start=midnight, end=OCTOBER)
    await apply(db, span, anew, (await plan(db, span, anew)).digest)
    august = await close_and_finalize(db, at(2026, 9, 30))
    assert [it.quantity for it in await lines(db, august)] == [8, 8], "all of it is free"
    final = await close_and_finalize(db, OCTOBER)
    (back,) = [it for it in await lines(db, final) if it.kind == "adjustment"]
    assert back.exact_pico == -(8 * 2 + 8 * 7 + (free - 16) * 2) * CENT
    await assert_books_agree(db)
