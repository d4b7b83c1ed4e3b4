"""Collection of final invoices: payments, credit notes and dunning.

Each function locks the invoice, so that the amounts it has read stay true. Rows are added and never
changed: a credit note has a number of its own series, and takes back at most what is left of each
line that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.errors import BadInvoicing, InvoicingConflict
from billing.invoices.balance import take_from_balance
from billing.invoices.invoice import (
    Invoice,
    Payment,
    amounts_of,
    enter,
    get_invoice,
    get_lines,
    next_number,
    pay,
    settle,
    to_invoice,
)
from billing.invoices.postings import Posting, post
from billing.invoices.states import DRAFT, LASTS, InvoiceStatus, advance
from billing.invoices.tables import (
    credit_note_lines,
    credit_notes,
    invoice_payments,
    invoices,
)
from billing.queries import Query
from billing.tables import read_struct


class CreditNote(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    invoice_id: str
    number: str
    reason: str
    total_coins: int
    lines: dict[str, int]
    """The coins that are taken back, by the id of the invoice's line."""
    created_at: datetime


async def _final(conn: AsyncConnection, org_id: str, invoice_id: str) -> Invoice:
    """Lock a final invoice. Raises: NoInvoice, InvoicingConflict."""
    found = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id, lock=True)
    if found.state == DRAFT:
        raise InvoicingConflict("invoice_id", "is a draft")
    return found


async def record_payment(
    conn: AsyncConnection,
    *,
    org_id: str,
    invoice_id: str,
    payment_id: str,
    amount_coins: int,
    reference: str,
    now: datetime,
) -> Payment:
    """Record a payment that was received, in the caller's transaction.

    Raises: NoInvoice; InvoicingConflict of a draft; BadInvoicing of more than is due.
    """
    invoice = await _final(conn, org_id, invoice_id)
    due = (await amounts_of(conn, invoice)).due
    if not 0 < amount_coins <= due:
        raise BadInvoicing("amount", "must be positive, and at most what is due")
    assert invoice.coin_pico is not None
    payment = Payment(
        id=payment_id,
        invoice_id=invoice_id,
        method="received",
        reference=reference,
        amount_coins=amount_coins,
        created_at=now,
    )
    await pay(conn, org_id, payment)
    charged = -amount_coins * invoice.coin_pico
    posting = Posting(id=payment_id, kind="payment", charged_pico=charged)
    await post(conn, org_id=org_id, postings=[posting], now=now)
    await settle(conn, invoice, now)
    return payment


async def issue_credit_note(
    conn: AsyncConnection,
    *,
    org_id: str,
    invoice_id: str,
    note_id: str,
    reason: str,
    lines: Mapping[str, int] | None,
    now: datetime,
) -> CreditNote:
    """Take back `lines`, coins by line, in the caller's transaction. None: everything that is left
    of the invoice, which voids it. Paid amounts go to the org's balance for later invoices.

    Raises: NoInvoice; InvoicingConflict of a draft, or when nothing is left; BadInvoicing of more
    than is left.
    """
    invoice = await _final(conn, org_id, invoice_id)
    assert invoice.coin_pico is not None
    amounts = await amounts_of(conn, invoice)
    left = await left_of_lines(conn, invoice)
    most = amounts.total - amounts.credited
    taken = _all_of(left, most) if lines is None else dict(lines)
    if most <= 0 or (lines is None and not taken):
        raise InvoicingConflict("invoice_id", "has nothing left to take back")
    for line_id, coins in taken.items():
        if line_id not in left:
            raise BadInvoicing("lines", "the invoice has no such line")
        if not 0 < coins <= left[line_id]:
            raise BadInvoicing("lines", "no more can be taken back than is left of a line")
    total = sum(taken.values())
    if not 0 < total <= most:
        raise BadInvoicing("lines", "no more can be taken back than is left of the invoice")
    sequence, number = await next_number(conn, invoice.issuer, "credit_note")
    made = CreditNote(
        id=note_id,
        invoice_id=invoice_id,
        number=number,
        reason=reason,
        total_coins=total,
        lines=taken,
        created_at=now,
    )
    row = msgspec.structs.asdict(made) | {
        "org_id": org_id,
        "issuer": invoice.issuer,
        "sequence": sequence,
    }
    del row["lines"]
    await conn.execute(sa.insert(credit_notes), row)
    parts: list[dict[str, Any]] = [
        {"credit_note_id": note_id, "line_id": line_id, "org_id": org_id, "amount_coins": coins}
        for line_id, coins in taken.items()
    ]
    await conn.execute(sa.insert(credit_note_lines), parts)
    posting = Posting(id=note_id, kind="credit_note", charged_pico=-total * invoice.coin_pico)
    await post(conn, org_id=org_id, postings=[posting], now=now)
    if (await amounts_of(conn, invoice)).due < 0:
        await take_from_balance(conn, invoice, now)
    await settle(conn, invoice, now)
    return made


