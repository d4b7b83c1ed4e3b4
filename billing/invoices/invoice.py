"""Invoices, their lines, payments and numbers, and the one function that changes their state.

Every change of state is also a row of `invoice_transitions`, the outbox of their webhooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.calendar import Period
from billing.errors import NoInvoice
from billing.invoices.lines.charges import Kind
from billing.invoices.states import DRAFT, OPEN, Amounts, State, settled_state
from billing.invoices.tables import (
    credit_notes,
    invoice_counters,
    invoice_lines,
    invoice_payments,
    invoice_transitions,
    invoices,
)
from billing.money import Pico
from billing.queries import Query
from billing.tables import AnyRow, read_struct

Series = Literal["invoice", "credit_note"]
MARKS: dict[Series, str] = {"invoice": "", "credit_note": "CN-"}
MIN_DIGITS = 6


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """A draft or a final invoice. A draft has no number and dates yet, and no coins while its
    currency has no rate for its period."""

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
    """A line of an invoice: exact = amount x coin + residual."""

    id: str
    position: int
    kind: Kind
    usage_start: datetime
    usage_end: datetime
    """The end of the period that the usage belongs to."""
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


class Payment(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    invoice_id: str
    method: Literal["received", "balance"]
    """`balance`: paid by credits; a negative amount is given back to them."""
    reference: str
    amount_coins: int
    created_at: datetime


def to_invoice(row: sa.Row[Any]) -> Invoice:
    return read_struct(Invoice, row)


def to_line(row: sa.Row[Any]) -> InvoiceLine:
    return read_struct(InvoiceLine, row)


def invoices_of(org_id: str) -> sa.Select[Any]:
    return sa.select(invoices).where(invoices.c.org_id == org_id)


def lines_of(org_id: str, invoice_id: str) -> sa.Select[Any]:
    own = invoice_lines.c
    return sa.select(invoice_lines).where(own.org_id == org_id, own.invoice_id == invoice_id)


async def get_invoice(
    conn: AsyncConnection, *, org_id: str, invoice_id: str, lock: bool = False
) -> Invoice:
    """Return an invoice. Raises: NoInvoice."""
    found = invoices_of(org_id).where(invoices.c.id == invoice_id)
    row = (await conn.execute(found.with_for_update() if lock else found)).one_or_none()
    if row is None:
        raise NoInvoice("invoice_id", f"no invoice {invoice_id!r}")
    return to_invoice(row)


async def get_lines(conn: AsyncConnection, *, org_id: str, invoice_id: str) -> list[InvoiceLine]:
    """Return all lines of an invoice, in order."""
    ordered = lines_of(org_id, invoice_id).order_by(invoice_lines.c.position)
    return [to_line(row) for row in await conn.execute(ordered)]


async def get_line(conn: AsyncConnection, invoice: Invoice, line_id: str) -> InvoiceLine:
    """Return a line of an invoice. Raises: NoInvoice."""
    found = lines_of(invoice.org_id, invoice.id).where(invoice_lines.c.id == line_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NoInvoice("line_id", f"no line {line_id!r}")
    return to_line(row)


async def latest_invoice(
    conn: AsyncConnection, *, org_id: str, before: datetime | None = None
) -> Invoice | None:
    """Return the invoice of the last period, or of the last one that begins before a moment."""
    found = invoices_of(org_id)
    if before is not None:
        found = found.where(invoices.c.period_start < before)
    newest = found.order_by(invoices.c.period_start.desc()).limit(1)
    row = (await conn.execute(newest)).one_or_none()
    return None if row is None else to_invoice(row)


async def final_invoices_of(conn: AsyncConnection, *, org_id: str) -> Sequence[str]:
    """Return the ids of an org's final invoices, by period."""
    own = invoices.c
    found = sa.select(own.id).where(own.org_id == org_id, own.state != DRAFT)
    return (await conn.execute(found.order_by(own.period_start))).scalars().all()


async def amounts_of(conn: AsyncConnection, invoice: Invoice) -> Amounts:
    """Return the amounts of a final invoice."""
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


