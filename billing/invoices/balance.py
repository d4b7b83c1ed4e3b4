"""Settle invoices with the amounts that an org's credits have paid.

A credit's payments are in the org's receivable already, so settling an invoice with them posts
nothing: a payment by `balance` records that they are used up. A negative one gives back what an
invoice was over-settled by, or owes the customer, for later invoices.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.credits.grants_admin import paid_pico
from billing.currency import round_half_up
from billing.invoices.invoice import Invoice, Payment, amounts_of, pay
from billing.invoices.tables import invoice_payments, invoices
from billing.money import Pico
from billing.tables import credit_burns, usage_events

ORG_LOCK = 0x62616C616E6365


def paid_by_credits(invoice: Invoice) -> sa.Select[Any]:
    """Return the query of the amount (`amount_pico`) that each credit (`id`) has paid of the usage
    that an invoice charges."""
    own, of = credit_burns.c, usage_events.c
    in_window = sa.or_(of.admitted_at >= invoice.period_start, of.seq >= invoice.since)
    total = sa.func.sum(own.amount_pico)
    found = (
        sa.select(own.grant_id.label("id"), total.label("amount_pico"))
        .join(usage_events, of.id == own.event_id)
        .where(own.org_id == invoice.org_id, of.seq < invoice.cutoff)
        .where(of.admitted_at < invoice.period_end, in_window)
        .group_by(own.grant_id)
        .having(total != 0)
        .subquery("found")
    )
    return sa.select(found)


async def unapplied_pico(conn: AsyncConnection, org_id: str) -> Pico:
    """Return the part of the credits' payments that has settled no invoice yet."""
    own, of = invoice_payments.c, invoices.c
    applied = (
        sa.select(sa.func.coalesce(sa.func.sum(own.amount_coins * of.coin_pico), 0))
        .join(invoices, of.id == own.invoice_id)
        .where(own.org_id == org_id, own.method == "balance")
    )
    return await paid_pico(conn, org_id) - int((await conn.execute(applied)).scalar_one())


async def take_from_balance(conn: AsyncConnection, invoice: Invoice, now: datetime) -> None:
    """Settle an invoice from the balance as far as it goes, or give back what it was over-settled
    by. The caller has locked the invoice."""
    assert invoice.coin_pico is not None
    # The lock keeps two invoices of an org from using the same payment.
    key = sa.func.hashtextextended(invoice.org_id, ORG_LOCK)
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
    due = (await amounts_of(conn, invoice)).due
    if due > 0:
        unapplied = max(0, await unapplied_pico(conn, invoice.org_id))
        # Credits pay exact amounts and invoices are rounded: a fully paid one leaves no coin due.
        due = min(due, round_half_up(unapplied, invoice.coin_pico)[0])
    if not due:
        return
    payments = sa.select(sa.func.count()).where(invoice_payments.c.invoice_id == invoice.id)
    number = (await conn.execute(payments)).scalar_one()
    payment = Payment(
        id=f"{invoice.id}.balance.{number}",
        invoice_id=invoice.id,
        method="balance",
        reference="",
        amount_coins=due,
        created_at=now,
    )
    await pay(conn, invoice.org_id, payment)
