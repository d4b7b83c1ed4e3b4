"""A period rated anew: shown before, applied as it was shown, once, and on the right invoice."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections import rerating
from billing.corrections.credit_returns import CreditShare, RepricedEvent, split_credit
from billing.corrections.rerating import Rerating, ReratingPlan, ReratingScope, apply, plan
from billing.credits.balance_leases import LeaseRequest
from billing.credits.grants import Grant
from billing.credits.grants_admin import find_credit, grant_credit
from billing.credits.lines import sweep, top_up
from billing.errors import BadInvoicing, InvoicingConflict
from billing.events import Attempt, Price, PriceSet
from billing.invoices.documents.drilldown import hours_of, requests_of
from billing.invoices.invoice import Invoice, InvoiceLine
from billing.pricing.price_book import PriceBook, PriceEntry
from billing.reconciliation.checks import check_credits, check_ledger
from billing.reports.request_record import find_record
from tests.billing.alerts.test_alerts import cap, raised, spends
from tests.billing.ingestion.test_ingest import balances, rows
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
    tokens,
    used,
)
from tests.billing.samples import PRICES, an_attempt, an_event

SEPTEMBER = at(2026, 9, 1)
CHEAP: PriceSet = {
    "uncached_input": PRICES["uncached_input"],
    "cache_read": PRICES["cache_read"],
    "output": Price("penny:output:2", 300_000),
}
WHOLE = ReratingScope(org_id=ORG, start=SEPTEMBER, end=OCTOBER)


def a_book(prices: PriceSet, valid_from: datetime = SEPTEMBER, model: str = "penny") -> PriceBook:
    entry = PriceEntry(
        model=model, valid_from=valid_from, valid_to=None, prices=prices, where="here"
    )
    return PriceBook([entry])


async def anew(
    db: AsyncEngine, prices: PriceSet, span: ReratingScope = WHOLE
) -> tuple[ReratingPlan, Rerating]:
    priced_by = a_book(prices)
    shown = await plan(db, span, priced_by)
    return shown, await apply(db, span, priced_by, shown.digest)


async def standing(db: AsyncEngine) -> list[tuple[object, ...]]:
    found = await rows(db, "SELECT id, debit, credit, amount_pico, kind, corrects FROM transfers")
    return [tuple(row) for row in found]


async def test_what_it_would_change_is_shown_by_line_and_nothing_is_written(
    db: AsyncEngine,
) -> None:
    await book(
        db,
        used(at(2026, 9, 10)),
        used(at(2026, 9, 11), output=30),
        used(at(2026, 9, 12), project="proj_b"),
        used(at(2026, 9, 12), model="other"),  # the book has no price for it
        used(OCTOBER),
        used(at(2026, 9, 12), org="org_b"),
        an_event(an_attempt(prices={}, admitted_at=at(2026, 9, 13).timestamp())),
    )
    before = await standing(db)
    shown = await plan(db, WHOLE, a_book(CHEAP))
    found = [
        (it.project, it.component, it.price_before, it.price_after, it.quantity, it.num_events)
        for it in shown.lines
    ]
    was, will = "penny:output:1", "penny:output:2"
    assert found == [
        ("proj_a", "cache_read", "", "penny:cache_read:1", 16, 1),
        ("proj_a", "output", "", will, 20, 1),
        ("proj_a", "output", was, will, 50, 2),
        ("proj_a", "uncached_input", "", "penny:uncached_input:1", 100, 1),
        ("proj_b", "output", was, will, 20, 1),
    ]
    assert [(it.before_pico, it.after_pico) for it in shown.lines[1:3]] == [
        (0, 20 * 300_000), (50 * 400_000, 50 * 300_000),
    ]  # fmt: skip
    assert (shown.num_events, shown.num_unpriced) == (4, 1)
    assert shown.difference_pico == 16 * 10_000 + 100 * 100_000 + 20 * 300_000 - 70 * 100_000
    assert await standing(db) == before
    assert await rows(db, "SELECT 1 FROM event_ratings UNION SELECT 1 FROM reratings") == []


async def test_each_event_is_reversed_and_posted_anew(db: AsyncEngine) -> None:
    event, other = used(at(2026, 9, 10)), used(at(2026, 9, 10), model="other")
    tagged = msgspec.structs.replace(event.attempt, tags={"team": "search", "feature": "chat"})
    event = msgspec.structs.replace(event, attempt=tagged)
    await book(db, event, other)
    _, done = await anew(db, CHEAP)
    assert done.applied_at is not None and (done.num_events, done.num_applied) == (1, 1)
    old, new = 100 * 100_000 + 20 * 400_000, 100 * 100_000 + 20 * 300_000
    mine = {row for row in await standing(db) if str(row[0]).startswith(event.id)}
    assert mine == {
        (event.id, "receivable:org_a", "revenue:penny", old, "usage", None),
        (f"{event.id}.reversed", "revenue:penny", "receivable:org_a", old, "reversed", event.id),
        (f"{event.id}.repriced.1", "receivable:org_a", "revenue:penny", new, "repriced", None),
    }
    assert (await balances(db))["receivable:org_a"] == (2 * old + new, old)
    of_team = "(SELECT * FROM usage_tags_daily WHERE (tag, value) = ('team', 'search'))"
    for table in ("usage_hourly", "usage_daily", of_team):
        query = f"SELECT output, output_pico, num_requests FROM {table} t WHERE model = 'penny'"
        assert [tuple(row) for row in await rows(db, query)] == [(20, 20 * 300_000, 1)]
    # Once more, from what it costs by now.
    await anew(db, PRICES)
    assert (await balances(db))["receivable:org_a"] == (3 * old + new, old + new)
    [again, _] = await rows(
        db, "SELECT corrects FROM transfers WHERE kind = 'reversed' ORDER BY seq DESC"
    )
    assert again.corrects == f"{event.id}.repriced.1"
    assert await check_ledger(db) == []


async def test_only_what_was_seen_is_applied(db: AsyncEngine) -> None:
    await book(db, used(at(2026, 9, 10)))
    shown = await plan(db, WHOLE, a_book(CHEAP))
    dearer = CHEAP | {"output": Price("penny:output:3", 300_001)}
    before = await standing(db)
    for changed in (a_book(dearer), a_book(PRICES)):
        with pytest.raises(InvoicingConflict, match="the preview has changed"):
            await apply(db, WHOLE, changed, shown.digest)
    late = used(at(2026, 9, 11))
    await book(db, late)
    with pytest.raises(InvoicingConflict, match="the preview has changed"):
        await apply(db, WHOLE, a_book(CHEAP), shown.digest)
    assert [row for row in await standing(db) if row[0] != late.id] == before
    with pytest.raises(BadInvoicing, match="ends_at: "):
        await plan(db, ReratingScope(org_id=ORG, start=OCTOBER, end=OCTOBER), a_book(CHEAP))
    with pytest.raises(BadInvoicing, match="more than 1 events"):
        await plan(db, WHOLE, a_book(CHEAP), max_events=1)


async def test_one_that_was_cut_off_goes_on_as_it_was_shown(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The book has changed meanwhile, and what comes late was in no digest."""
    monkeypatch.setattr(rerating, "MAX_BATCH", 3)
    await book(db, *(used(at(2026, 9, 10) + timedelta(hours=n)) for n in range(8)))
    shown = await plan(db, WHOLE, a_book(CHEAP))
    post = rerating.post_ratings

    async def dies(*args: object, **named: object) -> None:
        await post(*args, **named)  # type: ignore[arg-type]
        raise OSError("killed")

    begun = await apply(db, WHOLE, a_book(CHEAP), shown.digest, max_batches=1)
    assert (begun.num_applied, begun.applied_at) == (3, None)
    with monkeypatch.context() as killed, pytest.raises(OSError, match="killed"):
        killed.setattr(rerating, "post_ratings", dies)
        await apply(db, WHOLE, a_book(CHEAP), shown.digest)
    assert await check_ledger(db) == [], "whole in each event"
    other = await plan(db, WHOLE, a_book(PRICES))
    with pytest.raises(InvoicingConflict, match="another"):
        await apply(db, WHOLE, a_book(PRICES), other.digest)
    late = used(at(2026, 9, 20))

    async def goes_on() -> Rerating:
        return await apply(db, WHOLE, a_book(PRICES), shown.digest)

    done, again, _ = await asyncio.gather(goes_on(), goes_on(), book(db, late))
    assert done.num_applied == again.num_applied == 8
    assert await goes_on() == done, "it was applied"
    amounts = await rows(db, "SELECT output_pico FROM event_ratings")
    assert [row.output_pico for row in amounts] == [20 * 300_000] * 8
    assert await check_ledger(db) == []


