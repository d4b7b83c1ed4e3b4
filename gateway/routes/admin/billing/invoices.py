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
from litestar import Response, get
from litestar.params import FromPath
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.invoices.documents.drilldown import has_requests, hours_of, requests_of, tags_of
from billing.invoices.invoice import (
    Invoice,
    InvoiceLine,
    amounts_of,
    get_invoice,
    get_line,
    invoices_of,
    lines_of,
    to_invoice,
    to_line,
)
from billing.invoices.states import DRAFT
from billing.invoices.tables import invoice_lines, invoices
from billing.money import format_usd
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.request_errors import BadField
from gateway.routes.admin.billing.invoice_exports import SAID, Format, exported
from gateway.routes.admin.billing.spend_caps import in_org
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.routes.shared.problem import MEDIA_TYPE, Problem
from gateway.routes.shared.resource import check_id, org_of
from gateway.wire.admin.billing.invoices import (
    HourView,
    InvoiceView,
    LineView,
    RequestView,
    TaggedView,
    to_line_view,
    to_view,
)
from gateway.wire.admin.billing.spend_caps import Id
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.page_query import OrgQuery

TAGS = ["Invoices"]
INVOICE = "/v1/admin/invoices/{invoice_id:str}"
LINE = INVOICE + "/lines/{line_id:str}"
HOUR_FORM = "%Y-%m-%dT%HZ"
Hour = Annotated[str, Meta(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])-([0-2][0-9])T([01][0-9]|2[0-3])Z\Z")]


class InvoicesQuery(PageQuery):
    """`org_id`: for operators, another org than their own."""

    org_id: Id | None = None


class ExportQuery(OrgQuery):
    format: Format = "json"


class RequestsQuery(InvoicesQuery):
    hour: Hour | None = None
    """Of this one alone, as the hours of the line name it."""


async def viewed(conn: AsyncConnection, invoice: Invoice) -> InvoiceView:
    amounts = None if invoice.state == DRAFT else await amounts_of(conn, invoice)
    return to_view(invoice, amounts)


