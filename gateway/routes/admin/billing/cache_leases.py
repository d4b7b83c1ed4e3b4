"""/v1/admin/cache-leases: what an org has paid to be kept in the cache, and what became of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from litestar import Response, get

from billing.cache_contracts import Ttl
from billing.corrections.cache_leases import Outcome, select_leases
from billing.money import format_usd
from billing.tables import cache_leases as table
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.wire.organization.usage import parse_query


class CacheLeasesQuery(PageQuery):
    """`status`: those whose time is running, or the others."""

    status: Literal["open", "ended"] | None = None


class CacheLeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """On the first `end_tokens` of a prompt, of which `num_tokens` were written for it; 0 where
    nobody knows of one. Moments are Unix seconds."""

    object: str = "cache_lease"
    id: str
    event_id: str
    """Of what was billed: the attempt of a request."""
    model: str
    ttl: Ttl
    num_tokens: int
    end_tokens: int
    granted_at: int
    kept_until: int
    """At least; who reads it prolongs it."""
    ended_at: int | None
    outcome: Outcome | None
    refunded_usd: str | None


def to_view(row: sa.Row[Any]) -> CacheLeaseView:
    refunded = row.refunded_pico
    return CacheLeaseView(
        id=row.id,
        event_id=row.event_id,
        model=row.model,
        ttl=row.ttl,
        num_tokens=row.num_tokens,
        end_tokens=row.end_tokens,
        granted_at=int(row.granted_at.timestamp()),
        kept_until=int(row.kept_until.timestamp()),
        ended_at=None if row.ended_at is None else int(row.ended_at.timestamp()),
        outcome=row.outcome,
        refunded_usd=None if refunded is None else format_usd(int(refunded)),
    )


@get(
    "/v1/admin/cache-leases",
    opt=needs(SCOPE_ADMIN_READ),
    tags=["Cache leases"],
    summary="List the leases on cached prefixes, what became of each, and what was paid back",
    operation_class=describes(query=CacheLeasesQuery, answer=Listing[CacheLeaseView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query, org_id = parse_query(request.url.query, CacheLeasesQuery), request.user.org_id
    is_open = None if query.status is None else query.status == "open"
    async with tenant(services(request).db, org_id) as conn:
        rows = await conn.execute(keyset(select_leases(org_id, is_open), table.c.id, query))
        found = [to_view(each) for each in rows]
    return answer(request, to_listing(found, query))


routes = [list_]
