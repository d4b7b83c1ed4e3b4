"""/v1/admin/cache-leases: what an org has paid to be kept in the cache, and what became of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from billing.cache_contracts import Ttl
from billing.corrections.cache_leases import Outcome, select_leases
from gateway.routes.shared.resource import AdminResource
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.resource import view_of


class CacheLeasesQuery(PageQuery):
    """`status`: those whose time is running, or the others."""

    status: Literal["open", "ended"] | None = None


class CacheLeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """On the first `end_tokens` of a prompt, of which `num_tokens` were written for it; 0 where
    nobody knows of one. Moments are Unix seconds."""

    object: str = "cache_lease"
    id: str
    event_id: str
    """The usage event that was billed: one attempt of a request."""
    model: str
    ttl: Ttl
    num_tokens: int
    end_tokens: int
    granted_at: int
    kept_until: int
    """The lease lasts at least until then; each read prolongs it."""
    ended_at: int | None
    outcome: Outcome | None
    refunded_usd: str | None


leases = AdminResource[sa.Row[Any]](
    path="/v1/admin/cache-leases",
    tag="Cache leases",
    view=CacheLeaseView,
    show=lambda row: view_of(CacheLeaseView, row),
)

list_ = leases.list_all(
    "List the leases on cached prefixes, what became of each, and what was paid back",
    CacheLeasesQuery,
    select=lambda org_id, query: select_leases(
        org_id, None if query.status is None else query.status == "open"
    ),
    row=lambda row: row,
)

routes = [list_]
