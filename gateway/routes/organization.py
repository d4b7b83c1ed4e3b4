"""GET /v1/organization/usage/completions and /v1/organization/costs: the bill, for the org of the
key that asks. OpenAI's shapes; the sums are `billing.usage_report`'s."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response, get

from billing import usage_report
from billing.usage_report import CostRow, ReportPage, UsageRow
from gateway.db import tenant
from gateway.principal import SCOPE_USAGE_READ, Principal
from gateway.routes import (
    organization_keys,
    organization_projects,
    organization_rate_limits,
    organization_service_accounts,
    organization_users,
)
from gateway.routes.access import needs, services
from gateway.routes.operations import describes
from gateway.wire.openai_admin import (
    Bucket,
    CostsQuery,
    CostsResult,
    Page,
    UsageQuery,
    UsageResult,
    encode_page,
    parse_costs_query,
    parse_usage_query,
    to_amount,
)

JSON = "application/json"
TOKENS = "tokens"

Row = TypeVar("Row", UsageRow, CostRow)


@get(
    "/v1/organization/usage/completions",
    opt=needs(SCOPE_USAGE_READ),
    tags=["Usage"],
    summary="Tokens and requests, in buckets",
    operation_class=describes(query=UsageQuery, answer=Page[UsageResult]),
)
async def usage_completions(request: Request[Principal, Any, Any]) -> Response[bytes]:
    query = parse_usage_query(request.url.query)
    options = msgspec.structs.asdict(query)
    open_rows = partial(tenant, services(request).db)
    report = await usage_report.usage_completions(open_rows, org=request.user.org_id, **options)
    return page(report, to_usage)


@get(
    "/v1/organization/costs",
    opt=needs(SCOPE_USAGE_READ),
    tags=["Usage"],
    summary="Money by day",
    operation_class=describes(query=CostsQuery, answer=Page[CostsResult]),
)
async def costs(request: Request[Principal, Any, Any]) -> Response[bytes]:
    query = parse_costs_query(request.url.query)
    options = msgspec.structs.asdict(query)
    open_rows = partial(tenant, services(request).db)
    report = await usage_report.costs(open_rows, org=request.user.org_id, **options)
    return page(report, to_costs)


def to_usage(row: UsageRow) -> UsageResult:
    quantities = row.quantities
    return UsageResult(
        input_tokens=quantities.input_total,
        output_tokens=quantities.output_total,
        num_model_requests=row.num_model_requests,
        input_uncached_tokens=quantities.uncached_input,
        input_cached_tokens=quantities.cache_read,
        input_cache_write_tokens=quantities.cache_write_5m + quantities.cache_write_1h,
        project_id=row.project_id,
        api_key_id=row.api_key_id,
        model=row.model,
        batch=row.batch,
        service_tier=row.service_tier,
    )


def to_costs(row: CostRow) -> CostsResult:
    return CostsResult(
        amount=to_amount(row.amount_pico),
        line_item=row.line_item,
        quantity=row.quantity,
        quantity_unit=None if row.quantity is None else TOKENS,
        project_id=row.project_id,
        api_key_id=row.api_key_id,
    )


def page(
    report: ReportPage[Row], to_row: Callable[[Row], UsageResult | CostsResult]
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


routes = [
    usage_completions,
    costs,
    *organization_projects.routes,
    *organization_rate_limits.routes,
    *organization_service_accounts.routes,
    *organization_keys.routes,
    *organization_users.routes,
]
