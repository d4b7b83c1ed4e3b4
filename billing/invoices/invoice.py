"""An invoice and its lines as they stand, and the one way into another state.

Every change of state is a row of `invoice_transitions` in the same transaction, which is the outbox
of the webhooks that tell of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.calendar import Period
from billing.errors import NoInvoice
from billing.invoices.lines.charges import Kind
from billing.invoices.states import DRAFT, Amounts, State, settled_state
from billing.invoices.tables import (
    credit_notes,
    invoice_lines,
    invoice_payments,
    invoice_transitions,
    invoices,
)
from billing.money import Pico


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """`coin_pico`, `total_coins` and `residual_pico` are None of a draft whose currency has no rate
    for its period yet; what is numbered and dated is None of every draft."""

    id: str
    org_id: str
    account_version: int
    currency: str
    issuer: str
    state: State
    state_since: datetime
    period_start: datetime
    period_end: datetime
    created_at: datetime
    since: int
    cutoff: int
    exact_pico: Pico
    coin_pico: Pico | None
    rate_from: datetime | None
    total_coins: int | None
    residual_pico: Pico | None
    sequence: int | None
    number: str | None
    finalized_at: datetime | None
    due_at: datetime | None

    @property
    def period(self) -> Period:
        return Period(self.period_start, self.period_end)


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """exact = amount x coin + residual."""

    id: str
    position: int
    kind: Kind
    usage_start: datetime
    usage_end: datetime
    """The period that the usage belongs to."""
    project: str
    model: str
    tier: str
    component: str
    price_id: str
    pico_per_token: int | None
    quantity: int
    num_requests: int
    exact_pico: Pico
    amount_coins: int | None
    residual_pico: Pico | None


def _converted(row: sa.Row[Any], names: tuple[str, ...]) -> dict[str, Any]:
    """numeric to int, moments to UTC."""
    found: dict[str, Any] = {}
    for name in names:
        value = getattr(row, name)
        if isinstance(value, datetime):
            value = value.astimezone(UTC)
        elif value is not None and not isinstance(value, str):
            value = int(value)
        found[name] = value
    return found


def to_invoice(row: sa.Row[Any]) -> Invoice:
    return Invoice(**_converted(row, Invoice.__struct_fields__))


def to_line(row: sa.Row[Any]) -> InvoiceLine:
    return InvoiceLine(**_converted(row, InvoiceLine.__struct_fields__))


def invoices_of(org_id: str) -> sa.Select[Any]:
    """For a page of them."""
    return sa.select(invoices).where(invoices.c.org_id == org_id)


def lines_of(org_id: str, invoice_id: str) -> sa.Select[Any]:
    own = invoice_lines.c
    return sa.select(invoice_lines).where(own.org_id == org_id, own.invoice_id == invoice_id)


async def get_invoice(
    conn: AsyncConnection, *, org_id: str, invoice_id: str, lock: bool = False
) -> Invoice:
    """Raises: NoInvoice."""
    found = invoices_of(org_id).where(invoices.c.id == invoice_id)
    row = (await conn.execute(found.with_for_update() if lock else found)).one_or_none()
    if row is None:
        raise NoInvoice("invoice_id", f"no invoice {invoice_id!r}")
    return to_invoice(row)


async def get_lines(conn: AsyncConnection, *, org_id: str, invoice_id: str) -> list[InvoiceLine]:
    """All, in order."""
    ordered = lines_of(org_id, invoice_id).order_by(invoice_lines.c.position)
    return [to_line(row) for row in await conn.execute(ordered)]


async def get_line(conn: AsyncConnection, invoice: Invoice, line_id: str) -> InvoiceLine:
    """Raises: NoInvoice."""
    found = lines_of(invoice.org_id, invoice.id).where(invoice_lines.c.id == line_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NoInvoice("line_id", f"no line {line_id!r}")
    return to_line(row)


async def latest_invoice(
    conn: AsyncConnection, *, org_id: str, before: datetime | None = None
) -> Invoice | None:
    """Return the invoice of the newest period, or of the newest that begins before a moment."""
    found = invoices_of(org_id)
    if before is not None:
        found = found.where(invoices.c.period_start < before)
    newest = found.order_by(invoices.c.period_start.desc()).limit(1)
    row = (await conn.execute(newest)).one_or_none()
    return None if row is None else to_invoice(row)


async def final_invoices_of(conn: AsyncConnection, *, org_id: str) -> Sequence[str]:
    """Their ids, by period."""
    own = invoices.c
    found = sa.select(own.id).where(own.org_id == org_id, own.state != DRAFT)
    return (await conn.execute(found.order_by(own.period_start))).scalars().all()


async def amounts_of(conn: AsyncConnection, invoice: Invoice) -> Amounts:
    """Return the amounts of an invoice that was finalized."""
    assert invoice.total_coins is not None
    totals = [
        sa.select(sa.func.coalesce(sa.func.sum(amount), 0))
        .where(table.c.invoice_id == invoice.id)
        .scalar_subquery()
        for table, amount in (
            (credit_notes, credit_notes.c.total_coins),
            (invoice_payments, invoice_payments.c.amount_coins),
        )
    ]
    credited, settled = (await conn.execute(sa.select(*totals))).one()
    return Amounts(total=invoice.total_coins, credited=int(credited), settled=int(settled))


async def pay(
    conn: AsyncConnection,
    invoice: Invoice,
    *,
    payment_id: str,
    method: Literal["received", "balance"],
    amount_coins: int,
    reference: str,
    now: datetime,
) -> None:
    row = {
        "id": payment_id,
        "org_id": invoice.org_id,
        "invoice_id": invoice.id,
        "method": method,
        "reference": reference,
        "amount_coins": amount_coins,
        "created_at": now,
    }
    await conn.execute(sa.insert(invoice_payments), row)


async def enter(conn: AsyncConnection, invoice: Invoice, state: State, now: datetime) -> Invoice:
    """Into `state`, if it is not in it. The caller holds its lock."""
    if state == invoice.state:
        return invoice
    own = invoices.c
    changed = sa.update(invoices).where(own.org_id == invoice.org_id, own.id == invoice.id)
    await conn.execute(changed.values(state=state, state_since=now))
    await note(conn, invoice, state, now)
    return msgspec.structs.replace(invoice, state=state, state_since=now)


async def note(conn: AsyncConnection, invoice: Invoice, state: State, now: datetime) -> None:
    row = {
        "id": f"{invoice.id}.{state}",
        "org_id": invoice.org_id,
        "invoice_id": invoice.id,
        "state": state,
        "occurred_at": now,
    }
    await conn.execute(sa.insert(invoice_transitions), row)


async def settle(conn: AsyncConnection, invoice: Invoice, now: datetime) -> Invoice:
    """Into the state that its amounts say. The caller holds its lock."""
    amounts = await amounts_of(conn, invoice)
    return await enter(conn, invoice, settled_state(invoice.state, amounts), now)