@get(
    "/v1/admin/invoices",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the invoices of an organization",
    operation_class=describes(query=InvoicesQuery, answer=Listing[InvoiceView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, InvoicesQuery)
    org_id, _ = org_of(request.user, query.org_id)
    async with services(request).system_db.connect() as conn:
        rows = list(await conn.execute(keyset(invoices_of(org_id), invoices.c.id, query)))
        found = [await viewed(conn, to_invoice(row)) for row in rows]
    return answer(request, to_listing(found, query))


@get(
    INVOICE,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="One invoice",
    operation_class=describes(query=OrgQuery, answer=InvoiceView),
)
async def retrieve(request: AuthenticatedRequest, invoice_id: FromPath[str]) -> Response[bytes]:
    org_id, _ = in_org(request)
    check_id("invoice_id", invoice_id)
    async with services(request).system_db.connect() as conn:
        found = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
        view = await viewed(conn, found)
    return answer(request, view)


@get(
    INVOICE + "/lines",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="The lines of an invoice",
    operation_class=describes(query=InvoicesQuery, answer=Listing[LineView]),
)
async def list_lines(request: AuthenticatedRequest, invoice_id: FromPath[str]) -> Response[bytes]:
    query = parse_query(request.url.query, InvoicesQuery)
    org_id, _ = org_of(request.user, query.org_id)
    check_id("invoice_id", invoice_id)
    async with services(request).system_db.connect() as conn:
        invoice = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
        rows = await conn.execute(keyset(lines_of(org_id, invoice_id), invoice_lines.c.id, query))
        found = [to_line_view(to_line(row), invoice.currency) for row in rows]
    return answer(request, to_listing(found, query))


async def found_line(
    conn: AsyncConnection, org_id: str, invoice_id: str, line_id: str
) -> tuple[Invoice, InvoiceLine]:
    """Raises: NoInvoice."""
    check_id("invoice_id", invoice_id)
    check_id("line_id", line_id)
    invoice = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
    return invoice, await get_line(conn, invoice, line_id)


async def page(
    conn: AsyncConnection, selected: sa.Select[Any], query: PageQuery
) -> list[sa.Row[Any]]:
    return list(await conn.execute(keyset(selected, selected.selected_columns.id, query)))


async def rows_behind(
    request: AuthenticatedRequest,
    query: InvoicesQuery,
    invoice_id: str,
    line_id: str,
    rows_of: Callable[[Invoice, InvoiceLine], sa.Select[Any]],
) -> list[sa.Row[Any]]:
    """Return a page of the requests behind a line; none behind a line that no request made.

    Raises: NoInvoice.
    """
    org_id, _ = org_of(request.user, query.org_id)
    async with services(request).system_db.connect() as conn:
        invoice, line = await found_line(conn, org_id, invoice_id, line_id)
        return await page(conn, rows_of(invoice, line), query) if has_requests(line) else []


@get(
    LINE + "/hours",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="The hours behind a line",
    operation_class=describes(query=InvoicesQuery, answer=Listing[HourView]),
)
async def list_hours(
    request: AuthenticatedRequest, invoice_id: FromPath[str], line_id: FromPath[str]
) -> Response[bytes]:
    query = parse_query(request.url.query, InvoicesQuery)
    rows = await rows_behind(request, query, invoice_id, line_id, hours_of)
    found = [
        HourView(
            id=row.id,
            quantity=int(row.quantity),
            num_requests=row.num_requests,
            exact_usd=format_usd(int(row.amount_pico)),
        )
        for row in rows
    ]
    return answer(request, to_listing(found, query))


@get(
    LINE + "/requests",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="The requests behind a line",
    operation_class=describes(query=RequestsQuery, answer=Listing[RequestView]),
)
async def list_requests(
    request: AuthenticatedRequest, invoice_id: FromPath[str], line_id: FromPath[str]
) -> Response[bytes]:
    query = parse_query(request.url.query, RequestsQuery)
    hour = None if query.hour is None else to_hour(query.hour)
    rows_of = partial(requests_of, hour=hour)
    rows = await rows_behind(request, query, invoice_id, line_id, rows_of)
    found = [
        RequestView(
            id=row.id,
            request_id=row.request_id,
            api_key_id=row.key,
            admitted_at=int(row.admitted_at.timestamp()),
            quantity=int(row.quantity),
            exact_usd=format_usd(int(row.amount_pico)),
        )
        for row in rows
    ]
    return answer(request, to_listing(found, query))


@get(
    LINE + "/tags",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="What the requests behind a line were tagged with",
    operation_class=describes(query=InvoicesQuery, answer=Listing[TaggedView]),
)
async def list_tags(
    request: AuthenticatedRequest, invoice_id: FromPath[str], line_id: FromPath[str]
) -> Response[bytes]:
    query = parse_query(request.url.query, InvoicesQuery)
    rows = await rows_behind(request, query, invoice_id, line_id, tags_of)
    found = [
        TaggedView(
            id=row.id,
            tags=row.tags,
            quantity=int(row.quantity),
            num_requests=row.num_requests,
            exact_usd=format_usd(int(row.amount_pico)),
        )
        for row in rows
    ]
    return answer(request, to_listing(found, query))


@get(
    INVOICE + "/export",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="A final invoice as a document: JSON, CSV, tags, PDF, FOCUS, Parquet, a journal",
    operation_class=describes(
        query=ExportQuery,
        said={
            200: SAID,
            409: {MEDIA_TYPE: Problem},
        },
    ),
)
async def export(request: AuthenticatedRequest, invoice_id: FromPath[str]) -> Response[Any]:
    query = parse_query(request.url.query, ExportQuery)
    org_id, _ = org_of(request.user, query.org_id)
    check_id("invoice_id", invoice_id)
    db = services(request).system_db
    return await exported(db, org_id=org_id, invoice_id=invoice_id, format=query.format)


def to_hour(text: str) -> datetime:
    """Raises: BadField of a day that no month has."""
    try:
        return datetime.strptime(text, HOUR_FORM).replace(tzinfo=UTC)
    except ValueError:
        raise BadField("Invalid value for 'hour': no such day.", param="hour") from None


routes = [list_, retrieve, list_lines, list_hours, list_requests, list_tags, export]
