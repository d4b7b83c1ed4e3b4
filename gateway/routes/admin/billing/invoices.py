"""/v1/admin/invoices: invoices with their lines, and what is behind each line, down to requests.

Who may read the administration of an org reads its invoices; an operator names another org by
`org_id`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import sqlalchemy as sa
from litestar import Response
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.invoices.documents.drilldown import has_requests, hours_of, requests_of, tags_of
from billing.invoices.invoice import (
    Invoice,
    InvoiceLine,
    amounts_of,
    get_invoice,
    get_line,
    lines_of,
    to_amounts,
    to_invoice,
    to_line,
    with_amounts,
)
from billing.invoices.states import DRAFT
from gateway.request_errors import BadField
from gateway.routes.admin.billing.invoice_exports import (
    SAID,
    Format,
    exported,
)
from gateway.routes.shared.access import needs
from gateway.routes.shared.problem import MEDIA_TYPE, Problem
from gateway.routes.shared.resource import AdminRequest, AdminResource, read_rows
from gateway.wire.admin.billing.invoices import (
    HourView,
    InvoiceView,
    LineView,
    RequestView,
    TaggedView,
    to_line_view,
    to_view,
    with_amount,
)
from gateway.wire.shared.page_query import OrgPageQuery, OrgQuery

HOUR_FORM = "%Y-%m-%dT%HZ"
Hour = Annotated[str, Meta(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])-([0-2][0-9])T([01][0-9]|2[0-3])Z\Z")]
Rows = tuple[list[sa.Row[Any]], bool]


class ExportQuery(OrgQuery):
    format: Format = "json"


class RequestsQuery(OrgPageQuery):
    hour: Hour | None = None
    """Lists only requests of this hour, named as the hours of the invoice line name it."""


invoices = AdminResource[InvoiceView](
    path="/v1/admin/invoices",
    id_name="invoice_id",
    tag="Invoices",
    change=needs("operator:orgs"),
    view=InvoiceView,
    in_any_org=True,
    in_system=True,
)
lines = invoices.below("/lines", LineView, id_name="line_id")
hours = lines.below("/hours", HourView, show=partial(with_amount, HourView))
requests = lines.below(
    "/requests", RequestView, show=lambda row: with_amount(RequestView, row, api_key_id=row.key)
)
tags = lines.below("/tags", TaggedView, show=partial(with_amount, TaggedView))


async def viewed(conn: AsyncConnection, invoice: Invoice) -> InvoiceView:
    amounts = None if invoice.state == DRAFT else await amounts_of(conn, invoice)
    return to_view(invoice, amounts)


@invoices.page("List the invoices of an organization", OrgPageQuery)
async def list_(request: AdminRequest, query: OrgPageQuery) -> tuple[list[InvoiceView], bool]:
    async with request.reading() as conn:
        rows, more = await read_rows(conn, with_amounts(request.org_id), query)
    return [to_view(to_invoice(row), to_amounts(row)) for row in rows], more


@invoices.get("One invoice")
async def retrieve(request: AdminRequest) -> InvoiceView:
    async with request.reading() as conn:
        return await viewed(conn, await get_invoice(conn, **request.where))


@lines.page("The lines of an invoice", OrgPageQuery)
async def list_lines(request: AdminRequest, query: OrgPageQuery) -> tuple[list[LineView], bool]:
    async with request.reading() as conn:
        invoice = await get_invoice(conn, **request.where)
        rows, more = await read_rows(conn, lines_of(request.org_id, request.id), query)
    return [to_line_view(to_line(row), invoice.currency) for row in rows], more


async def rows_behind(
    request: AdminRequest,
    query: OrgPageQuery,
    rows_of: Callable[[Invoice, InvoiceLine], sa.Select[Any]],
) -> Rows:
    """Return a page of the requests behind a line; none behind a line that no request made.

    Raises: NoInvoice.
    """
    async with request.reading() as conn:
        invoice_id, line_id = request.ids["invoice_id"], request.ids["line_id"]
        invoice = await get_invoice(conn, org_id=request.org_id, invoice_id=invoice_id)
        line = await get_line(conn, invoice, line_id)
        if not has_requests(line):
            return [], False
        return await read_rows(conn, rows_of(invoice, line), query)


@hours.page("The hours behind a line", OrgPageQuery)
async def list_hours(request: AdminRequest, query: OrgPageQuery) -> Rows:
    return await rows_behind(request, query, hours_of)


@requests.page("The requests behind a line", RequestsQuery)
async def list_requests(request: AdminRequest, query: RequestsQuery) -> Rows:
    hour = None if query.hour is None else to_hour(query.hour)
    return await rows_behind(request, query, partial(requests_of, hour=hour))


@tags.page("What the requests behind a line were tagged with", OrgPageQuery)
async def list_tags(request: AdminRequest, query: OrgPageQuery) -> Rows:
    return await rows_behind(request, query, tags_of)


@invoices.get(
    "A final invoice as a document: JSON, CSV, tags, PDF, FOCUS, Parquet, a journal",
    path=invoices.one + "/export",
    query=ExportQuery,
    said={200: SAID, 409: {MEDIA_TYPE: Problem}},
)
async def export(request: AdminRequest, query: ExportQuery) -> Response[Any]:
    return await exported(request.system_db, **request.where, format=query.format)


def to_hour(text: str) -> datetime:
    """Raises: BadField of a day that no month has."""
    try:
        return datetime.strptime(text, HOUR_FORM).replace(tzinfo=UTC)
    except ValueError:
        raise BadField("Invalid value for 'hour': no such day.", param="hour") from None


routes = [
    list_,
    retrieve,
    list_lines,
    list_hours,
    list_requests,
    list_tags,
    export,
]
