"""What was agreed for a period stands on its invoice, and in the ledger."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.price_book import PriceBook
from billing.price_sync import sync_price_book

from .billed import (
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


async def test_the_terms_of_the_orgs_list_are_lines_that_are_posted(
    db: AsyncEngine, tmp_path: Path
) -> None:
    (tmp_path / "book.toml").write_text(TERMS)
    await sync_price_book(db, PriceBook.load([tmp_path]))
    await open_account(db)
    async with db.begin() as conn:
        await conn.execute(sa.text("INSERT INTO plans (name, price_list) VALUES ('g', 'acme')"))
        await conn.execute(sa.text("UPDATE orgs SET plan = 'g' WHERE id = :org"), {"org": ORG})
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