def _all_of(left: Mapping[str, int], most: int) -> dict[str, int]:
    """Return the coins by line that take back everything that is left; with negative lines, no more
    than `most` in all."""
    taken: dict[str, int] = {}
    for line_id, coins in left.items():
        part = min(coins, most - sum(taken.values()))
        if part > 0:
            taken[line_id] = part
    return taken


async def left_of_lines(conn: AsyncConnection, invoice: Invoice) -> dict[str, int]:
    """Return the coins by line, in order, that no credit note has taken back."""
    own = credit_note_lines.c
    query = (
        sa.select(own.line_id, sa.func.sum(own.amount_coins))
        .join(credit_notes, credit_notes.c.id == own.credit_note_id)
        .where(credit_notes.c.invoice_id == invoice.id)
        .group_by(own.line_id)
    )
    gone = {line_id: int(coins) for line_id, coins in await conn.execute(query)}
    lines = await get_lines(conn, org_id=invoice.org_id, invoice_id=invoice.id)
    return {each.id: (each.amount_coins or 0) - gone.get(each.id, 0) for each in lines}


async def dun(db: AsyncEngine, now: datetime) -> int:
    """Move each unpaid invoice to the next stage of dunning if it is due, in a transaction of its
    own. Return how many moved; invoices that another process has locked are skipped."""
    own = invoices.c
    moved = 0
    async with db.connect() as conn:
        query = sa.select(own.org_id, own.id).where(own.state.in_(LASTS), own.due_at <= now)
        found = (await conn.execute(query.order_by(own.due_at, own.id))).all()
    for org_id, invoice_id in found:
        async with db.begin() as conn:
            wanted = sa.select(invoices).where(own.org_id == org_id, own.id == invoice_id)
            row = (await conn.execute(wanted.with_for_update(skip_locked=True))).one_or_none()
            if row is None:
                continue
            invoice = to_invoice(row)
            assert invoice.due_at is not None
            status = InvoiceStatus(
                state=invoice.state, since=invoice.state_since, due_at=invoice.due_at
            )
            stage = advance(status, now)
            if stage is not None:
                await enter(conn, invoice, stage, now)
                moved += 1
    return moved


def select_notes(org_id: str, invoice_id: str | None = None) -> sa.Select[Any]:
    """Select an org's credit notes for `read_notes`. None: of all invoices."""
    own = credit_notes.c
    found = sa.select(credit_notes).where(own.org_id == org_id)
    return found if invoice_id is None else found.where(own.invoice_id == invoice_id)


async def read_notes(conn: AsyncConnection, selected: sa.Select[Any]) -> list[CreditNote]:
    """Read credit notes with their lines."""
    rows = (await conn.execute(selected)).all()
    part = credit_note_lines.c
    parts = sa.select(part.credit_note_id, part.line_id, part.amount_coins)
    parts = parts.where(part.credit_note_id.in_([row.id for row in rows]))
    lines: dict[str, dict[str, int]] = {row.id: {} for row in rows}
    for note_id, line_id, coins in await conn.execute(parts.order_by(part.line_id)):
        lines[note_id][line_id] = int(coins)
    return [read_struct(CreditNote, row, lines=lines[row.id]) for row in rows]


async def notes_of(conn: AsyncConnection, *, org_id: str, invoice_id: str) -> list[CreditNote]:
    found = select_notes(org_id, invoice_id)
    return await read_notes(conn, found.order_by(credit_notes.c.sequence))


def select_payments(org_id: str, invoice_id: str | None = None) -> sa.Select[Any]:
    """Select an org's payments for `to_payment`. None: of all invoices."""
    own = invoice_payments.c
    found = sa.select(invoice_payments).where(own.org_id == org_id)
    return found if invoice_id is None else found.where(own.invoice_id == invoice_id)


def to_payment(row: sa.Row[Any]) -> Payment:
    return read_struct(Payment, row)


async def payments_of(conn: AsyncConnection, *, org_id: str, invoice_id: str) -> list[Payment]:
    own = invoice_payments.c
    found = select_payments(org_id, invoice_id).order_by(own.created_at, own.id)
    return [to_payment(row) for row in await conn.execute(found)]


class SettlementEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A payment of an invoice, or a credit note. `kind`: the method of a payment, or
    `credit_note`; `words`: its reference, or the note's number and reason."""

    kind: str
    words: str
    amount_coins: int
    created_at: datetime


def entries_query(*, org_id: str, invoice_id: str) -> Query[list[SettlementEntry]]:
    """Return the query of the payments and credit notes of an invoice, the newest first."""
    paid, note = invoice_payments.c, credit_notes.c
    payments = sa.select(
        paid.method.label("kind"), paid.reference.label("words"), paid.amount_coins, paid.created_at
    ).where(paid.org_id == org_id, paid.invoice_id == invoice_id)
    notes = sa.select(
        sa.literal("credit_note"),
        note.number + sa.literal(": ") + note.reason,
        note.total_coins,
        note.created_at,
    ).where(note.org_id == org_id, note.invoice_id == invoice_id)
    found = payments.union_all(notes).order_by(sa.desc("created_at"))
    return Query(found, lambda rows: [read_struct(SettlementEntry, row) for row in rows])
