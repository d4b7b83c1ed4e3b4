"""Cache that was paid to be kept is kept, or paid back: once, in ledger, rollups and invoice."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.cache_contracts import Ttl
from billing.corrections.cache_leases import (
    LOST_AFTER,
    RECORDED_WITHIN,
    Lease,
    LeaseChange,
    LiveEngine,
    end,
    grant,
    note_writes,
    refund_id,
    sweep,
)
from billing.corrections.rerating import ReratingScope, apply, plan
from billing.events import Band, Price, PriceSet, Quantities
from billing.ingestion.ingest import ingest
from billing.ingestion.settle_late import reprice_suspense
from billing.ledger.spend_totals import spent_by_org
from billing.pricing.price_book import PriceBook, PriceEntry
from billing.pricing.rating import premium
from billing.reconciliation.agreement import Agreement, agree
from billing.reports.request_record import find_record
from tests.billing.invoices.billed import (
    NOVEMBER,
    OCTOBER,
    at,
    close_and_finalize,
    lines,
    open_account,
)
from tests.billing.samples import an_attempt, an_event

PRICES: PriceSet = {
    "uncached_input": Price("in", 100_000),
    "cache_read": Price("read", 10_000),
    "cache_write_5m": Price("write", 125_000),
    "cache_write_1h": Price("write_1h", 200_000),
    "output": Price("out", 400_000),
}
USED = Quantities(uncached_input=100, cache_write_5m=1600, cache_write_1h=1024, output=1)
WHOLE = 100 * 100_000 + 1600 * 125_000 + 1024 * 200_000 + 400_000
PREMIUM_5M, PREMIUM_1H = 1600 * 25_000, 1024 * 100_000
EVENT = "019aa0c5-0000-7000-8000-000000000001"
ENGINE = LiveEngine("host/unix:/e", "engine-1", 0.0)
"""Known for long."""
ANOTHER = LiveEngine("host/unix:/e", "engine-2", 4e9)
"""An engine in its place, known only from after all that was granted."""
NOVEMBERS = ReratingScope(org_id="org_a", start=at(2026, 11, 1), end=at(2026, 12, 1))


def lease(index: int, ttl: Ttl, num_tokens: int, **fields: Any) -> Lease:
    granted_at = fields.pop("granted_at", datetime.now().timestamp())
    return Lease(
        id=f"{EVENT}:{index}",
        org_id="org_a",
        event_id=EVENT,
        model="penny",
        engine=ENGINE.engine,
        engine_id=ENGINE.engine_id,
        ttl=ttl,
        num_tokens=num_tokens,
        end_tokens=num_tokens,
        prefix=b"prefix",
        granted_at=granted_at,
        asked_at=fields.pop("asked_at", granted_at),
        **fields,
    )


async def book(db: AsyncEngine, **changes: Any) -> None:
    attempt = an_attempt(EVENT, prices=PRICES, **changes)
    await ingest(db, [an_event(attempt, USED)])


def a_book(prices: PriceSet) -> PriceBook:
    entry = PriceEntry(
        model="penny", valid_from=at(2025, 1, 1), valid_to=None, prices=prices, where="here"
    )
    return PriceBook([entry])


async def one_value(db: AsyncEngine, query: str) -> Any:
    async with db.connect() as conn:
        return await conn.scalar(sa.text(query))


async def owed(db: AsyncEngine) -> int:
    return int(await one_value(
        db, "SELECT debits_pico - credits_pico FROM balances WHERE account = 'receivable:org_a'"
    ))  # fmt: skip


async def outcomes(db: AsyncEngine) -> dict[str, Any]:
    async with db.connect() as conn:
        rows = await conn.execute(sa.text("SELECT id, outcome, refunded_pico FROM cache_leases"))
        return {row.id.removeprefix(EVENT): (row.outcome, row.refunded_pico) for row in rows}


async def move_back(db: AsyncEngine, interval: str) -> None:
    """As if all of it was so much earlier."""
    async with db.begin() as conn:
        for column in (
            "cache_leases SET kept_until = kept_until",
            "cache_writes SET booked_at = booked_at",
        ):
            await conn.execute(sa.text(f"UPDATE {column} - interval '{interval}'"))


async def assert_agreement(db: AsyncEngine, folder: Path) -> None:
    assert await agree(db, folder, lambda: []) == Agreement()


async def test_what_was_kept_for_its_time_is_nobodys_refund(
    db: AsyncEngine, tmp_path: Path
) -> None:
    await book(db)
    for _ in range(2):
        assert await grant(db, lease(0, "1h", 1024)) == []
    await grant(db, lease(1, "5m", 1600))
    assert await sweep(db, [ENGINE]) == {}
    await move_back(db, "6 minutes")
    kept = LeaseChange("penny", "kept")
    assert await sweep(db, [ENGINE]) == {kept: 1}
    assert await end(db, f"{EVENT}:0", EVENT, is_broken=False) == [kept]
    assert await end(db, f"{EVENT}:0", EVENT, is_broken=False) == []
    assert await sweep(db, [ANOTHER]) == {}
    assert await outcomes(db) == {":0": ("kept", None), ":1": ("kept", None)}
    assert await owed(db) == WHOLE
    await assert_agreement(db, tmp_path)


async def test_a_broken_lease_is_refunded_once_however_often_it_is_told(
    db: AsyncEngine, tmp_path: Path
) -> None:
    await book(db)
    await grant(db, lease(0, "1h", 1024))
    await grant(db, lease(1, "5m", 1600))

    async def told() -> list[LeaseChange] | None:
        return await end(db, f"{EVENT}:1", EVENT, is_broken=True)

    first, second = await asyncio.gather(told(), told())
    assert sorted((first or []) + (second or [])) == [LeaseChange("penny", "evicted")]
    await asyncio.gather(sweep(db, [ENGINE]), sweep(db, [ENGINE]))
    assert await told() == []
    await sweep(db, [ENGINE])
    assert await outcomes(db) == {":0": (None, None), ":1": ("evicted", PREMIUM_5M)}
    async with db.connect() as conn:
        assert await spent_by_org(conn, "org_a") == await owed(db) == WHOLE - PREMIUM_5M
    moved = await one_value(db, "SELECT array_agg(kind ORDER BY seq) FROM transfers")
    assert sorted(moved) == ["repriced", "reversed", "usage"]
    assert await one_value(db, "SELECT array_agg(refund_id) FROM cache_leases") == [
        None, refund_id(f"{EVENT}:1"),
    ]  # fmt: skip
    hour = await one_value(db, "SELECT cache_write_5m_pico FROM usage_hourly")
    assert hour == 1600 * 100_000, "what was written costs what reading it without a cache does"
    await assert_agreement(db, tmp_path)


async def test_an_end_may_come_before_its_event_and_before_its_lease(
    db: AsyncEngine, tmp_path: Path
) -> None:
    assert await end(db, f"{EVENT}:0", EVENT, is_broken=True) is None
    await grant(db, lease(0, "5m", 1600))
    assert await end(db, f"{EVENT}:0", EVENT, is_broken=True) == [LeaseChange("penny", "evicted")]
    await sweep(db, [ENGINE])
    assert await outcomes(db) == {":0": ("evicted", None)}
    await book(db)
    await sweep(db, [ENGINE])
    assert await outcomes(db) == {":0": ("evicted", PREMIUM_5M)}
    await assert_agreement(db, tmp_path)


async def test_a_lease_that_broke_while_its_event_waited_for_a_price_is_refunded_after(
    db: AsyncEngine, tmp_path: Path
) -> None:
    """The missing price adds less than the premium that was booked before."""
    unread = {name: price for name, price in PRICES.items() if name != "cache_read"}
    used = msgspec.structs.replace(USED, cache_read=16)
    await ingest(db, [an_event(an_attempt(EVENT, prices=unread), used)])
    await grant(db, lease(0, "1h", 1024))
    await end(db, f"{EVENT}:0", EVENT, is_broken=True)
    await sweep(db, [ENGINE])
    assert await outcomes(db) == {":0": ("evicted", None)}
    assert await owed(db) == WHOLE
    assert await reprice_suspense(db, a_book(PRICES)) == 1
    assert await owed(db) == WHOLE + 16 * 10_000
    await sweep(db, [ENGINE])
    assert await outcomes(db) == {":0": ("evicted", PREMIUM_1H)}
    assert await owed(db) == WHOLE + 16 * 10_000 - PREMIUM_1H
    await assert_agreement(db, tmp_path)


async def test_a_break_that_is_told_late_is_one_all_the_same(db: AsyncEngine) -> None:
    await book(db)
    await grant(db, lease(0, "5m", 1600))
    await move_back(db, "6 minutes")
    assert await sweep(db, [ENGINE]) == {LeaseChange("penny", "kept"): 1}
    assert await end(db, f"{EVENT}:0", EVENT, is_broken=True) == [LeaseChange("penny", "evicted")]
    await sweep(db, [ENGINE])
    assert await outcomes(db) == {":0": ("evicted", PREMIUM_5M)}


async def test_another_process_in_an_engines_place_ends_what_it_kept(
    db: AsyncEngine, tmp_path: Path
) -> None:
    await book(db)
    await grant(db, lease(0, "1h", 1024))
    await grant(db, msgspec.structs.replace(lease(1, "5m", 1600), engine="another host's"))
    lost = LeaseChange("penny", "engine_lost")
    before_it = ANOTHER._replace(since=0.0)
    assert await sweep(db, [before_it]) == {}, "who knows it longer than the lease is mistaken"
    assert await sweep(db, [ANOTHER]) == {lost: 1}
    assert await sweep(db, [ANOTHER]) == {}
    assert await outcomes(db) == {":0": ("engine_lost", PREMIUM_1H), ":1": (None, None)}
    await move_back(db, f"{LOST_AFTER} 6 minutes")
    assert await sweep(db, [ANOTHER]) == {lost: 1}, "of which nobody has heard again"
    assert await owed(db) == WHOLE - PREMIUM_1H - PREMIUM_5M
    await assert_agreement(db, tmp_path)


async def test_a_prefix_that_is_written_again_was_not_kept(db: AsyncEngine) -> None:
    await book(db)
    now = datetime.now().timestamp()
    await grant(db, lease(0, "1h", 1024, granted_at=now - 30))
    again = msgspec.structs.replace(
        lease(0, "1h", 1024), id="other:0", event_id="other", asked_at=now - 31
    )
    assert await grant(db, again) == [], "it was asked for before the first was there"
    for changes in ({"prefix": b"x"}, {"org_id": "org_b"}, {"engine_id": "e"}, {"end_tokens": 9}):
        other = msgspec.structs.replace(again, id=f"{changes}", asked_at=now, **changes)  # type: ignore[arg-type]
        assert await grant(db, other) == []
    third = msgspec.structs.replace(again, id="third:0", event_id="third", asked_at=now)
    assert await grant(db, third) == [LeaseChange("penny", "recomputed")]
    await sweep(db, [ENGINE])
    assert (await outcomes(db))[":0"] == ("recomputed", PREMIUM_1H)


async def test_writes_that_no_lease_stands_for_are_refunded(
    db: AsyncEngine, tmp_path: Path
) -> None:
    await book(db)
    await grant(db, lease(0, "5m", 600))
    event = an_event(an_attempt(EVENT, prices=PRICES), USED)
    wasted = msgspec.structs.replace(event, kind="waste")
    await note_writes(db, [wasted, an_event()])
    assert await one_value(db, "SELECT count(*) FROM cache_writes") == 0
    for _ in range(2):
        await note_writes(db, [event])
    assert await sweep(db, [ENGINE]) == {}, "it may yet be recorded"
    await move_back(db, RECORDED_WITHIN)
    assert await sweep(db, [ENGINE]) == {LeaseChange("penny", "unrecorded"): 2}
    assert await one_value(db, "SELECT count(*) FROM cache_writes") == 0
    assert await grant(db, lease(1, "5m", 1000)) == []
    assert await end(db, f"{EVENT}:1", EVENT, is_broken=True) == [], "refunded with its event"
    assert await outcomes(db) == {
        ":0": (None, None),
        ":5m": ("unrecorded", 1000 * 25_000),
        ":1h": ("unrecorded", PREMIUM_1H),
    }
    await note_writes(db, [event])
    await move_back(db, RECORDED_WITHIN)
    assert await sweep(db, [ENGINE]) == {}
    await assert_agreement(db, tmp_path)


async def test_the_houses_own_loss_is_refunded_to_nobody(db: AsyncEngine) -> None:
    event = an_event(an_attempt(EVENT, prices=PRICES), USED, kind="waste")
    await ingest(db, [event])
    await grant(db, lease(0, "5m", 1600))
    await end(db, f"{EVENT}:0", EVENT, is_broken=True)
    await sweep(db, [ENGINE])
    assert await outcomes(db) == {":0": ("evicted", 0)}
    assert await one_value(db, "SELECT count(*) FROM event_ratings") == 0


async def test_a_refund_is_in_the_requests_record_and_on_the_invoice(
    db: AsyncEngine, tmp_path: Path
) -> None:
    await open_account(db)
    admitted_at = at(2026, 9, 20).timestamp()
    await book(db, admitted_at=admitted_at)
    await grant(db, lease(0, "5m", 1600))
    await grant(db, lease(1, "1h", 1024))
    await end(db, f"{EVENT}:0", EVENT, is_broken=True)
    await sweep(db, [ENGINE])
    async with db.connect() as conn:
        record = await find_record(conn, "org_a", "req_1", admitted_at)
    assert record is not None and record.charged_pico == WHOLE - PREMIUM_5M
    assert {each.kind for each in record.transfers} == {"usage", "reversed", "repriced"}
    [event] = record.events
    assert event.attempt.prices["cache_write_5m"] == PRICES["uncached_input"]
    invoice = await close_and_finalize(db, OCTOBER)
    found = {it.component: (it.kind, it.price_id, it.exact_pico) for it in await lines(db, invoice)}
    assert found["cache_write_5m"] == ("usage", "in", 1600 * 100_000)
    assert found["cache_write_1h"] == ("usage", "write_1h", 1024 * 200_000)
    assert invoice.exact_pico == WHOLE - PREMIUM_5M
    await end(db, f"{EVENT}:1", EVENT, is_broken=True)
    await sweep(db, [ENGINE])
    following = await close_and_finalize(db, NOVEMBER)
    taken_back = [(it.kind, it.price_id, it.exact_pico) for it in await lines(db, following)]
    assert taken_back == [
        ("correction", "in", 1024 * 100_000), ("correction", "write_1h", -1024 * 200_000),
    ]  # fmt: skip
    await assert_agreement(db, tmp_path)


async def test_a_period_that_is_rated_anew_forgets_no_refund(
    db: AsyncEngine, tmp_path: Path
) -> None:
    await book(db)
    await grant(db, lease(0, "5m", 600))
    await end(db, f"{EVENT}:0", EVENT, is_broken=True)
    await sweep(db, [ENGINE])
    assert await owed(db) == WHOLE - 600 * 25_000, "a part of what was written"
    dearer = {**PRICES, "cache_write_5m": Price("write:2", 150_000)}
    shown = await plan(db, NOVEMBERS, a_book(dearer))
    await apply(db, NOVEMBERS, a_book(dearer), shown.digest)
    assert await owed(db) == WHOLE + (1000 - 600) * 25_000
    await end(db, f"{EVENT}:0", EVENT, is_broken=True)
    await sweep(db, [ENGINE])
    assert await owed(db) == WHOLE + (1000 - 600) * 25_000
    await assert_agreement(db, tmp_path)


@pytest.mark.parametrize("refunded", [False, True])
async def test_a_lease_that_breaks_while_a_period_is_rated_anew_is_refunded_beside_it(
    db: AsyncEngine, tmp_path: Path, refunded: bool
) -> None:
    """The re-rating applies what was shown, in number and amount."""
    await book(db)
    cheap = an_attempt(prices={**PRICES, "output": Price("old", 100_000)})
    await ingest(db, [an_event(cheap, Quantities(output=10))])
    await grant(db, lease(0, "5m", 1600))
    priced_by = a_book(PRICES)
    shown = await plan(db, NOVEMBERS, priced_by)
    assert (shown.num_events, shown.difference_pico) == (1, 10 * 300_000)
    await apply(db, NOVEMBERS, priced_by, shown.digest, max_batches=0)
    await end(db, f"{EVENT}:0", EVENT, is_broken=True)
    if refunded:
        await sweep(db, [ENGINE])
    done = await apply(db, NOVEMBERS, priced_by, shown.digest)
    assert done.applied_at is not None and (done.num_applied, done.num_events) == (1, 1)
    await sweep(db, [ENGINE])
    assert await owed(db) == WHOLE - PREMIUM_5M + 10 * 400_000
    assert (await plan(db, NOVEMBERS, priced_by)).num_events == 0
    await assert_agreement(db, tmp_path)


async def test_a_refund_of_nothing_is_not_taken_for_what_was_shown(db: AsyncEngine) -> None:
    """By the old prices nothing was paid for keeping it, by the new ones it would have been."""
    free = {**PRICES, "cache_write_5m": PRICES["uncached_input"]}
    await ingest(db, [an_event(an_attempt(EVENT, prices=free), USED)])
    await grant(db, lease(0, "5m", 600))
    priced_by = a_book(PRICES)
    shown = await plan(db, NOVEMBERS, priced_by)
    assert shown.difference_pico == PREMIUM_5M
    await apply(db, NOVEMBERS, priced_by, shown.digest, max_batches=0)
    await end(db, f"{EVENT}:0", EVENT, is_broken=True)
    await sweep(db, [ENGINE])
    assert await outcomes(db) == {":0": ("evicted", 0)}
    done = await apply(db, NOVEMBERS, priced_by, shown.digest)
    assert (done.num_applied, await owed(db)) == (0, WHOLE - PREMIUM_5M)
    assert (await plan(db, NOVEMBERS, priced_by)).difference_pico == 1000 * 25_000


@pytest.mark.parametrize(("uncached", "wanted"), [(99, 16 * 25), (100, 16 * 30)])
def test_the_premium_is_that_of_the_requests_size(uncached: int, wanted: int) -> None:
    banded: PriceSet = {
        "uncached_input": Price("in", 100, (Band(116, "in:large", 110),)),
        "cache_write_5m": Price("write", 125, (Band(116, "write:large", 140),)),
    }
    used = Quantities(uncached_input=uncached, cache_write_5m=16)
    assert premium("cache_write_5m", 16, banded, used.input_total) == wanted
    free: PriceSet = {"uncached_input": Price("in", 100), "cache_write_5m": Price("write", 0)}
    assert premium("cache_write_5m", 16, free, 116) == 0, (
        "nothing was paid beyond the price of input"
    )
