"""Whatever comes late, changes its price, is closed, paid or taken back, in whatever order: ledger,
balances, rollups and invoices say the same, to the last pico."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import BadInvoicing, InvoicingConflict
from billing.events import Quantities
from billing.invoices.closing import close, finalize, recount
from billing.invoices.collection import dun, issue_credit_note, left_of_lines, record_payment
from billing.invoices.invoice import Invoice, amounts_of, invoices_of, to_invoice
from billing.price_book import PriceBook, PriceEntry
from billing.reconcile import reprice_suspense
from gateway.db import create_engine
from tests.billing.samples import an_attempt, an_event
from tests.databases import Databases

from .billed import (
    ACCOUNT_MADE,
    ORG,
    assert_books_agree,
    book,
    open_account,
    priced,
    receivable,
    tokens,
)

CENT = 10**10
pico = st.sampled_from([1, CENT // 2, CENT // 2 - 1, CENT + 7, 3 * CENT])
whole = st.integers(1, 5)
zones = st.sampled_from(["UTC", "America/New_York", "Asia/Kathmandu", "Pacific/Apia"])
UNPRICED = 11
"""What a token costs whose price is known later."""
TABLES = (
    *("credit_note_lines", "credit_notes", "invoice_payments", "invoice_transitions"),
    *("invoice_lines", "invoices", "invoice_counters", "billing_accounts", "transfers", "balances"),
    *("accounts", "usage_events", "usage_hourly", "usage_daily"),
)


class Machine(RuleBasedStateMachine):
    db: AsyncEngine
    run: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.now = ACCOUNT_MADE + timedelta(days=3)
        self.price = 1
        self.booked: list[tuple[datetime, int]] = []
        self.suspended: list[tuple[datetime, int]] = []
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

    @initialize(timezone=zones, day=st.sampled_from([1, 15, 31]))
    def begins(self, timezone: str, day: int) -> None:
        self.run(open_account, self.db, timezone=timezone, billing_day=day)

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
        moment = self.now - timedelta(days=days_late)
        self.run(book, self.db, tokens(moment, number, self.price))
        self.booked.append((moment, number * self.price))

    @rule(days_late=st.integers(0, 70), number=whole)
    def is_used_without_a_price(self, days_late: int, number: int) -> None:
        moment = self.now - timedelta(days=days_late)
        attempt = an_attempt(prices={}, admitted_at=moment.timestamp())
        self.run(book, self.db, an_event(attempt, Quantities(output=number)))
        self.suspended.append((moment, number * UNPRICED))

    @rule()
    def gets_its_price(self) -> None:
        entry = PriceEntry(
            model="penny",
            valid_from=ACCOUNT_MADE - timedelta(days=365),
            valid_to=None,
            prices=priced(UNPRICED),
            where="here",
        )
        self.run(reprice_suspense, self.db, PriceBook([entry]))
        self.booked += self.suspended
        self.suspended = []

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
            assert not self.booked, "no account was ever opened"
            return
        assert [each.period_start for each in found[1:]] == [each.period_end for each in found[:-1]]
        assert sum(each.exact_pico for each in found) == sum(amount for _, amount in self.booked)
        due = 0
        async with self.db.connect() as conn:
            for each in found:
                due += (await amounts_of(conn, each)).due
            query = sa.text(
                "SELECT sum(amount_coins) FROM invoice_payments WHERE method = 'balance'"
            )
            settled = int(await conn.scalar(query) or 0)
        # What is open, less what was given back and has settled nothing since.
        assert await receivable(self.db) == (due + settled) * CENT
        await assert_books_agree(self.db)


def test_ledger_balances_rollups_and_invoices_agree(databases: Databases) -> None:
    with asyncio.Runner() as runner:
        lent = runner.run(databases.lend())
        made = create_engine(databases.url(lent.name))

        class Bound(Machine):
            db = made

            def run(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
                return runner.run(call(*args, **named))

        run_state_machine_as_test(
            Bound,
            settings=settings(
                max_examples=15,
                stateful_step_count=25,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        runner.run(made.dispose())
        runner.run(databases.take_back(lent))
