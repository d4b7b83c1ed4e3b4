"""GET /v1/organization/usage/... and /v1/organization/costs: the bill, for the org of the key that
asks, or for one that an operator names (`org_id`). OpenAI's shapes; the sums are
`billing.reports.usage`'s.

Of what OpenAI sells and nobody here does the usage is none: whole pages of empty buckets, so that a
client which walks through all of it gets to its end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from litestar import Response
from litestar.handlers import HTTPRouteHandler

from billing.reports import usage as usage_report
from billing.reports.usage import CostRow, ReportPage, UsageRow
from gateway.db import tenant
from gateway.principal import SCOPE_USAGE_READ
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import RouteGroup
from gateway.routes.shared.resource import org_of
from gateway.wire.organization.usage import (
    NOT_SOLD,
    Bucket,
    CostsQuery,
    CostsResult,
    EmbeddingsUsageQuery,
    EmbeddingsUsageResult,
    Page,
    ReportQuery,
    UsageQuery,
    UsageResult,
    encode_page,
    parse_query,
    to_amount,
)
from gateway.wire.shared.resource import view_of

USAGE = "/v1/organization/usage/"
WINDOW = ("start_time", "end_time", "bucket_width", "limit", "page")

Row = TypeVar("Row", UsageRow, CostRow)
reports = RouteGroup(tag="Usage", opt=needs(SCOPE_USAGE_READ))


@reports.get(
    USAGE + "completions",
    "Tokens and requests, in buckets",
    query=UsageQuery,
    answer=Page[UsageResult],
)
async def usage_completions(request: AuthenticatedRequest) -> Response[bytes]:
    return page(await report_to(request, UsageQuery, usage_report.usage_completions), to_usage)


@reports.get(
    USAGE + "embeddings",
    "Tokens and requests of which embeddings were made, in buckets",
    query=EmbeddingsUsageQuery,
    answer=Page[EmbeddingsUsageResult],
)
async def usage_embeddings(request: AuthenticatedRequest) -> Response[bytes]:
    embeddings = partial(usage_report.usage_completions, embeddings=True)
    return page(await report_to(request, EmbeddingsUsageQuery, embeddings), to_embeddings)


@reports.get("/v1/organization/costs", "Money by day", query=CostsQuery, answer=Page[CostsResult])
async def costs(request: AuthenticatedRequest) -> Response[bytes]:
    return page(await report_to(request, CostsQuery, usage_report.costs), to_costs)


async def report_to(
    request: AuthenticatedRequest,
    query: type[msgspec.Struct],
    report: Callable[..., Awaitable[ReportPage[Row]]],
) -> ReportPage[Row]:
    """Answer with what `report` says of the org, as the address asks for it."""
    options = msgspec.structs.asdict(parse_query(request.url.query, query))
    org_id, _ = org_of(request.user, options.pop("org_id"))
    open_rows = partial(tenant, services(request).db)
    return await report(open_rows, org=org_id, **options)


def to_usage(row: UsageRow) -> UsageResult:
    quantities = row.quantities
    return view_of(
        UsageResult,
        row,
        input_tokens=quantities.prompt_total,
        output_tokens=quantities.output_total,
        input_uncached_tokens=quantities.uncached_input,
        input_cached_tokens=quantities.cache_read,
        input_cache_write_tokens=quantities.cache_write_5m + quantities.cache_write_1h,
    )


def to_embeddings(row: UsageRow) -> EmbeddingsUsageResult:
    return view_of(EmbeddingsUsageResult, row, input_tokens=row.quantities.embedding_input)


def to_costs(row: CostRow) -> CostsResult:
    amount = to_amount(row.amount_pico)
    return view_of(CostsResult, row, amount=amount, quantity_unit=row.unit)


def page(
    report: ReportPage[Row],
    to_row: Callable[[Row], UsageResult | EmbeddingsUsageResult | CostsResult],
) -> Response[bytes]:
    data = [
        Bucket(
            start_time=bucket.start_time,
            end_time=bucket.end_time,
            results=[to_row(row) for row in bucket.results],
        )
        for bucket in report.buckets
    ]
    next_page = report.next_page
    body = encode_page(Page(data=data, has_more=next_page is not None, next_page=next_page))
    return Response(body, media_type=JSON)


def of_nothing(kind: str, query_type: type[ReportQuery]) -> HTTPRouteHandler:
    @reports.get(
        USAGE + kind,
        f"Usage of {kind.replace('_', ' ')}: none",
        query=query_type,
        answer=Page[UsageResult],
        options={"name": f"usage {kind}", "operation_id": f"usage_{kind}"},
    )
    async def usage(request: AuthenticatedRequest) -> Response[bytes]:
        query = parse_query(request.url.query, query_type)
        org_of(request.user, query.org_id)
        report = await usage_report.nothing_used(**{name: getattr(query, name) for name in WINDOW})
        return page(report, to_usage)

    return usage


routes = [
    usage_completions,
    usage_embeddings,
    costs,
    *(of_nothing(kind, query_type) for kind, query_type in NOT_SOLD.items()),
]
