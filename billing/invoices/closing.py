"""Periods become drafts, drafts become invoices.

    draft = await close(db, org_id=..., now=...)          # when a period has ended; else None
    ...                                                   # the grace period; late events come in
    await finalize(db, org_id=..., invoice_id=draft.id, now=...)

An org's periods follow each other without a gap, and the next one is drafted when the one before is
final, so that what is late has one place to go.

What costs time, to add up the charges, happens between two short transactions: the first draws the
cutoff, the second writes lines that nothing can have changed meanwhile, or gives way to whoever
drew another cutoff since. Lines, rounding, number and state are written in one transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import calendar
from billing.calendar import Period
from billing.currency import round_half_up
from billing.errors import InvoicingConflict
from billing.invoices.accounts import BillingAccount, Rate, account_of, rate_at
from billing.invoices.balance import take_from_balance
from billing.invoices.invoice import (
    Invoice,
    get_invoice,
    latest_invoice,
    note,
    settle,
)
from billing.invoices.lines.charges import Charge, InvoiceWindow, charges_of, take_cutoff
from billing.invoices.lines.terms import with_terms
from billing.invoices.numbers import next_number
from billing.invoices.postings import Posting, post
from billing.invoices.states import DRAFT, FINALIZED
from billing.invoices.tables import invoice_lines, invoices
from billing.money import Pico
from billing.tables import usage_events

LINES_AT_A_TIME = 500
FIRST_NUMBER = 0
"""Below every posting."""


Told = Callable[[AsyncConnection, Invoice], Awaitable[None]]
"""Called in the transaction that makes an invoice final."""


async def notify_nobody(_conn: AsyncConnection, _invoice: Invoice) -> None:
    """Do nothing: nobody is to be told."""


class DraftCount(msgspec.Struct, frozen=True, kw_only=True):
    """A draft and the charges counted in its window."""

    invoice: Invoice
    account: BillingAccount
    charges: list[Charge]


async def close(db: AsyncEngine, *, org_id: str, now: datetime) -> Invoice | None:
    """Draft the org's next period and count it. None: none has ended, or the one before is a draft
    still, or the org has no billing account.

    Raises: InvoicingConflict where somebody else counts it at the same moment.
    """
    async with db.begin() as conn:
        account = await account_of(conn, org_id)
        newest = await latest_invoice(conn, org_id=org_id)
        if account is None or (newest is not None and newest.state == DRAFT):
            return None
        period = await _next_period(conn, account, newest)
        if period.end > now:
            return None
        draft = await _open_draft(conn, account, period, newest, now)
    return await recount(db, org_id=org_id, invoice_id=draft)


async def _next_period(
    conn: AsyncConnection, account: BillingAccount, newest: Invoice | None
) -> Period:
    """From where the last one ended; the first one is that of the first usage."""
    terms = account.terms
    if newest is not None:
        end = calendar.next_boundary(newest.period_end, terms.billing_day, terms.timezone)
        return Period(newest.period_end, end)
    own = usage_events.c
    first = sa.select(sa.func.min(own.admitted_at)).where(own.org == account.org_id)
    used_at = await conn.scalar(first.where(own.kind == "usage"))
    begun = account.created_at if used_at is None else min(used_at, account.created_at)
    return calendar.period_at(begun.astimezone(UTC), terms.billing_day, terms.timezone)


async def _open_draft(
    conn: AsyncConnection,
    account: BillingAccount,
    period: Period,
    newest: Invoice | None,
    now: datetime,
) -> str:
    """Its id; of one period there is one, whoever drafts it first."""
    since = FIRST_NUMBER if newest is None else newest.cutoff
    draft_id = f"inv_{account.org_id}_{period.start:%Y%m%dT%H%M}"
    row = {
        "id": draft_id,
        "org_id": account.org_id,
        "account_version": account.version,
        "currency": account.terms.currency,
        "issuer": account.terms.issuer,
        "state": DRAFT,
        "state_since": now,
        "period_start": period.start,
        "period_end": period.end,
        "created_at": now,
        "since": since,
        "cutoff": since,
    }
    drafted = insert(invoices).values(row).on_conflict_do_nothing(index_elements=["id"])
    if (await conn.execute(drafted)).rowcount:
        draft = await get_invoice(conn, org_id=account.org_id, invoice_id=draft_id)
        await note(conn, draft, DRAFT, now)
    return draft_id


async def recount(db: AsyncEngine, *, org_id: str, invoice_id: str) -> Invoice:
    """Return what a draft would charge as of now.

    Raises: NoInvoice, InvoicingConflict.
    """
    counted = await _count(db, org_id, invoice_id)
    async with db.begin() as conn:
        draft = await _unchanged(conn, counted.invoice)
        return await _write(conn, draft, counted.charges)


async def finalize(
    db: AsyncEngine, *, org_id: str, invoice_id: str, now: datetime, told: Told = notify_nobody
) -> Invoice:
    """Count a draft for good, round its lines, post what that leaves, number it. What is final
    already is success.

    Raises: NoInvoice; InvoicingConflict where its currency has no rate for its period, or somebody
    else counts it at the same moment.
    """
    async with db.connect() as conn:
        standing = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
    if standing.state != DRAFT:
        return standing
    counted = await _count(db, org_id, invoice_id)
    async with db.begin() as conn:
        draft = await _unchanged(conn, counted.invoice)
        draft = await _write(conn, draft, counted.charges)
        if draft.coin_pico is None or draft.residual_pico is None:
            raise InvoicingConflict("currency", f"{draft.currency} has no rate for this period")
        await post(
            conn,
            org_id=org_id,
            postings=[*_adjusted(draft, counted.charges), _rounded_off(draft)],
            now=now,
        )
        final = await _number(conn, draft, counted.account, now)
        await take_from_balance(conn, final, now)
        settled = await settle(conn, final, now)
        await told(conn, settled)
        return settled


async def _count(db: AsyncEngine, org_id: str, invoice_id: str) -> DraftCount:
    async with db.begin() as conn:
        draft = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id, lock=True)
        if draft.state != DRAFT:
            raise InvoicingConflict("invoice_id", "it is final")
        account = await account_of(conn, org_id, version=draft.account_version)
        assert account is not None, "a draft names its account"
        earlier = await _periods_before(conn, draft)
        cutoff = await take_cutoff(conn)
        own = invoices.c
        await conn.execute(sa.update(invoices).where(own.id == draft.id).values(cutoff=cutoff))
    draft = msgspec.structs.replace(draft, cutoff=cutoff)
    window = InvoiceWindow(
        org=org_id, period=draft.period, since=draft.since, cutoff=cutoff, earlier=earlier
    )
    charges = await with_terms(db, window, await charges_of(db, window))
    return DraftCount(invoice=draft, account=account, charges=charges)


async def _periods_before(conn: AsyncConnection, draft: Invoice) -> tuple[Period, ...]:
    own = invoices.c
    found = sa.select(own.period_start, own.period_end).where(
        own.org_id == draft.org_id, own.period_start < draft.period_start
    )
    rows = await conn.execute(found.order_by(own.period_start))
    return tuple(Period(start.astimezone(UTC), end.astimezone(UTC)) for start, end in rows)


async def _unchanged(conn: AsyncConnection, counted: Invoice) -> Invoice:
    """Its lock. Raises: InvoicingConflict where somebody has counted or finalized it since."""
    draft = await get_invoice(conn, org_id=counted.org_id, invoice_id=counted.id, lock=True)
    if draft.state != DRAFT or draft.cutoff != counted.cutoff:
        raise InvoicingConflict("invoice_id", "somebody else is closing it at this moment")
    return draft


async def _write(conn: AsyncConnection, draft: Invoice, charges: Sequence[Charge]) -> Invoice:
    """Its lines, rounded where there is a rate, instead of those that it had."""
    rate = await rate_at(conn, draft.currency, draft.period_end)
    rows = [_row(draft, number, each, rate) for number, each in enumerate(charges, 1)]
    await conn.execute(sa.delete(invoice_lines).where(invoice_lines.c.invoice_id == draft.id))
    for begun in range(0, len(rows), LINES_AT_A_TIME):
        await conn.execute(insert(invoice_lines), rows[begun : begun + LINES_AT_A_TIME])
    sums: dict[str, Any] = {"exact_pico": sum(each.amount_pico for each in charges)}
    if rate is not None:
        sums |= {
            "coin_pico": rate.coin_pico,
            "rate_from": rate.valid_from,
            "total_coins": sum(row["amount_coins"] for row in rows),
            "residual_pico": sum(row["residual_pico"] for row in rows),
        }
    await conn.execute(sa.update(invoices).where(invoices.c.id == draft.id).values(sums))
    return msgspec.structs.replace(draft, **sums)


def line_id(invoice_id: str, position: int) -> str:
    """In the order of their positions (`charges.MAX_LINES` has six digits)."""
    return f"{invoice_id}.{position:06}"


def _row(draft: Invoice, number: int, charge: Charge, rate: Rate | None) -> dict[str, Any]:
    subject = charge.subject
    rounded: tuple[int | None, Pico | None] = (None, None)
    if rate is not None:
        rounded = round_half_up(charge.amount_pico, rate.coin_pico)
    return {
        "id": line_id(draft.id, number),
        "org_id": draft.org_id,
        "invoice_id": draft.id,
        "position": number,
        "kind": subject.kind,
        "usage_start": subject.usage.start,
        "usage_end": subject.usage.end,
        "project": subject.project,
        "model": subject.model,
        "tier": subject.tier,
        "component": subject.component,
        "price_id": subject.price_id,
        "pico_per_token": subject.pico_per_token,
        "quantity": charge.quantity,
        "num_requests": charge.num_requests,
        "exact_pico": charge.amount_pico,
        "amount_coins": rounded[0],
        "residual_pico": rounded[1],
    }


def _adjusted(draft: Invoice, charges: Sequence[Charge]) -> list[Posting]:
    """Return the postings of adjustments, for which the ledger has no event."""
    return [
        Posting(id=line_id(draft.id, number), kind="adjustment", charged_pico=each.amount_pico)
        for number, each in enumerate(charges, 1)
        if each.subject.kind == "adjustment"
    ]


def _rounded_off(draft: Invoice) -> Posting:
    """Takes the residual out of the receivable: what is left there is what the invoice says."""
    assert draft.residual_pico is not None
    return Posting(id=f"{draft.id}.rounding", kind="rounding", charged_pico=-draft.residual_pico)


async def _number(
    conn: AsyncConnection, draft: Invoice, account: BillingAccount, now: datetime
) -> Invoice:
    sequence, number = await next_number(conn, draft.issuer, "invoice")
    terms = account.terms
    fields: dict[str, Any] = {
        "sequence": sequence,
        "number": number,
        "finalized_at": now,
        "due_at": calendar.due_at(now, terms.net_days, terms.timezone),
        "state": FINALIZED,
        "state_since": now,
    }
    await conn.execute(sa.update(invoices).where(invoices.c.id == draft.id).values(fields))
    final = msgspec.structs.replace(draft, **fields)
    await note(conn, final, FINALIZED, now)
    return final


def is_past_grace(account: BillingAccount, draft: Invoice, now: datetime) -> bool:
    """True if the draft's grace period is over."""
    return now >= draft.period_end + timedelta(hours=account.terms.grace_hours)