def _sum_of(amount: sa.Column[Any]) -> sa.ScalarSelect[Any]:
    """Return the sum of a column of credit notes or payments, over those of an invoice."""
    found = sa.select(sa.func.coalesce(sa.func.sum(amount), 0))
    return found.where(amount.table.c.invoice_id == invoices.c.id).scalar_subquery()


CREDITED = _sum_of(credit_notes.c.total_coins)
SETTLED = _sum_of(invoice_payments.c.amount_coins)


def with_amounts(org_id: str, *, state: State | None = None) -> sa.Select[Any]:
    """Select an org's invoices with what was credited and settled of each, for `to_amounts`.
    `state`: None: those in any."""
    found = sa.select(invoices, CREDITED.label("credited"), SETTLED.label("settled"))
    found = found.where(invoices.c.org_id == org_id)
    return found if state is None else found.where(invoices.c.state == state)


def amounts_query(*, org_id: str, invoice_id: str) -> Query[tuple[Invoice, Amounts | None]]:
    """Return the query of an invoice and its amounts; None of a draft. It raises NoInvoice."""

    def read(rows: Sequence[AnyRow]) -> tuple[Invoice, Amounts | None]:
        if not rows:
            raise NoInvoice("invoice_id", f"no invoice {invoice_id!r}")
        [row] = rows
        return to_invoice(row), to_amounts(row)

    return Query(with_amounts(org_id).where(invoices.c.id == invoice_id), read)


class OpenInvoices(msgspec.Struct, frozen=True, kw_only=True):
    """The invoices of one currency that are left to pay."""

    currency: str
    number: int
    due_coins: int
    num_late: int
    oldest_due_at: datetime


def open_invoices_query(org_id: str, now: datetime) -> Query[list[OpenInvoices]]:
    """Return the query of what is left to pay of an org's invoices, by currency."""
    own = invoices.c
    late = sa.func.count().filter(own.due_at <= now)
    found = sa.select(
        own.currency,
        sa.func.count().label("number"),
        sa.func.sum(own.total_coins - CREDITED - SETTLED).label("due_coins"),
        late.label("num_late"),
        sa.func.min(own.due_at).label("oldest_due_at"),
    )
    found = found.where(own.org_id == org_id, own.state.in_(sorted(OPEN)))
    found = found.group_by(own.currency).order_by(own.currency)
    return Query(found, lambda rows: [read_struct(OpenInvoices, row) for row in rows])


def to_amounts(row: sa.Row[Any]) -> Amounts | None:
    """Return the amounts of a row of `with_amounts`; None of a draft."""
    if row.state == DRAFT:
        return None
    amounts = (row.total_coins, row.credited, row.settled)
    total, credited, settled = map(int, amounts)
    return Amounts(total=total, credited=credited, settled=settled)


async def pay(conn: AsyncConnection, org_id: str, payment: Payment) -> None:
    row = {"org_id": org_id, **msgspec.structs.asdict(payment)}
    await conn.execute(sa.insert(invoice_payments), row)


async def next_number(conn: AsyncConnection, issuer: str, series: Series) -> tuple[int, str]:
    """Draw the next number of a series, without gaps: others wait until the transaction ends."""
    first = insert(invoice_counters).values(issuer=issuer, series=series, last=1)
    grown = first.on_conflict_do_update(
        index_elements=["issuer", "series"], set_={"last": invoice_counters.c.last + 1}
    )
    sequence = (await conn.execute(grown.returning(invoice_counters.c.last))).scalar_one()
    return sequence, f"{issuer}-{MARKS[series]}{sequence:0{MIN_DIGITS}}"


async def enter(conn: AsyncConnection, invoice: Invoice, state: State, now: datetime) -> Invoice:
    """Change the state of an invoice, unless it is in it. The caller has locked it."""
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
    """Change the state of an invoice to that of its amounts. The caller has locked it."""
    amounts = await amounts_of(conn, invoice)
    return await enter(conn, invoice, settled_state(invoice.state, amounts), now)
