"""/v1/admin/invoices: what clients write and read. Amounts are decimal texts: `total` and `amount`
in the invoice's currency, with its places; `*_usd` exact, to the pico. Moments are Unix seconds.
"""

from __future__ import annotations

import msgspec

from billing.currency import USD, format_coins
from billing.invoices.collection import CreditNote, Payment
from billing.invoices.documents.document import Document
from billing.invoices.invoice import Invoice, InvoiceLine
from billing.invoices.states import Amounts
from billing.money import Pico, format_usd


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
    """By credit notes."""
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


def _usd(amount: Pico | None) -> str | None:
    return None if amount is None else format_usd(amount)


def to_view(invoice: Invoice, amounts: Amounts | None) -> InvoiceView:
    """Return an invoice as clients read it. `amounts` None: a draft."""
    credited, settled, due = (
        (None, None, None) if amounts is None else (amounts.credited, amounts.settled, amounts.due)
    )
    final, due_at = invoice.finalized_at, invoice.due_at
    return InvoiceView(
        id=invoice.id,
        org_id=invoice.org_id,
        number=invoice.number,
        state=invoice.state,
        currency=invoice.currency,
        period_start=int(invoice.period_start.timestamp()),
        period_end=int(invoice.period_end.timestamp()),
        exact_usd=format_usd(invoice.exact_pico),
        residual_usd=_usd(invoice.residual_pico),
        coin_usd=_usd(invoice.coin_pico),
        total=_coins(invoice.total_coins, invoice.currency),
        credited=_coins(credited, invoice.currency),
        settled=_coins(settled, invoice.currency),
        due=_coins(due, invoice.currency),
        finalized_at=None if final is None else int(final.timestamp()),
        due_at=None if due_at is None else int(due_at.timestamp()),
    )


def to_line_view(line: InvoiceLine, currency: str = USD) -> LineView:
    return LineView(
        id=line.id,
        kind=line.kind,
        usage_start=int(line.usage_start.timestamp()),
        usage_end=int(line.usage_end.timestamp()),
        project_id=line.project,
        model=line.model,
        tier=line.tier,
        component=line.component,
        price_id=line.price_id or None,
        unit_usd=_usd(line.pico_per_token),
        quantity=line.quantity,
        num_requests=line.num_requests,
        exact_usd=format_usd(line.exact_pico),
        amount=_coins(line.amount_coins, currency),
        residual_usd=_usd(line.residual_pico),
    )


def to_note_view(note: CreditNote, currency: str) -> CreditNoteView:
    return CreditNoteView(
        id=note.id,
        invoice_id=note.invoice_id,
        number=note.number,
        reason=note.reason,
        total=format_coins(note.total_coins, currency),
        lines={line: format_coins(coins, currency) for line, coins in note.lines.items()},
        created_at=int(note.created_at.timestamp()),
    )


def to_payment_view(payment: Payment, currency: str) -> PaymentView:
    return PaymentView(
        id=payment.id,
        invoice_id=payment.invoice_id,
        method=payment.method,
        reference=payment.reference,
        amount=format_coins(payment.amount_coins, currency),
        created_at=int(payment.created_at.timestamp()),
    )
