"""/v1/admin/credit-notes and /v1/admin/payments: what was taken back and paid of an org's invoices,
and of one invoice which credits have paid it.

They are made below the invoice that they are of (`billing_account`). Amounts are in the currency of
that invoice.
"""

from __future__ import annotations

from typing import Annotated

import sqlalchemy as sa
from litestar import Response, get
from litestar.params import FromPath
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.invoices.balance import paid_by_credits
from billing.invoices.collection import read_notes, select_notes, select_payments, to_payment
from billing.invoices.invoice import get_invoice
from billing.invoices.tables import credit_notes, invoice_payments, invoices
from billing.money import format_usd
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.admin.billing.invoices import INVOICE, TAGS, InvoicesQuery, page
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, keyset, to_listing
from gateway.routes.shared.resource import check_id, org_of
from gateway.wire.admin.billing.invoices import (
    CreditNoteView,
    PaidView,
    PaymentView,
    to_note_view,
    to_payment_view,
)
from gateway.wire.organization.usage import parse_query

InvoiceId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,200}\Z")]


class OfInvoiceQuery(InvoicesQuery):
    invoice_id: InvoiceId | None = None
    """Of this one alone."""


async def currencies(conn: AsyncConnection, org_id: str, ids: set[str]) -> dict[str, str]:
    """Return the currency of each invoice."""
    own = invoices.c
    found = sa.select(own.id, own.currency).where(own.org_id == org_id, own.id.in_(ids))
    return {row.id: row.currency for row in await conn.execute(found)}


@get(
    "/v1/admin/credit-notes",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the credit notes of an organization, or of one invoice",
    operation_class=describes(query=OfInvoiceQuery, answer=Listing[CreditNoteView]),
)
async def list_notes(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, OfInvoiceQuery)
    org_id, _ = org_of(request.user, query.org_id)
    async with services(request).system_db.connect() as conn:
        selected = select_notes(org_id, query.invoice_id)
        notes = await read_notes(conn, keyset(selected, credit_notes.c.id, query))
        of = await currencies(conn, org_id, {each.invoice_id for each in notes})
    found = [to_note_view(each, of[each.invoice_id]) for each in notes]
    return answer(request, to_listing(found, query))


@get(
    "/v1/admin/payments",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the payments of an organization, or of one invoice",
    operation_class=describes(query=OfInvoiceQuery, answer=Listing[PaymentView]),
)
async def list_payments(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, OfInvoiceQuery)
    org_id, _ = org_of(request.user, query.org_id)
    async with services(request).system_db.connect() as conn:
        selected = select_payments(org_id, query.invoice_id)
        rows = await conn.execute(keyset(selected, invoice_payments.c.id, query))
        payments = [to_payment(row) for row in rows]
        of = await currencies(conn, org_id, {each.invoice_id for each in payments})
    found = [to_payment_view(each, of[each.invoice_id]) for each in payments]
    return answer(request, to_listing(found, query))


@get(
    INVOICE + "/credits",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="Which credits have paid how much of the usage that an invoice charges",
    operation_class=describes(query=InvoicesQuery, answer=Listing[PaidView]),
)
async def list_credits(request: AuthenticatedRequest, invoice_id: FromPath[str]) -> Response[bytes]:
    query = parse_query(request.url.query, InvoicesQuery)
    org_id, _ = org_of(request.user, query.org_id)
    check_id("invoice_id", invoice_id)
    async with services(request).system_db.connect() as conn:
        invoice = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
        rows = await page(conn, paid_by_credits(invoice), query)
    found = [PaidView(id=row.id, paid_usd=format_usd(int(row.amount_pico))) for row in rows]
    return answer(request, to_listing(found, query))


routes = [list_notes, list_payments, list_credits]
