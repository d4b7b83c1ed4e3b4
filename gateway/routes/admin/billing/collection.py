"""/v1/admin/credit-notes and /v1/admin/payments: what was taken back and paid of an org's invoices,
and of one invoice which credits have paid it; /v1/admin/journal: what was asked of an org and paid
by it, in double entry, for beancount or hledger.

Notes and payments are made below the invoice that they are of (`billing_account`). Amounts are in
the currency of that invoice.
"""

from __future__ import annotations

from typing import Annotated, Any

import sqlalchemy as sa
from litestar import Response
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.invoices.balance import paid_by_credits
from billing.invoices.collection import read_notes, select_notes, select_payments, to_payment
from billing.invoices.invoice import get_invoice
from billing.invoices.tables import credit_notes
from billing.invoices.tables import invoices as table
from billing.money import format_usd
from gateway.routes.admin.billing.invoice_exports import BEANCOUNT, HLEDGER, Ledgers, journal
from gateway.routes.admin.billing.invoices import invoices
from gateway.routes.shared.pages import keyset
from gateway.routes.shared.resource import AdminRequest, AdminResource, read_rows
from gateway.wire.admin.billing.invoices import (
    CreditNoteView,
    PaidView,
    PaymentView,
    to_note_view,
    to_payment_view,
)
from gateway.wire.shared.page_query import OrgPageQuery, OrgQuery

InvoiceId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,200}\Z")]


class OfInvoiceQuery(OrgPageQuery):
    invoice_id: InvoiceId | None = None
    """Lists only entries of this invoice."""


notes = AdminResource[CreditNoteView](
    path="/v1/admin/credit-notes", tag="Invoices", view=CreditNoteView
)
payments = AdminResource[PaymentView](path="/v1/admin/payments", tag="Invoices", view=PaymentView)
credits = invoices.below(
    "/credits",
    PaidView,
    show=lambda row: PaidView(id=row.id, paid_usd=format_usd(int(row.amount_pico))),
)


async def currencies(conn: AsyncConnection, org_id: str, ids: set[str]) -> dict[str, str]:
    """Return the currency of each invoice."""
    own = table.c
    found = sa.select(own.id, own.currency).where(own.org_id == org_id, own.id.in_(ids))
    return {row.id: row.currency for row in await conn.execute(found)}


@notes.page("List the credit notes of an organization, or of one invoice", OfInvoiceQuery)
async def list_notes(
    request: AdminRequest, query: OfInvoiceQuery
) -> tuple[list[CreditNoteView], bool]:
    async with request.system_db.connect() as conn:
        selected = select_notes(request.org_id, query.invoice_id)
        found = await read_notes(conn, keyset(selected, credit_notes.c.id, query))
        of = await currencies(conn, request.org_id, {each.invoice_id for each in found})
    views = [to_note_view(each, of[each.invoice_id]) for each in found]
    return views[: query.limit], len(views) > query.limit


@payments.page("List the payments of an organization, or of one invoice", OfInvoiceQuery)
async def list_payments(
    request: AdminRequest, query: OfInvoiceQuery
) -> tuple[list[PaymentView], bool]:
    async with request.system_db.connect() as conn:
        selected = select_payments(request.org_id, query.invoice_id)
        rows, more = await read_rows(conn, selected, query)
        found = [to_payment(row) for row in rows]
        of = await currencies(conn, request.org_id, {each.invoice_id for each in found})
    return [to_payment_view(each, of[each.invoice_id]) for each in found], more


@credits.page("Which credits have paid how much of the usage that an invoice charges", OrgPageQuery)
async def list_credits(
    request: AdminRequest, query: OrgPageQuery
) -> tuple[list[sa.Row[Any]], bool]:
    async with request.reading() as conn:
        invoice = await get_invoice(conn, **request.where)
        return await read_rows(conn, paid_by_credits(invoice), query)


class JournalQuery(OrgQuery):
    format: Ledgers = "beancount"


@invoices.get(
    "The journal of an organization: its credits, final invoices, credit notes, payments",
    path="/v1/admin/journal",
    query=JournalQuery,
    said={200: {BEANCOUNT: str, HLEDGER: str}},
)
async def retrieve(request: AdminRequest, query: JournalQuery) -> Response[Any]:
    return await journal(request.system_db, org_id=request.org_id, format=query.format)


routes = [list_notes, list_payments, list_credits, retrieve]
