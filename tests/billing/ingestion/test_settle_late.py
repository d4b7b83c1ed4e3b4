"""Usage that could not be booked in full at first is put right later, once, and balances."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing.events import Price, Quantities, failover_waste_id, stop_waste_id
from billing.ingestion import settle_late as reconcile
from billing.ingestion.ingest import ingest
from billing.ingestion.settle_late import (
    house_attempt,
    post_waste,
    reprice_suspense,
    settle_late,
    settle_orphan,
)
from billing.pricing.price_book import PriceBook
from billing.reconciliation.checks import check_ledger
from tests.billing.ingestion.test_ingest import balances, rows
from tests.billing.samples import NOON, PRICES, an_attempt, an_event

UUID7 = "019a9c1e-5e80-7000-8000-000000000001"
UNBILLED = Quantities(uncached_input=100, cache_read=16, output=50)


@pytest.fixture
def book(tmp_path: Path) -> PriceBook:
    (tmp_path / "book.toml").write_text(
        '[[price]]\nmodel = "new"\nvalid_from = 2026-11-01\noutput = 2\nuncached_input = 1\n'
        '[[price]]\nmodel = "penny"\nvalid_from = 2025-11-01\noutput = 0.40\n'
    )
    return PriceBook.load([tmp_path])


async def test_what_was_generated_and_not_billed_is_waste(db: AsyncEngine) -> None:
    event = an_event(finish="recovered")
    assert await post_waste(db, event.id, UNBILLED) is None
    await ingest(db, [event])
    for _ in range(2):
        assert await post_waste(db, event.id, UNBILLED) == Quantities(output=30)
    assert (await balances(db))["house:waste"] == (30 * 400_000, 0)
    assert (await balances(db))["receivable:org_a"] == (18_160_000, 0)
    [waste] = await rows(db, "SELECT * FROM usage_events WHERE kind = 'waste'")
    assert (waste.org, waste.output, waste.admitted_at.timestamp()) == ("org_a", 30, NOON)
    assert await check_ledger(db) == []


async def test_an_attempt_recovered_without_a_checkpoint_is_wasted_whole(db: AsyncEngine) -> None:
    event = an_event(quantities=Quantities(), finish="recovered")
    await ingest(db, [event])
    assert await post_waste(db, event.id, UNBILLED) == UNBILLED
    amount = 100 * 100_000 + 16 * 10_000 + 50 * 400_000
    assert (await balances(db))["house:waste"] == (amount, 0)


async def test_a_complete_bill_leaves_no_waste(db: AsyncEngine) -> None:
    event = an_event()
    await ingest(db, [event])
    assert await post_waste(db, event.id, event.quantities) == Quantities()
    assert len(await rows(db, "SELECT * FROM usage_events")) == 1


async def test_what_lies_behind_a_stop_string_is_not_wasted_twice(db: AsyncEngine) -> None:
    event = an_event()
    behind = an_event(an_attempt(stop_waste_id(event.id)), Quantities(output=4), kind="waste")
    await ingest(db, [event, behind])
    generated = Quantities(uncached_input=100, cache_read=16, output=25)
    assert await post_waste(db, event.id, generated) == Quantities(output=1)


async def test_what_was_computed_again_is_not_wasted_twice(db: AsyncEngine) -> None:
    """An attempt that goes on bills no prompt: its own reading of that is the house's."""
    event = an_event(quantities=Quantities(output=5))
    again = Quantities(uncached_input=30, cache_read=16)
    waste = an_event(an_attempt(failover_waste_id(event.id)), again, kind="waste")
    await ingest(db, [event, waste])
    generated = Quantities(uncached_input=30, cache_read=16, output=7)
    assert await post_waste(db, event.id, generated) == Quantities(output=2)


