"""GET /v1/organization/cache_report and GET /api/v1/cache: what of prompts came from the cache, and
what broke their prefixes, for an org and for a key that asks about itself.

Of each prompt there are numbers, never a text.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from litestar import Response

from gateway.cache_report.reading import CachePage, read_cache_report
from gateway.db import tenant
from gateway.principal import SCOPE_INFERENCE, SCOPE_USAGE_READ
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import RouteGroup
from gateway.wire.organization.usage import Bucket, Page, encode_page, parse_query
from gateway.wire.usage.cache_report import (
    CacheReportQuery,
    CacheResult,
    OwnCacheQuery,
    to_cache_result,
)

OWN_SINCE_S = 23 * 3600
"""Before the hour that runs: a page of hours, with that one as its last."""
OWN_GROUPS = ("model", "prefix")
organization = RouteGroup(tag="Usage", opt=needs(SCOPE_USAGE_READ))
own_view = RouteGroup(tag="Own view", opt=needs(SCOPE_INFERENCE))


@organization.get(
    "/v1/organization/cache_report",
    "Cached tokens and broken prefixes, in buckets",
    query=CacheReportQuery,
    answer=Page[CacheResult],
)
async def organization_cache_report(request: AuthenticatedRequest) -> Response[bytes]:
    asked = parse_query(request.url.query, CacheReportQuery)
    return await report(request, msgspec.structs.asdict(asked))


@own_view.get(
    "/api/v1/cache",
    "Cached tokens and broken prefixes of this key, in buckets",
    query=OwnCacheQuery,
    answer=Page[CacheResult],
)
async def own_cache_report(request: AuthenticatedRequest) -> Response[bytes]:
    asked = msgspec.structs.asdict(parse_query(request.url.query, OwnCacheQuery))
    if asked["start_time"] is None:
        asked["start_time"] = max(0, (asked["end_time"] or int(time.time())) - OWN_SINCE_S)
    asked["group_by"] = asked["group_by"] or OWN_GROUPS
    return await report(request, {**asked, "api_key_ids": [request.user.key_id]})


async def report(request: AuthenticatedRequest, asked: dict[str, Any]) -> Response[bytes]:
    open_rows = partial(tenant, services(request).db)
    page = await read_cache_report(open_rows, org_id=request.user.org_id, **asked)
    return Response(encode_page(to_page(page)), media_type=JSON)


def to_page(found: CachePage) -> Page[CacheResult]:
    window = found.window
    buckets = [
        Bucket(
            start_time=start,
            end_time=start + window.width,
            results=[to_cache_result(row) for row in found.rows.get(start, ())],
        )
        for start in window.starts
    ]
    following = window.next_page
    return Page(data=buckets, has_more=following is not None, next_page=following)


routes = [organization_cache_report, own_cache_report]
