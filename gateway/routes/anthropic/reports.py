"""GET /v1/organizations/usage_report/messages and /cost_report: the bill in Anthropic's shape.

It is that of the org of the key that asks, and all of it, whichever shape the requests had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from litestar import Response

from billing.errors import ReportQueryError
from billing.reports import usage as usage_report
from billing.reports.usage import CostRow, ReportPage, UsageRow
from gateway.db import tenant
from gateway.principal import SCOPE_USAGE_READ
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import RouteGroup
from gateway.wire.anthropic.reports import (
    DESCRIPTION,
    GROUPS,
    RENAMED,
    SERVED_AS,
    Cost,
    CostReportQuery,
    MessagesQuery,
    MessagesUsage,
    Report,
    TimeBucket,
    to_cost,
    to_messages_usage,
    to_rfc3339,
)
from gateway.wire.organization.usage import parse_query

Row = TypeVar("Row", UsageRow, CostRow)
reports = RouteGroup(tag="Usage", opt=needs(SCOPE_USAGE_READ))


@reports.get(
    "/v1/organizations/usage_report/messages",
    "Tokens, in buckets; Anthropic's shape",
    query=MessagesQuery,
    answer=Report[MessagesUsage],
)
async def usage_messages(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, MessagesQuery)
    start_time, end_time = query.window()
    with their_names():
        found = await usage_report.usage_completions(
            partial(tenant, services(request).db),
            org=request.user.org_id,
            start_time=start_time,
            end_time=end_time,
            bucket_width=query.bucket_width,
            project_ids=query.workspace_ids,
            user_ids=query.account_ids,
            service_account_ids=query.service_account_ids,
            api_key_ids=query.api_key_ids,
            models=query.models,
            served_as=[SERVED_AS[each] for each in query.service_tiers],
            group_by=[GROUPS[each] for each in query.group_by],
            limit=query.limit,
            page=query.page,
        )
    return report(found, to_messages_usage)


@reports.get(
    "/v1/organizations/cost_report",
    "Money by day, in cents; Anthropic's shape",
    query=CostReportQuery,
    answer=Report[Cost],
)
async def cost_report(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, CostReportQuery)
    start_time, end_time = query.window()
    named = ["project_id"] if "workspace_id" in query.group_by else []
    with their_names():
        found = await usage_report.costs(
            partial(tenant, services(request).db),
            org=request.user.org_id,
            start_time=start_time,
            end_time=end_time,
            group_by=[*named, *(DESCRIPTION if "description" in query.group_by else ())],
            limit=query.limit,
            page=query.page,
        )
    return report(found, to_cost)


@contextmanager
def their_names() -> Iterator[None]:
    """Name a refused field as the caller wrote it. Raises: ReportQueryError."""
    try:
        yield
    except ReportQueryError as error:
        raise ReportQueryError(str(error), param=RENAMED.get(error.param, error.param)) from None


def report(
    found: ReportPage[Row], to_row: Callable[[Row], MessagesUsage | Cost]
) -> Response[bytes]:
    data: list[TimeBucket[Any]] = [
        TimeBucket(
            starting_at=to_rfc3339(bucket.start_time),
            ending_at=to_rfc3339(bucket.end_time),
            results=[to_row(row) for row in bucket.results],
        )
        for bucket in found.buckets
    ]
    page = Report(data=data, has_more=found.next_page is not None, next_page=found.next_page)
    return Response(msgspec.json.encode(page), media_type=JSON)


routes = [usage_messages, cost_report]
