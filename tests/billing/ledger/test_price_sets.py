"""Prices in Postgres: ranges that cannot overlap, and nothing loaded ever changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import PriceChanged
from billing.ledger.price_sets import sync_price_book
from billing.pricing.lists import KINDS
from billing.pricing.price_book import PriceBook

Write = Callable[[str], PriceBook]
FIRST = '[[price]]\nmodel = "m"\nvalid_from = 2026-11-01\noutput = 0.15\ncache_read = 0\n'
SECOND = '[[price]]\nmodel = "m"\nvalid_from = 2026-12-01\noutput = 0.30\n'


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> PriceBook:
        file = tmp_path / "book.toml"
        file.write_text(text)
        return PriceBook.load([file])

    return written


async def loaded(db: AsyncEngine) -> dict[str, tuple[int, bool]]:
    """price_id -> (pico per token, still open)"""
    async with db.connect() as connection:
        found = await connection.execute(
            sa.text("SELECT price_id, pico_per_token, upper_inf(valid) FROM prices")
        )
        return {row[0]: (row[1], row[2]) for row in found}


async def test_a_book_loads_once_and_grows(db: AsyncEngine, write: Write) -> None:
    assert await sync_price_book(db, write(FIRST)) == 2
    assert await sync_price_book(db, write(FIRST)) == 0
    assert await sync_price_book(db, write(FIRST + SECOND)) == 1
    assert await sync_price_book(db, write(FIRST + SECOND)) == 0
    assert await loaded(db) == {
        "m:output:2026-11-01T00:00:00Z": (150_000, False),
        "m:cache_read:2026-11-01T00:00:00Z": (0, False),
        "m:output:2026-12-01T00:00:00Z": (300_000, True),
    }


async def test_tiers_of_a_model_stand_beside_each_other(db: AsyncEngine, write: Write) -> None:
    dear = FIRST.replace('"m"', '"m"\ntier = "priority"').replace("0.15", "0.35")
    assert await sync_price_book(db, write(FIRST)) == 2
    assert await sync_price_book(db, write(FIRST + dear)) == 2
    assert await sync_price_book(db, write(FIRST + dear)) == 0
    assert await loaded(db) == {
        "m:output:2026-11-01T00:00:00Z": (150_000, True),
        "m:cache_read:2026-11-01T00:00:00Z": (0, True),
        "m:output:2026-11-01T00:00:00Z:priority": (350_000, True),
        "m:cache_read:2026-11-01T00:00:00Z:priority": (0, True),
    }


async def test_bands_of_a_component_stand_beside_each_other(db: AsyncEngine, write: Write) -> None:
    band = SECOND.replace('"m"', '"m"\nmin_total_input = 200_001')
    assert await sync_price_book(db, write(FIRST + band)) == 3
    assert await sync_price_book(db, write(FIRST + band)) == 0
    assert await sync_price_book(db, write(FIRST + band + SECOND)) == 1
    assert (await loaded(db))["m:output:2026-12-01T00:00:00Z:200001"] == (300_000, True)


async def test_the_shipped_book_loads_from_many_gateways_at_once(db: AsyncEngine) -> None:
    book = PriceBook.load()
    added = await asyncio.gather(*(sync_price_book(db, book) for _ in range(4)))
    assert sorted(added) == [0, 0, 0, 8]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (FIRST.replace("0.15", "0.16"), "was loaded as 150000, now reads 160000"),
        (FIRST.replace("output", 'valid_to = "2027-01-01"\noutput') + SECOND, None),
        (SECOND.replace("2026-12-01", "2026-10-01"), "overlaps one that was loaded before"),
        (SECOND, "overlaps one that was loaded before"),
    ],
)
async def test_a_price_that_was_loaded_cannot_change(
    db: AsyncEngine, write: Write, changed: str, message: str | None
) -> None:
    await sync_price_book(db, write(FIRST))
    before = await loaded(db)
    if message is None:
        with pytest.raises(Exception, match="overlaps the entry"):
            write(changed)
    else:
        with pytest.raises(PriceChanged, match=message):
            await sync_price_book(db, write(changed))
    assert await loaded(db) == before


async def test_a_closed_range_stays_closed(db: AsyncEngine, write: Write) -> None:
    await sync_price_book(db, write(FIRST + SECOND))
    with pytest.raises(PriceChanged, match="was loaded until 2026-12-01 .*, now reads open"):
        await sync_price_book(db, write(FIRST))


async def test_the_schema_itself_refuses_an_overlap(db: AsyncEngine, write: Write) -> None:
    await sync_price_book(db, write(FIRST))
    with pytest.raises(IntegrityError, match="prices_no_overlap"):
        async with db.begin() as connection:
            await connection.execute(
                sa.text(
                    "INSERT INTO prices SELECT 'x', key_id, 1, tstzrange('2026-12-24', NULL)"
                    " FROM prices LIMIT 1"
                )
            )


async def test_the_schema_itself_refuses_a_change(db: AsyncEngine, write: Write) -> None:
    await sync_price_book(db, write(FIRST))
    for change in (
        "UPDATE prices SET pico_per_token = 1",
        "UPDATE prices SET valid = tstzrange('2026-11-02', '2026-12-01')",
        "UPDATE prices SET valid = tstzrange('2026-11-01', '2026-12-01'), pico_per_token = 1",
        "UPDATE prices SET valid = valid",
        "DELETE FROM prices",
    ):
        with pytest.raises(DBAPIError, match="cannot change; add one with a later start"):
            async with db.begin() as connection:
                await connection.execute(sa.text(change))
    with pytest.raises(DBAPIError, match="is immutable"):
        async with db.begin() as connection:
            await connection.execute(sa.text("TRUNCATE prices"))


RULES = """
[[discount]]
price_list = "acme"
percent = 20
valid_from = 2026-11-10
[[free_allowance]]
price_list = "acme"
component = "output"
quantity = 5
valid_from = 2026-11-01
"""
MORE = RULES.split("[[free")[1].replace("5", "7", 1).replace("11-01", "12-01")


EVERY = """
[[tiered_price]]
price_list = "acme"
kind = "graduated"
model = "m"
component = "output"
steps = [{ up_to = 5, price = "1" }, { price = "2" }]
valid_from = 2026-11-01
[[tiered_price]]
price_list = "acme"
kind = "volume"
component = "cache_read"
steps = [{ price = "2" }]
valid_from = 2026-11-01
[[commitment]]
price_list = "acme"
amount = "100000000.00"
percent = 10
valid_from = 2026-11-01
"""


async def test_rules_of_every_kind_load_twice(db: AsyncEngine, write: Write) -> None:
    book = write(FIRST + RULES + EVERY)
    kinds = {rule.slot.split(":")[1] for rule in book.lists.rules}
    assert kinds == set(KINDS)
    assert await sync_price_book(db, book) > 0
    assert await sync_price_book(db, write(FIRST + RULES + EVERY)) == 0
    other = EVERY.replace("up_to = 5", "up_to = 6")
    with pytest.raises(PriceChanged, match="acme:tiered_price:m:.* was loaded as"):
        await sync_price_book(db, write(FIRST + RULES + other))


async def test_terms_load_once_and_grow_as_prices_do(db: AsyncEngine, write: Write) -> None:
    assert await sync_price_book(db, write(FIRST + RULES)) == 4 + 2
    assert await sync_price_book(db, write(FIRST + RULES)) == 0
    assert (await loaded(db))["m:output:2026-11-01T00:00:00Z@acme:2026-11-10T00:00:00Z"] == (
        120_000,
        True,
    )
    assert await sync_price_book(db, write(FIRST + RULES + "[[free" + MORE)) == 1
    async with db.connect() as connection:
        found = await connection.execute(
            sa.text("SELECT slot, content, upper_inf(valid) FROM price_rules ORDER BY rule_id")
        )
        assert [tuple(row) for row in found] == [
            ("acme:discount:*:*:*", {"discount_bps": 2000}, True),
            ("acme:free_allowance:*:*:output", {"quantity": 5}, False),
            ("acme:free_allowance:*:*:output", {"quantity": 7}, True),
        ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (RULES.replace("quantity = 5", "quantity = 6"), "now reads {'quantity': 6}; add an entry"),
        (RULES.replace("percent = 20", "percent = 30"), "was loaded as 120000, now"),
        (RULES.replace("11-01", "10-01"), "overlaps one that was loaded before"),
    ],
)
async def test_terms_that_were_loaded_cannot_change(
    db: AsyncEngine, write: Write, changed: str, message: str
) -> None:
    await sync_price_book(db, write(FIRST + RULES))
    with pytest.raises(PriceChanged, match=message):
        await sync_price_book(db, write(FIRST + changed))


async def test_the_schema_itself_keeps_terms_as_they_are(db: AsyncEngine, write: Write) -> None:
    await sync_price_book(db, write(FIRST + RULES))
    for statement, message in (
        ("UPDATE price_rules SET content = '{}'", "cannot change; add one"),
        ("UPDATE price_rules SET valid = valid", "cannot change; add one"),
        ("DELETE FROM price_rules", "cannot change; add one"),
        ("TRUNCATE price_rules", "is immutable"),
        (
            "INSERT INTO price_rules (rule_id, price_list, slot, content, valid)"
            " SELECT 'x', price_list, slot, content, tstzrange('2026-12-24', NULL)"
            " FROM price_rules LIMIT 1",
            "price_rules_no_overlap",
        ),
    ):
        with pytest.raises(DBAPIError, match=message):
            async with db.begin() as connection:
                await connection.execute(sa.text(statement))