async def test_it_does_not_wait_in_a_circle_with_who_books(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerating, "MAX_BATCH", 2)
    early = [used(at(2026, 9, 10) + timedelta(hours=n % 3), key=f"k{n % 4}") for n in range(12)]
    await book(db, *early)
    shown = await plan(db, WHOLE, a_book(CHEAP))
    await apply(db, WHOLE, a_book(CHEAP), shown.digest, max_batches=0)
    more = [
        [used(at(2026, 9, 10, n % 3), key=f"k{k}", org=org) for k in range(4) for org in (ORG, "b")]
        for n in range(8)
    ]
    await asyncio.gather(
        apply(db, WHOLE, a_book(CHEAP), shown.digest), *(book(db, *each) for each in more)
    )
    assert await check_ledger(db) == []


async def test_a_final_invoice_stays_and_the_next_one_says_what_differs(db: AsyncEngine) -> None:
    await open_account(db)
    events = [used(at(2026, 9, 10)), used(at(2026, 9, 11), output=30)]
    await book(db, *events)
    september = await close_and_finalize(db, OCTOBER)
    as_sent = await lines(db, september)
    await book(db, used(at(2026, 10, 5)), used(at(2026, 9, 12)))  # the last one is late
    shown, _ = await anew(db, CHEAP, ReratingScope(org_id=ORG, start=SEPTEMBER, end=NOVEMBER))
    assert [(it.invoice, it.num_events) for it in shown.lines] == [
        ("", 2), (september.number, 2),
    ]  # fmt: skip
    october = await close_and_finalize(db, NOVEMBER)
    assert await lines(db, september) == as_sent
    was, will = "penny:output:1", "penny:output:2"
    found = await lines(db, october)
    told = [(it.kind, it.price_id, it.quantity, it.num_requests) for it in found]
    assert [each for each in told if each[1] in (was, will)] == [
        ("correction", was, -50, -2),
        ("correction", will, 50, 2),
        ("late", will, 20, 1),
        ("usage", will, 20, 1),
    ]
    assert sum(it.exact_pico for it in found if it.kind == "correction") == -50 * 100_000
    assert all(it.quantity * (it.pico_per_token or 0) == it.exact_pico for it in found)
    for line in found:
        assert await behind(db, october, line) == (line.quantity, line.exact_pico)
    await assert_books_agree(db)


