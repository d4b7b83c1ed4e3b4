"""/v1/admin/invoices: what clients write and read. Amounts are decimal texts: `total` and `amount`
in the invoice's currency, with its places; `*_usd` exact, to the pico. Moments are Unix seconds.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from billing.currency import USD, format_coins
from billing.invoices.collection import CreditNote
from billing.invoices.documents.document import Document
from billing.invoices.invoice import Invoice, InvoiceLine, Payment
from billing.invoices.states import Amounts
from billing.money import format_usd
from gateway.wire.shared.resource import view_of

S = TypeVar("S", bound=msgspec.Struct)


class InvoiceView(msgspec.Struct, frozen=True, kw_only=True):
    """An invoice. Fields that it gets when it is final are null in a draft. `exact_usd` = `total`
    in coins of `coin_usd`, plus `residual_usd`."""

    object: str = "invoice"
    id: str
    org_id: str
    number: str | None
    state: str
    currency: str
    period_start: int
    period_end: int
    exact_usd: str
    residual_usd: str | None
    coin_usd: str | None
    """The value of the currency's smallest coin."""
    total: str | None
    credited: str | None
    """The sum of its credit notes."""
    settled: str | None
    """Paid, or taken from what was paid in advance."""
    due: str | None
    finalized_at: int | None
    due_at: int | None


class LineView(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an invoice. `kind`: usage of the period, `late` usage of an earlier one, a
    `correction` of what was booked before, or an `adjustment` that only the whole period could
    say."""

    object: str = "invoice.line"
    id: str
    kind: str
    usage_start: int
    usage_end: int
    project_id: str
    model: str
    tier: str
    component: str
    price_id: str | None
    unit_usd: str | None
    quantity: int
    num_requests: int
    exact_usd: str
    amount: str | None
    residual_usd: str | None


class HourView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "invoice.hour"
    id: str
    """Such as `2026-11-01T00Z`; `?hour=` of its requests."""
    quantity: int
    num_requests: int
    exact_usd: str


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "invoice.request"
    id: str
    request_id: str
    api_key_id: str
    admitted_at: int
    quantity: int
    exact_usd: str


class TaggedView(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of requests with these tags and no others; without tags: of requests that had
    none."""

    object: str = "invoice.tags"
    id: str
    tags: dict[str, str]
    quantity: int
    num_requests: int
    exact_usd: str


class CreditNoteView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "credit_note"
    id: str
    invoice_id: str
    number: str
    reason: str
    total: str
    lines: dict[str, str]
    created_at: int


class PaymentView(msgspec.Struct, frozen=True, kw_only=True):
    """A payment. `method`: `received`, or `balance`, of what was paid in advance; less than nothing
    where it was given back."""

    object: str = "invoice.payment"
    id: str
    invoice_id: str
    method: str
    reference: str
    amount: str
    created_at: int


class PaidView(msgspec.Struct, frozen=True, kw_only=True):
    """The amount that a credit has paid."""

    object: str = "invoice.credit"
    id: str
    paid_usd: str


class InvoiceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """An invoice with all that belongs to it."""

    object: str = "invoice.document"
    invoice: InvoiceView
    lines: list[LineView]
    credit_notes: list[CreditNoteView]
    payments: list[PaymentView]


def to_document(document: Document) -> InvoiceDocument:
    currency = document.invoice.currency
    return InvoiceDocument(
        invoice=to_view(document.invoice, document.amounts),
        lines=[to_line_view(line, currency) for line in document.lines],
        credit_notes=[to_note_view(note, currency) for note in document.notes],
        payments=[to_payment_view(payment, currency) for payment in document.payments],
    )


def _coins(amount: int | None, currency: str) -> str | None:
    return None if amount is None else format_coins(amount, currency)


def to_view(invoice: Invoice, amounts: Amounts | None) -> InvoiceView:
    """Return an invoice as clients read it. `amounts` None: a draft."""
    coins = {
        name: _coins(getattr(amounts, name, None), invoice.currency)
        for name in ("credited", "settled", "due")
    }
    return view_of(
        InvoiceView, invoice, total=_coins(invoice.total_coins, invoice.currency), **coins
    )


def to_line_view(line: InvoiceLine, currency: str = USD) -> LineView:
    unit = line.pico_per_token
    return view_of(
        LineView,
        line,
        project_id=line.project,
        price_id=line.price_id or None,
        unit_usd=None if unit is None else format_usd(unit),
        amount=_coins(line.amount_coins, currency),
    )


def to_note_view(note: CreditNote, currency: str) -> CreditNoteView:
    lines = {line: format_coins(coins, currency) for line, coins in note.lines.items()}
    total = format_coins(note.total_coins, currency)
    return view_of(CreditNoteView, note, total=total, lines=lines)


def to_payment_view(payment: Payment, currency: str) -> PaymentView:
    return view_of(PaymentView, payment, amount=format_coins(payment.amount_coins, currency))


def with_amount(kind: type[S], row: Any, **others: Any) -> S:
    """Show a row of what is behind a line, whose sums are decimals of Postgres."""
    exact = format_usd(int(row.amount_pico))
    return view_of(kind, row, quantity=int(row.quantity), exact_usd=exact, **others)