async def test_billing_more_than_was_generated_is_an_alarm(
    db: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    event = an_event()
    await ingest(db, [event])
    found = await post_waste(db, event.id, Quantities(uncached_input=100, cache_read=17, output=5))
    assert found == Quantities(cache_read=1)
    assert f"attempt {event.id}: 15 output over-billed" in caplog.text


async def test_an_orphan_waits_for_its_event(db: AsyncEngine, book: PriceBook) -> None:
    event = an_event(an_attempt(UUID7), finish="recovered")

    async def arrive() -> None:
        await asyncio.sleep(0.1)
        await ingest(db, [event])

    arriving = asyncio.create_task(arrive())
    settled = await settle_orphan(db, UUID7, UNBILLED, model="penny", book=book, wait_s=5.0)
    assert settled == Quantities(output=30)
    await arriving


async def test_an_orphan_without_an_event_is_the_houses(
    db: AsyncEngine, book: PriceBook, caplog: pytest.LogCaptureFixture
) -> None:
    generated = Quantities(output=7)
    for _ in range(2):
        settled = await settle_orphan(db, UUID7, generated, model="penny", book=book, wait_s=0.05)
        assert settled == generated
    assert f"no event for attempt {UUID7}" in caplog.text
    assert await balances(db) == {
        "house:waste": (7 * 400_000, 0),
        "house:production": (0, 7 * 400_000),
    }
    attempt = house_attempt(UUID7, "penny", book)
    assert (attempt.org, attempt.admitted_at) == ("house", 0x019A9C1E5E80 / 1000)
    assert await check_ledger(db) == []


async def test_an_event_that_comes_later_than_that_is_not_wasted_twice(
    db: AsyncEngine, book: PriceBook
) -> None:
    """Some of the orphan's tokens had no price when nobody's waste was booked."""
    await settle_orphan(db, UUID7, UNBILLED, model="penny", book=book, wait_s=0)
    assert (await balances(db))["house:waste"] == (50 * 400_000, 0)
    event = an_event(an_attempt(UUID7), finish="recovered")
    await ingest(db, [event])
    for _ in range(2):
        await settle_late(db, [event, an_event()])
        settled = await settle_orphan(db, UUID7, UNBILLED, model="penny", book=book, wait_s=0)
        assert settled == Quantities(output=30)
    found = await balances(db)
    assert found["house:waste"] == (80 * 400_000, 50 * 400_000), "30 of 80, once"
    assert found["house:production"] == (50 * 400_000, 80 * 400_000)
    assert found["receivable:org_a"] == (18_160_000, 0)
    assert await reprice_suspense(db, book) == 0
    assert await check_ledger(db) == []


async def test_waste_that_was_repriced_is_reversed_too(
    db: AsyncEngine, book: PriceBook, tmp_path: Path
) -> None:
    await settle_orphan(db, UUID7, UNBILLED, model="penny", book=book, wait_s=0)
    (tmp_path / "later.toml").write_text(
        '[[price]]\nmodel = "penny"\nvalid_from = 2025-11-01\nuncached_input = 1\n'
        "cache_read = 1\noutput = 0.40\n"
    )
    (tmp_path / "book.toml").unlink()
    assert await reprice_suspense(db, PriceBook.load([tmp_path])) == 1
    debits, credits = (await balances(db))["house:waste"]
    assert (debits, credits) == (116 * 1_000_000 + 50 * 400_000, 0)
    event = an_event(an_attempt(UUID7), UNBILLED, kind="waste")
    await ingest(db, [event])
    await settle_late(db, [event])
    own = 100 * 100_000 + 16 * 10_000 + 50 * 400_000
    assert (await balances(db))["house:waste"] == (debits + own, debits)
    assert await check_ledger(db) == []


async def test_an_event_and_nobodys_waste_that_are_booked_at_once_see_each_other(
    db: AsyncEngine, book: PriceBook
) -> None:
    ids = [UUID7[:-1] + f"{number:x}" for number in range(8)]

    async def arrive(attempt_id: str) -> None:
        event = an_event(an_attempt(attempt_id), finish="recovered")
        await ingest(db, [event])
        await settle_late(db, [event])

    orphans = (
        settle_orphan(db, each, UNBILLED, model="penny", book=book, wait_s=0) for each in ids
    )
    await asyncio.gather(*orphans, *(arrive(each) for each in ids))
    debits, credits = (await balances(db))["house:waste"]
    assert debits - credits == 8 * 30 * 400_000
    assert await check_ledger(db) == []


async def test_events_that_are_in_time_are_not_looked_up() -> None:
    nowhere = create_async_engine("postgresql+asyncpg://nobody@/none?host=/nonexistent")
    await settle_late(nowhere, [an_event(an_attempt(admitted_at=time.time()))])
    await nowhere.dispose()


async def test_nobodys_waste_stays_while_the_event_is_not_booked(
    db: AsyncEngine, book: PriceBook
) -> None:
    """It may be in quarantine."""
    await settle_orphan(db, UUID7, UNBILLED, model="penny", book=book, wait_s=0)
    await settle_late(db, [an_event(an_attempt(UUID7))])
    assert (await balances(db))["house:waste"] == (50 * 400_000, 0)


async def test_suspense_is_posted_once_when_a_price_is_there(
    db: AsyncEngine, book: PriceBook
) -> None:
    quantities = Quantities(uncached_input=10, output=3)
    known = {"uncached_input": Price("new:uncached_input:0", 5_000_000)}
    events = [
        an_event(an_attempt(model="new", prices={}), quantities),
        an_event(an_attempt(model="new", prices=known), quantities),  # half of it was booked
        an_event(an_attempt(model="new", prices={}), quantities, kind="waste"),
        an_event(an_attempt(model="unknown", prices={}), quantities),
        an_event(an_attempt(model="new", prices={}, admitted_at=NOON - 90 * 86400), quantities),
        an_event(an_attempt(prices=PRICES), quantities),
    ]
    await ingest(db, events)
    found = await asyncio.gather(*(reprice_suspense(db, book) for _ in range(3)))
    assert sum(found) == 3
    assert await reprice_suspense(db, book) == 0
    after = await balances(db)
    priced = 10 * 1_000_000 + 3 * 2_000_000
    assert after["revenue:new"] == (0, 10 * 5_000_000 + priced + 3 * 2_000_000)
    assert after["house:waste"] == (priced, 0)
    corrections = await rows(db, "SELECT corrects FROM transfers WHERE kind = 'repriced'")
    assert {row.corrects for row in corrections} == {f"{event.id}.suspense" for event in events[:3]}
    hours = sa.text("SELECT sum(num_requests), sum(output) FROM usage_hourly")
    async with db.connect() as connection:
        assert (await connection.execute(hours)).one() == (5, 15)
    assert await check_ledger(db) == []


async def test_suspense_is_worked_off_in_pages(
    db: AsyncEngine, book: PriceBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "REPRICE_BATCH", 3)
    for model in ("unknown", "new"):
        attempts = [an_attempt(model=model, prices={}) for _ in range(7)]
        await ingest(db, [an_event(each, Quantities(output=1)) for each in attempts])
    assert await reprice_suspense(db, book) == 7
    assert (await balances(db))["revenue:new"] == (0, 14_000_000)
    assert await check_ledger(db) == []