async def behind(db: AsyncEngine, invoice: Invoice, line: InvoiceLine) -> tuple[int, int]:
    """Return what the requests behind a line come to, and check that its hours come to the same."""
    async with db.connect() as conn:
        requests = (await conn.execute(requests_of(invoice, line))).all()
        hours = (await conn.execute(hours_of(invoice, line))).all()
    sums = [
        (sum(int(it.quantity) for it in each), sum(int(it.amount_pico) for it in each))
        for each in (requests, hours)
    ]
    assert sums[0] == sums[1] and len(requests) == abs(line.num_requests)
    return sums[0]


async def test_in_an_open_period_an_invoice_shows_the_price_that_holds(db: AsyncEngine) -> None:
    await open_account(db)
    await book(db, *(tokens(at(2026, 9, day), 10, 5) for day in (1, 2, 3)))
    half = ReratingScope(org_id=ORG, start=SEPTEMBER, end=at(2026, 9, 3))
    for pico in (7, 9):
        await anew(db, priced(pico), half)
    september = await close_and_finalize(db, OCTOBER)
    found = await lines(db, september)
    assert [(it.kind, it.price_id, it.quantity, it.exact_pico) for it in found] == [
        ("usage", "p:5", 10, 50), ("usage", "p:9", 20, 180),
    ]  # fmt: skip
    for line in found:
        assert await behind(db, september, line) == (line.quantity, line.exact_pico)
    await assert_books_agree(db)


