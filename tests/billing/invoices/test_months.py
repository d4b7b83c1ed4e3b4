"""Months on virtual time, by the seed: customers where the clocks are others, clocks that jump,
events that come late, twice and in any order, prices that change in mid-stream, credits that end at
a local midnight. What each invoice and each credit has to say is worked out by local dates alone,
by nothing that `billing` knows of periods."""

from __future__ import annotations

import random
from calendar import monthrange
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.credits.grants_admin import find_credit, grant_credit
from billing.credits.lines import settle
from billing.events import Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from billing.invoices.accounts import BillingTerms
from billing.invoices.invoice import Invoice, amounts_of, invoices_of, to_invoice
from billing.invoices.invoicer import Invoicer
from billing.pricing.price_book import PriceBook
from billing.reconciliation.checks import check_credits
from tests.billing.invoices.billed import assert_books_agree, lines, open_account, receivable
from tests.billing.samples import an_attempt, an_event

CENT = 10**10
PICO_FROM = {
    date(2027, 1, 1): CENT // 3,
    date(2028, 2, 29): CENT // 7,
    date(2028, 3, 12): CENT // 2,
    date(2028, 4, 1): 1,
    date(2028, 10, 29): CENT + 1,
    date(2028, 12, 1): CENT // 3,
}
"""Prices of an output token that round up, down and by half; they change on a leap day, at month
ends and on nights on which clocks change."""
SEASONS = (datetime(2028, 2, 1, tzinfo=UTC), datetime(2028, 10, 2, tzinfo=UTC))
"""February has a leap day and March a short night; November has a long one."""
DAYS, NUM_EVENTS = 80, 70
CUSTOMERS = {
    "org_a": BillingTerms(timezone="America/New_York", billing_day=31, grace_hours=0),
    "org_b": BillingTerms(timezone="Pacific/Apia", grace_hours=72),
    "org_c": BillingTerms(timezone="Asia/Kathmandu", billing_day=12, grace_hours=24),
}
PREPAID = "org_b"
"""The prepaid customer: usage beyond its credits waits for its next credit, and is on no invoice.
"""
Month = tuple[int, int]
"""The year and month of the local day on which a period begins."""
Charged = Counter[tuple[Month, int]]
"""Tokens, by the period that they were used in and the price of one."""


class Credit(msgspec.Struct):
    id: str
    left_pico: int
    ends: datetime


class Customer:
    """One org, and what it has to find on its invoices."""

    def __init__(self, org: str, terms: BillingTerms, begun: datetime) -> None:
        self.org, self.terms, self.zone = org, terms, ZoneInfo(terms.timezone)
        self.open = self.month_of(begun)
        self.charged: list[Charged] = []
        """The charges that each final invoice must show."""
        self.months: list[Month] = []
        self.coming: dict[Month, Charged] = {}
        self.credits: list[Credit] = []
        self.unpaid: dict[str, tuple[datetime, int]] = {}
        self.burned = 0

    def first_day(self, month: Month) -> date:
        return date(*month, min(self.terms.billing_day, monthrange(*month)[1]))

    def month_of(self, moment: datetime) -> Month:
        day = moment.astimezone(self.zone).date()
        month = (day.year, day.month)
        return month if day >= self.first_day(month) else before(month)

    def midnight(self, day: date) -> datetime:
        return datetime.combine(day, time(), self.zone).astimezone(UTC)

    def hears_of(self, event: UsageEvent) -> None:
        """It is in the books from now on: on the invoice of its period, or on the next."""
        moment = datetime.fromtimestamp(event.attempt.admitted_at, UTC)
        month, pico = self.month_of(moment), pico_of(moment)
        tokens = event.quantities.output
        self.coming.setdefault(max(month, self.open), Counter())[month, pico] += tokens
        self.unpaid[event.id] = (moment, tokens * pico)

    def pays(self) -> None:
        """With the credit that ends first, of those that had not ended when it was used."""
        for event_id, (moment, owed) in sorted(self.unpaid.items()):
            for credit in sorted(self.credits, key=lambda it: it.ends):
                if moment < credit.ends:
                    part = min(owed, credit.left_pico)
                    credit.left_pico -= part
                    owed -= part
                    self.burned += part
            self.unpaid[event_id] = (moment, owed)
        kept = self.unpaid if self.org == PREPAID else {}
        self.unpaid = {name: it for name, it in kept.items() if it[1]}

    def is_invoiced(self, now: datetime) -> None:
        """Every period that is over, and was for as long as it waits."""
        while True:
            end = self.midnight(self.first_day(after(self.open)))
            if now < end + timedelta(hours=self.terms.grace_hours):
                return
            self.charged.append(self.coming.pop(self.open, Counter()))
            self.months.append(self.open)
            self.open = after(self.open)


def after(month: Month) -> Month:
    return (month[0] + 1, 1) if month[1] == 12 else (month[0], month[1] + 1)


def before(month: Month) -> Month:
    return (month[0] - 1, 12) if month[1] == 1 else (month[0], month[1] - 1)


def pico_of(moment: datetime) -> int:
    return next(pico for day, pico in reversed(PICO_FROM.items()) if day <= moment.date())


def a_book(folder: Path) -> PriceBook:
    prices = (
        f'[[price]]\nmodel = "timely"\nvalid_from = {day}\noutput = "{Decimal(pico) / 10**6}"\n'
        for day, pico in PICO_FROM.items()
    )
    (folder / "book.toml").write_text("".join(prices))
    return PriceBook.load([folder])


