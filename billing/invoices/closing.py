"""Draft the invoice of a period that has ended, and finalize it.

    draft = await close(db, org_id=..., now=...)          # when a period has ended; else None
    ...                                                   # the grace period, for late events
    await finalize(db, org_id=..., invoice_id=draft.id, now=...)

An org's periods follow each other without gaps. The next one is drafted when the one before is
final, so each late event belongs to one draft.

Charges are added up between two short transactions: the first draws the cutoff, the second writes
the lines, or gives way to a process that has drawn another cutoff since. Lines, rounding, number
and state are written in one transaction.
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
    next_number,
    note,
    settle,
)
from billing.invoices.lines.charges import Charge, InvoiceWindow, charges_of, take_cutoff
from billing.invoices.lines.terms import with_terms
from billing.invoices.postings import Posting, post
from billing.invoices.states import DRAFT, FINALIZED
from billing.invoices.tables import invoice_lines, invoices
from billing.money import Pico
from billing.tables import usage_events

LINES_AT_A_TIME = 500
FIRST_NUMBER = 0
"""A cutoff before every posting."""

Note = Callable[[AsyncConnection, Invoice], Awaitable[None]]
"""Records an invoice in the transaction that makes it final."""


class DraftCount(msgspec.Struct, frozen=True, kw_only=True):
    """A draft and the charges of its window."""

    invoice: Invoice
    account: BillingAccount
    charges: list[Charge]


async def close(db: AsyncEngine, *, org_id: str, now: datetime) -> Invoice | None:
    """Draft the org's next period and add up its charges. None: no period has ended, or the one
    before is still a draft, or the org has no billing account.

    Raises: InvoicingConflict when another process adds it up at the same time.
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
    """Return the period after the last one; the first period is that of the first usage."""
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
    """Insert the draft of a period unless it exists, and return its id."""
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
    """Add up a draft again, and return it. Raises: NoInvoice, InvoicingConflict."""
    counted = await _count(db, org_id, invoice_id)
    async with db.begin() as conn:
        draft = await _unchanged(conn, counted.invoice)
        return await _write(conn, draft, counted.charges)


async def finalize(
    db: AsyncEngine,
    *,
    org_id: str,
    invoice_id: str,
    now: datetime,
    on_final: Note | None = None,
) -> Invoice:
    """Add up a draft for the last time, round its lines, post the rounding, and number it. A final
    invoice is returned as it is.

    Raises: NoInvoice; InvoicingConflict when its currency has no rate for its period, or another
    process adds it up at the same time.
    """
    async with db.connect() as conn:
        found = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
    if found.state != DRAFT:
        return found
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
        if on_final is not None:
            await on_final(conn, settled)
        return settled


async def _count(db: AsyncEngine, org_id: str, invoice_id: str) -> DraftCount:
    async with db.begin() as conn:
        draft = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id, lock=True)
        if draft.state != DRAFT:
            raise InvoicingConflict("invoice_id", "is final")
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
    """Lock a draft and check its cutoff. Raises: InvoicingConflict when another process has added
    it up since."""
    draft = await get_invoice(conn, org_id=counted.org_id, invoice_id=counted.id, lock=True)
    if draft.state != DRAFT or draft.cutoff != counted.cutoff:
        raise InvoicingConflict("invoice_id", "is being closed by another request")
    return draft


async def _write(conn: AsyncConnection, draft: Invoice, charges: Sequence[Charge]) -> Invoice:
    """Replace a draft's lines; they are rounded if its currency has a rate."""
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
    """Return an id that sorts by position (`charges.MAX_LINES` has six digits)."""
    return f"{invoice_id}.{position:06}"


def _row(draft: Invoice, number: int, charge: Charge, rate: Rate | None) -> dict[str, Any]:
    subject = msgspec.structs.asdict(charge.subject)
    usage = subject.pop("usage")
    rounded: tuple[int | None, Pico | None] = (None, None)
    if rate is not None:
        rounded = round_half_up(charge.amount_pico, rate.coin_pico)
    return {
        **subject,
        "id": line_id(draft.id, number),
        "org_id": draft.org_id,
        "invoice_id": draft.id,
        "position": number,
        "usage_start": usage.start,
        "usage_end": usage.end,
        "quantity": charge.quantity,
        "num_requests": charge.num_requests,
        "exact_pico": charge.amount_pico,
        "amount_coins": rounded[0],
        "residual_pico": rounded[1],
    }


def _adjusted(draft: Invoice, charges: Sequence[Charge]) -> list[Posting]:
    """Return the postings of adjustments, which no event has posted."""
    return [
        Posting(id=line_id(draft.id, number), kind="adjustment", charged_pico=each.amount_pico)
        for number, each in enumerate(charges, 1)
        if each.subject.kind == "adjustment"
    ]


def _rounded_off(draft: Invoice) -> Posting:
    """Return the posting that rounds the receivable to the total of the invoice."""
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