async def test_a_dispute_is_answered_by_the_price_that_holds(db: AsyncEngine) -> None:
    event = tokens(at(2026, 9, 1), 10, 5)
    await book(db, event)
    await anew(db, priced(7))
    async with db.connect() as conn:
        found = await find_record(conn, ORG, "req_1", event.attempt.admitted_at)
    assert found is not None and found.charged_pico == 70
    assert found.events[0].attempt.prices == priced(7)
    assert [(it.kind, it.amount_pico) for it in found.transfers] == [
        ("usage", 50), ("repriced", 70), ("reversed", 50),
    ]  # fmt: skip


async def test_thresholds_are_told_of_once_whatever_a_period_costs_by_now(db: AsyncEngine) -> None:
    await cap(db, 100)
    await cap(db, 1000, period="total")
    event = spends(60)
    await book(db, msgspec.structs.replace(event, attempt=tagged(event.attempt)))
    span = ReratingScope(org_id=ORG, start=at(2026, 11, 1), end=at(2026, 12, 1))
    for pico in (2, 1, 2, 10, 1):
        await anew(db, priced(pico), span)
        spent = await rows(db, "SELECT DISTINCT spent_pico FROM spend_to_date")
        assert [int(row.spent_pico) for row in spent] == [60 * pico]
        assert await check_ledger(db) == []
    found = await raised(db)
    assert sorted((it[3], it[4]) for it in found) == [(50, 60), (50, 600), (80, 120), (100, 120)]


def tagged(attempt: Attempt) -> Attempt:
    return msgspec.structs.replace(attempt, tags={"team": "search"})


async def test_a_tampered_rating_is_found(db: AsyncEngine) -> None:
    event = tokens(at(2026, 9, 1), 10, 5)
    await book(db, event)
    await anew(db, priced(7))
    async with db.begin() as conn:
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        await conn.execute(sa.text("UPDATE event_ratings SET output_pico = output_pico + 1"))
    [problem] = await check_ledger(db)
    assert problem == f"request req_1, event {event.id}: " + (
        "the event's last rating differs from its transfers"
    )


# ---- what credits have paid

GRANTS = [
    Grant(id=name, left_pico=0, priority=priority, created_at=SEPTEMBER, components=components)
    for name, priority, components in (("a", 1, None), ("b", 2, None), ("c", 0, ("output",)))
]


