"""Settle invoices with what an org's credits have paid.

What was burned of a credit stands in the org's receivable already: to settle an invoice of it posts
nothing, it is only noted that it is no longer there for the next one. A negative note gives back:
what an invoice was over-settled by, or what it owes the customer itself, settles later ones.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.credits.grants_admin import paid_pico
from billing.currency import round_half_up
from billing.invoices.invoice import Invoice, amounts_of, pay
from billing.invoices.tables import invoice_payments, invoices
from billing.money import Pico
from billing.tables import credit_burns, usage_events

ORG_LOCK = 0x62616C616E6365


def paid_by_credits(invoice: Invoice) -> sa.Select[Any]:
    """For a page: of each credit (`id`) what it has paid by now of the usage that the invoice
    charges, be it of its period or late (`amount_pico`)."""
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
    """Return what credits have paid that has settled no invoice yet."""
    own, of = invoice_payments.c, invoices.c
    applied = (
        sa.select(sa.func.coalesce(sa.func.sum(own.amount_coins * of.coin_pico), 0))
        .join(invoices, of.id == own.invoice_id)
        .where(own.org_id == org_id, own.method == "balance")
    )
    return await paid_pico(conn, org_id) - int((await conn.execute(applied)).scalar_one())


async def take_from_balance(conn: AsyncConnection, invoice: Invoice, now: datetime) -> None:
    """Settle of it what it has, or give back what the invoice has too much. The caller holds the
    invoice's lock."""
    assert invoice.coin_pico is not None
    # Two invoices of an org do not take the same.
    key = sa.func.hashtextextended(invoice.org_id, ORG_LOCK)
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
    due = (await amounts_of(conn, invoice)).due
    if due > 0:
        there = max(0, await unapplied_pico(conn, invoice.org_id))
        # Usage is burned exactly and invoiced rounded: who has paid it all is not asked for a coin.
        due = min(due, round_half_up(there, invoice.coin_pico)[0])
    if not due:
        return
    notes = sa.select(sa.func.count()).where(invoice_payments.c.invoice_id == invoice.id)
    number = (await conn.execute(notes)).scalar_one()
    await pay(
        conn,
        invoice,
        payment_id=f"{invoice.id}.balance.{number}",
        method="balance",
        amount_coins=due,
        reference="",
        now=now,
    )