def used_by(
    customer: Customer, begun: datetime, book: PriceBook, rng: random.Random
) -> Iterator[tuple[datetime, UsageEvent]]:
    """When each arrives, if once more then twice: near a midnight there, or at any time."""
    first = customer.midnight(customer.first_day(customer.open))
    for number in range(NUM_EVENTS):
        moment = begun + timedelta(days=rng.uniform(0, DAYS))
        if rng.random() < 0.7:
            local = moment.astimezone(customer.zone).date()
            month = (local.year, local.month)
            day = rng.choice((local, customer.first_day(month), date(*month, 1)))
            near = timedelta(seconds=rng.choice((-1, -0.000001, 0, 1, 3601)))
            moment = customer.midnight(day) + near
        at = max(moment, first).timestamp()
        attempt = an_attempt(
            f"{customer.org}.{rng.randrange(10**9):09}.{number}",
            org=customer.org,
            model="timely",
            prices=book.at("timely", at),
            admitted_at=at,
        )
        event = an_event(attempt, Quantities(output=rng.randrange(1, 6)))
        delay = rng.choice((0, 0, 0.1, 0.5, 1, 2, 33))
        arrives = moment + timedelta(days=delay, hours=rng.uniform(-3, 3))
        yield arrives, event
        if rng.random() < 0.3:
            yield arrives + timedelta(days=rng.uniform(0, 20)), event


async def give_credits(db: AsyncEngine, customer: Customer, begun: datetime) -> None:
    """The later one to end is given first; each ends with a day there."""
    for number, (days, amount) in enumerate(((60, 40 * CENT), (26, 25 * CENT + 3))):
        day = (begun + timedelta(days=days)).astimezone(customer.zone).date()
        credit = Credit(f"{customer.org}_{number}", amount, customer.midnight(day))
        customer.credits.append(credit)
        async with db.begin() as conn:
            await grant_credit(
                conn,
                credit_id=credit.id,
                org=customer.org,
                amount_pico=amount,
                expires_at=credit.ends,
            )


async def final_invoices(db: AsyncEngine, org: str) -> list[Invoice]:
    async with db.connect() as conn:
        rows = await conn.execute(invoices_of(org).order_by(sa.text("period_start")))
        return [found for found in map(to_invoice, rows) if found.state != "draft"]


async def assert_it_finds_what_it_used(db: AsyncEngine, customer: Customer) -> None:
    invoices = await final_invoices(db, customer.org)
    assert [customer.month_of(it.period_start) for it in invoices] == customer.months
    asked, settled = 0, 0
    for invoice, expected in zip(invoices, customer.charged, strict=True):
        begun = customer.first_day(customer.month_of(invoice.period_start))
        assert invoice.period_start == customer.midnight(begun)
        found: Charged = Counter()
        for line in await lines(db, invoice):
            month = customer.month_of(line.usage_start)
            assert (line.kind == "late") == (month != customer.month_of(invoice.period_start))
            assert line.pico_per_token is not None
            found[month, line.pico_per_token] += line.quantity
        assert found == expected
        assert invoice.exact_pico == sum(pico * n for (_, pico), n in expected.items())
        async with db.connect() as conn:
            amounts = await amounts_of(conn, invoice)
        asked, settled = asked + amounts.total, settled + amounts.settled
    assert await receivable(db, customer.org) == asked * CENT - customer.burned
    assert settled * CENT <= customer.burned + CENT // 2, "no more than credits have paid"
    for credit in customer.credits:
        async with db.connect() as conn:
            standing = await find_credit(conn, customer.org, credit.id)
        assert standing is not None and standing.left_pico == credit.left_pico


@pytest.mark.parametrize(
    ("seed", "begun"), list(enumerate(SEASONS)), ids=["leap_day", "long_night"]
)
async def test_every_invoice_has_what_was_used_in_its_local_month_or_came_too_late_for_it(
    db: AsyncEngine, tmp_path: Path, seed: int, begun: datetime
) -> None:
    rng, book = random.Random(seed), a_book(tmp_path)
    customers = [Customer(org, terms, begun) for org, terms in CUSTOMERS.items()]
    arrivals: list[tuple[datetime, UsageEvent]] = []
    for it in customers:
        await open_account(db, it.org, now=begun, **msgspec.structs.asdict(it.terms))
        arrivals += used_by(it, begun, book, rng)
        if it.org != "org_c":
            await give_credits(db, it, begun)
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE orgs SET prepaid = id = :org"), {"org": PREPAID})
    arrivals.sort(key=lambda it: it[0], reverse=True)
    known: set[str] = set()
    now = begun
    while arrivals:
        now += timedelta(hours=rng.uniform(1, 120))
        batch: list[UsageEvent] = []
        while arrivals and arrivals[-1][0] <= now:
            batch.append(arrivals.pop()[1])
        rng.shuffle(batch)
        assert (await ingest(db, batch)).conflicts == ()
        for it in customers:
            fresh = {each.id: each for each in batch if each.attempt.org == it.org}
            for each in fresh.values():
                if each.id not in known:
                    it.hears_of(each)
            known.update(fresh)
            if it.credits:
                await settle(db, it.org)
                it.pays()
        clock = now + timedelta(hours=rng.choice((0, 0, -5, 5)))  # another gateway's
        await look(db, customers, clock)
    await look(db, customers, now + timedelta(days=100))
    assert not any(it.coming for it in customers), "all is invoiced"
    for it in customers:
        await assert_it_finds_what_it_used(db, it)
    assert all(len(it.months) > 3 for it in customers) and customers[0].burned > 0
    await assert_books_agree(db)
    assert await check_credits(db) == []


async def look(db: AsyncEngine, customers: list[Customer], clock: datetime) -> None:
    await Invoicer(db, wall_clock=clock.timestamp).look()
    for it in customers:
        it.is_invoiced(clock)