@pytest.mark.parametrize(
    ("before", "burned", "unpaid", "after", "burns", "returned", "owed"),
    [
        (100, {"a": 100}, 0, 120, {"a": 100}, {}, 20),
        (100, {"a": 100}, 0, 80, {"a": 80}, {"a": 20}, 0),
        (100, {"a": 60, "b": 40}, 0, 70, {"a": 60, "b": 10}, {"b": 30}, 0),
        (100, {"a": 70}, 0, 120, {"a": 70}, {}, 20),  # 30 are on an invoice
        (100, {"a": 70}, 0, 80, {"a": 70}, {}, 0),
        (100, {"a": 70}, 0, 50, {"a": 50}, {"a": 20}, 0),
        (100, {"a": 70}, 30, 120, {"a": 70}, {}, 50),  # 30 wait for credit
        (100, {}, 100, 80, {}, {}, 80),
        (100, {"c": 60, "a": 40}, 0, 100, {"c": 50, "a": 40}, {"c": 10}, 10),
        (0, {}, 0, 10, {}, {}, 10),
    ],
)
def test_what_was_paid_stays_paid_as_far_as_it_goes(
    before: int,
    burned: dict[str, int],
    unpaid: int,
    after: int,
    burns: dict[str, int],
    returned: dict[str, int],
    owed: int,
) -> None:
    of = RepricedEvent(
        event_id="e",
        model="penny",
        admitted_at=SEPTEMBER,
        before_pico=before,
        reversals={"e": "e.reversed"},
        transfer_id="e.repriced.1",
        amounts={"output": after // 2, "uncached_input": after - after // 2},
    )
    assert split_credit(GRANTS, burned, unpaid, of) == CreditShare(
        burns=burns, returned=returned, owed_pico=owed
    )


async def test_a_credit_gets_back_what_it_paid_too_much(db: AsyncEngine) -> None:
    await open_account(db)
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE orgs SET prepaid = true"))
        await grant_credit(conn, credit_id="g1", org=ORG, amount_pico=100)
    await book(db, tokens(at(2026, 9, 1), 10, 10))
    await sweep(db)
    async with db.connect() as conn:
        spent = await find_credit(conn, ORG, "g1")
    assert spent is not None and spent.ended_at is not None, "all of it"
    await anew(db, priced(4))
    async with db.connect() as conn:
        back = await find_credit(conn, ORG, "g1")
        burned = await conn.execute(
            sa.text("SELECT event_id, sum(amount_pico) FROM credit_burns GROUP BY 1 ORDER BY 2")
        )
        assert [int(amount) for _, amount in burned] == [40]
    assert back is not None and (back.left_pico, back.ended_at) == (60, None)
    await book(db, tokens(at(2026, 9, 2), 10, 4))
    await top_up(db, ORG, LeaseRequest(spent_pico=80))
    async with db.connect() as conn:
        line = (await conn.execute(sa.text("SELECT * FROM credit_lines"))).one()
        left = await find_credit(conn, ORG, "g1")
    assert (line.paid_pico, left and left.left_pico + left.leased_pico) == (80, 20)
    assert await check_credits(db) == [] and await check_ledger(db) == []


# ---- on the loop that serves


async def test_others_have_their_turn_while_a_period_is_looked_through(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerating, "YIELD_EVERY", 4)
    rate, turns, seen = rerating._rate, 0, list[int]()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def watched(*args: Any) -> Any:
        seen.append(turns)
        return rate(*args)

    monkeypatch.setattr(rerating, "_rate", watched)
    await book(db, *(used(at(2026, 9, 10) + timedelta(hours=n)) for n in range(17)))
    beside = asyncio.create_task(others())
    shown = await plan(db, WHOLE, a_book(CHEAP))
    await apply(db, WHOLE, a_book(CHEAP), shown.digest)
    beside.cancel()
    assert len(seen) == 3 * 17
    for position in range(0, 3 * 17, 17):
        stretch = seen[position : position + 17]
        assert all(later > earlier for earlier, later in zip(stretch, stretch[4:], strict=False))


async def test_too_large_a_period_is_refused_before_anything_is_looked_at(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def looked(*_: object) -> None:
        raise AssertionError

    await book(db, *(used(at(2026, 9, 10) + timedelta(hours=n)) for n in range(3)))
    assert (await plan(db, WHOLE, a_book(CHEAP), max_events=3)).num_events == 3
    monkeypatch.setattr(rerating, "_places", looked)
    with pytest.raises(BadInvoicing, match="more than 2 events"):
        await plan(db, WHOLE, a_book(CHEAP), max_events=2)
