"""A final invoice with all that belongs to it: what documents are made of.

Above: the documents beside it, the gateway's exports. Below: `invoice`, `collection`.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.currency import format_coins
from billing.errors import InvoicingConflict
from billing.invoices.collection import CreditNote, Payment, notes_of, payments_of
from billing.invoices.invoice import Invoice, Line, amounts_of, get_invoice, get_lines
from billing.invoices.states import DRAFT, Amounts


class Document(msgspec.Struct, frozen=True, kw_only=True):
    invoice: Invoice
    lines: list[Line]
    amounts: Amounts
    notes: list[CreditNote]
    payments: list[Payment]

    @property
    def number(self) -> str:
        assert self.invoice.number is not None
        return self.invoice.number

    @property
    def coin_pico(self) -> int:
        assert self.invoice.coin_pico is not None
        return self.invoice.coin_pico

    @property
    def finalized_at(self) -> datetime:
        assert self.invoice.finalized_at is not None
        return self.invoice.finalized_at

    def money(self, coins: int | None) -> str:
        """In the invoice's currency."""
        assert coins is not None
        return format_coins(coins, self.invoice.currency)


async def read_document(conn: AsyncConnection, *, org_id: str, invoice_id: str) -> Document:
    """Raises: NoInvoice; InvoicingConflict of a draft."""
    invoice = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
    if invoice.state == DRAFT:
        raise InvoicingConflict("invoice_id", "it is a draft")
    return Document(
        invoice=invoice,
        lines=await get_lines(conn, org_id=org_id, invoice_id=invoice_id),
        amounts=await amounts_of(conn, invoice),
        notes=await notes_of(conn, org_id=org_id, invoice_id=invoice_id),
        payments=await payments_of(conn, org_id=org_id, invoice_id=invoice_id),
    )


def moment(at: datetime) -> str:
    """ISO 8601, UTC."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
