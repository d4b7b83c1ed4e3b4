"""Ledger, balances, rollups, credits and invoices say the same, to the last pico, whatever comes
late, changes its price, is rated anew, closed, paid or taken back, in whatever order."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from billing.corrections import rerating
from billing.corrections.rerating import ReratingScope, apply, plan
from billing.credits.balance_leases import LeaseRequest
from billing.credits.grants_admin import grant_credit, paid_pico
from billing.credits.lines import sweep, top_up
from billing.errors import BadInvoicing, InvoicingConflict
from billing.events import Quantities
from billing.ingestion.settle_late import reprice_suspense
from billing.invoices.closing import close, finalize, recount
from billing.invoices.collection import dun, issue_credit_note, left_of_lines, record_payment
from billing.invoices.invoice import Invoice, amounts_of, invoices_of, to_invoice
from billing.pricing.price_book import PriceBook, PriceEntry
from billing.reconciliation.checks import check_credits
from tests.billing.invoices.billed import (
    ACCOUNT_MADE,
    ORG,
    assert_books_agree,
    book,
    open_account,
    priced,
    receivable,
    tokens,
)
from tests.billing.samples import an_attempt, an_event
from tests.databases import Databases
from tests.machines import DatabaseMachine, run_over_database

CENT = 10**10
pico = st.sampled_from([1, CENT // 2, CENT // 2 - 1, CENT + 7, 3 * CENT])
whole = st.integers(1, 5)
zones = st.sampled_from(["UTC", "America/New_York", "Asia/Kathmandu", "Pacific/Apia"])
UNPRICED = 11
"""The price of a token that gets its price only later."""
TABLES = (
    *("credit_note_lines", "credit_notes", "invoice_payments", "invoice_transitions"),
    *("invoice_lines", "invoices", "invoice_counters", "billing_accounts", "transfers", "balances"),
    *("accounts", "usage_events", "usage_hourly", "usage_daily", "event_ratings", "reratings"),
    *("credit_grants", "credit_lines", "credit_leases", "credit_burns", "unpaid_usage"),
    *("usage_charges", "price_sets"),
)


class Used(msgspec.Struct):
    moment: datetime
    number: int
    pico: int | None
    """The present price of a token; None: it has none."""


def a_book(amount: int) -> PriceBook:
    entry = PriceEntry(
        model="penny",
        valid_from=ACCOUNT_MADE - timedelta(days=365),
        valid_to=None,
        prices=priced(amount),
        where="here",
    )
    return PriceBook([entry])


class Machine(DatabaseMachine):
    def __init__(self, *lent: Any) -> None:
        super().__init__(*lent)
        self.now = ACCOUNT_MADE + timedelta(days=3)
        self.price = 1
        self.used: list[Used] = []
        self.count = 0
        self.run(self.empty)

    async def empty(self) -> None:
        async with self.db.begin() as conn:
            await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
            for table in TABLES:
                await conn.execute(sa.text(f"DELETE FROM {table}"))

    def name(self) -> str:
        self.count += 1
        return f"x{self.count:03}"

    @initialize(
        timezone=zones, day=st.sampled_from([1, 15, 31]), credit=pico, prepaid=st.booleans()
    )
    def begins(self, timezone: str, day: int, credit: int, prepaid: bool) -> None:
        self.run(open_account, self.db, timezone=timezone, billing_day=day)
        self.run(self.set_prepaid, prepaid)
        if credit != 1:
            self.run(self.credit, 4 * credit, None)
        for days_late in (0, 5, 40):
            self.use(days_late, 2)

    @rule(days=st.integers(1, 40))
    def time_passes(self, days: int) -> None:
        self.now += timedelta(days=days)

    @rule(amount=pico)
    def the_price_changes(self, amount: int) -> None:
        self.price = amount

    @rule(timezone=zones, day=st.sampled_from([1, 15, 31]))
    def the_account_changes(self, timezone: str, day: int) -> None:
        self.run(open_account, self.db, timezone=timezone, billing_day=day)

    @rule(days_late=st.integers(0, 70), number=whole)
    def is_used(self, days_late: int, number: int) -> None:
        self.use(days_late, number)

    def use(self, days_late: int, number: int) -> None:
        moment = self.now - timedelta(days=days_late)
        self.run(book, self.db, tokens(moment, number, self.price))
        self.used.append(Used(moment, number, self.price))

    @rule(days_late=st.integers(0, 70), number=whole)
    def is_used_without_a_price(self, days_late: int, number: int) -> None:
        moment = self.now - timedelta(days=days_late)
        attempt = an_attempt(prices={}, admitted_at=moment.timestamp())
        self.run(book, self.db, an_event(attempt, Quantities(output=number)))
        self.used.append(Used(moment, number, None))

    @rule()
    def gets_its_price(self) -> None:
        self.run(reprice_suspense, self.db, a_book(UNPRICED))
        for each in self.used:
            each.pico = UNPRICED if each.pico is None else each.pico

    @rule(
        amount=pico, days=st.tuples(st.integers(-1, 30), st.integers(30, 120)), dies=st.booleans()
    )
    def is_rated_anew(self, amount: int, days: tuple[int, int], dies: bool) -> None:
        self.rate_anew(amount, *days, dies)

    def rate_anew(self, amount: int, days_ago: int, days: int, dies: bool) -> None:
        end = self.now - timedelta(days=days_ago)
        span = ReratingScope(org_id=ORG, start=end - timedelta(days=days), end=end)
        anew = [each for each in self.used if span.start <= each.moment < span.end]
        changed = [each for each in anew if each.pico != amount]
        shown = self.run(plan, self.db, span, a_book(amount))
        assert shown.num_events == len(changed)
        assert shown.difference_pico == sum(
            each.number * (amount - (each.pico or 0)) for each in changed
        )
        for batches in (1, None) if dies else (None, None):
            done = self.run(apply, self.db, span, a_book(amount), shown.digest, max_batches=batches)
        assert done.applied_at is not None and done.num_applied == len(changed)
        for each in anew:
            each.pico = amount

    @rule(amount=pico.map(lambda each: 4 * each), days=st.sampled_from([None, -10, 1, 40]))
    def is_credited(self, amount: int, days: int | None) -> None:
        self.run(self.credit, amount, None if days is None else self.now + timedelta(days=days))

    async def credit(self, amount: int, expires_at: datetime | None) -> None:
        async with self.db.begin() as conn:
            await grant_credit(
                conn,
                credit_id=self.name(),
                org=ORG,
                amount_pico=amount,
                priority=self.count % 3,
                expires_at=expires_at,
            )

    @rule(prepaid=st.booleans())
    def pays_in_advance(self, prepaid: bool) -> None:
        self.run(self.set_prepaid, prepaid)

    async def set_prepaid(self, prepaid: bool) -> None:
        async with self.db.begin() as conn:
            await conn.execute(sa.text("UPDATE orgs SET prepaid = :it"), {"it": prepaid})

    @rule()
    def is_swept(self) -> None:
        self.run(sweep, self.db)

    @rule()
    def tops_up(self) -> None:
        spent = sum(each.number * (each.pico or 0) for each in self.used)
        self.run(top_up, self.db, ORG, LeaseRequest(spent_pico=spent))

    @rule()
    def is_closed(self) -> None:
        self.run(close, self.db, org_id=ORG, now=self.now)

    @rule(again=st.booleans())
    def is_finalized(self, again: bool) -> None:
        for each in self.run(self.invoices):
            if each.state == "draft":
                if again:
                    self.run(recount, self.db, org_id=ORG, invoice_id=each.id)
                self.run(finalize, self.db, org_id=ORG, invoice_id=each.id, now=self.now)

    @rule(position=st.integers(0, 5), part=st.integers(0, 4), whole=st.booleans())
    def is_taken_back(self, position: int, part: int, whole: bool) -> None:
        self.run(self.take_back, position, part, whole)

    async def take_back(self, position: int, part: int, whole: bool) -> None:
        found = await self.invoices()
        if not found:
            return
        invoice = found[position % len(found)]
        try:
            async with self.db.begin() as conn:
                left = await left_of_lines(conn, invoice)
                line = next((name for name, coins in left.items() if coins >= part > 0), None)
                await issue_credit_note(
                    conn,
                    org_id=ORG,
                    invoice_id=invoice.id,
                    note_id=self.name(),
                    reason="",
                    lines=None if whole or line is None else {line: part},
                    now=self.now,
                )
        except (InvoicingConflict, BadInvoicing):
            return  # a draft, or nothing is left

    @rule(position=st.integers(0, 5), part=st.integers(1, 4))
    def is_paid(self, position: int, part: int) -> None:
        self.run(self.pay, position, part)

    async def pay(self, position: int, part: int) -> None:
        found = [each for each in await self.invoices() if each.state != "draft"]
        if not found:
            return
        invoice = found[position % len(found)]
        async with self.db.begin() as conn:
            due = (await amounts_of(conn, invoice)).due
            if due:
                await record_payment(
                    conn,
                    org_id=ORG,
                    invoice_id=invoice.id,
                    payment_id=self.name(),
                    amount_coins=min(due, part),
                    reference="",
                    now=self.now,
                )

    @rule()
    def is_reminded(self) -> None:
        self.run(dun, self.db, self.now)

    async def invoices(self) -> list[Invoice]:
        async with self.db.connect() as conn:
            rows = await conn.execute(invoices_of(ORG).order_by(sa.text("period_start")))
            return [to_invoice(row) for row in rows]

    def teardown(self) -> None:
        """As it is, and once more after all of it was paid for and has got another price."""
        self.run(self.agree)
        self.run(sweep, self.db)
        self.rate_anew(2 * self.price, -1, 1000, dies=True)
        self.run(self.agree)

    async def agree(self) -> None:
        """Once everything that was used is in a final invoice."""
        self.now += timedelta(days=100)
        while True:
            for each in await self.invoices():
                await finalize(self.db, org_id=ORG, invoice_id=each.id, now=self.now)
            if await close(self.db, org_id=ORG, now=self.now) is None:
                break
        found = await self.invoices()
        if not found:
            assert not self.used, "no account was ever opened"
            return
        assert [each.period_start for each in found[1:]] == [each.period_end for each in found[:-1]]
        charged = sum(each.number * (each.pico or 0) for each in self.used)
        assert sum(each.exact_pico for each in found) == charged
        due = 0
        async with self.db.connect() as conn:
            for each in found:
                due += (await amounts_of(conn, each)).due
            query = sa.text(
                "SELECT sum(amount_coins) FROM invoice_payments WHERE method = 'balance'"
            )
            settled = int(await conn.scalar(query) or 0)
            burned = await paid_pico(conn, ORG)
            lines = sa.text(
                "SELECT paid_pico, (SELECT coalesce(sum(amount_pico), 0)"
                " FROM unpaid_usage) AS unpaid FROM credit_lines"
            )
            line = (await conn.execute(lines)).one_or_none()
        # What is open, less what was given back and has settled nothing since.
        assert await receivable(self.db) == (due + settled) * CENT - burned
        assert line is None or line.paid_pico + line.unpaid == charged
        assert await check_credits(self.db) == []
        await assert_books_agree(self.db)


def test_ledger_balances_rollups_and_invoices_agree(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerating, "MAX_BATCH", 2)
    run_over_database(Machine, databases, examples=10, steps=25)
