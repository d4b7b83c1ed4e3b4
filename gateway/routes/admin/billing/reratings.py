"""/v1/admin/reratings: a period of an org priced anew. An operator sees first what that would
change, by invoice line, and applies what was seen, by its digest.

A call applies a bounded part; sent again it goes on. Whole months of large tenants are the command
line's (`tollgate billing rerate`).
"""

from __future__ import annotations

import asyncio

import msgspec
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.corrections.rerating import (
    Rerating,
    ReratingPlan,
    apply,
    plan,
    reratings_of,
    to_rerating,
)
from gateway.limits.recounts import recounting
from gateway.routes.admin.billing.billing_account import noted
from gateway.routes.shared.access import needs
from gateway.routes.shared.problem import MEDIA_TYPE, Problem
from gateway.routes.shared.resource import ActingRequest, AdminRequest, AdminResource
from gateway.tenancy.errors import ChangeNotAnnounced
from gateway.tenancy.orgs import get_org
from gateway.wire.admin.billing.reratings import (
    NewRerating,
    PreviewQuery,
    PreviewView,
    ReratingView,
    to_preview,
    to_span,
    to_view,
)
from gateway.wire.shared.page_query import OrgPageQuery

MAX_EVENTS = 50_000
"""The most events of a period that a request looks through: some five seconds."""
MAX_BATCHES = 20
"""The most batches that one request applies."""

reratings = AdminResource[ReratingView](
    path="/v1/admin/reratings",
    tag="Reratings",
    change=needs("operator:orgs"),
    view=ReratingView,
    in_any_org=True,
    in_system=True,
)


@reratings.route(
    "GET",
    reratings.path + "/preview",
    "What it would change to price a period of an organization anew, by invoice line",
    needs=needs("operator:orgs"),
    query=PreviewQuery,
    answer=PreviewView,
    said={404: {MEDIA_TYPE: Problem}, 409: {MEDIA_TYPE: Problem}},
)
async def preview(request: AdminRequest, query: PreviewQuery) -> PreviewView:
    return await asyncio.to_thread(to_preview, await plan_of(request, query))


@reratings.create(
    "Price a period anew, as it was shown; sent again it goes on, until it is applied",
    NewRerating,
    status=200,
)
async def create(request: AdminRequest, wanted: NewRerating) -> ReratingView:
    return await asyncio.to_thread(to_view, await apply_plan(request, wanted))


async def plan_of(request: ActingRequest, query: PreviewQuery) -> ReratingPlan:
    """Return what it would change to price a period anew. Raises: NotFound, BadInvoicing,
    InvoicingConflict."""
    async with request.system_db.connect() as conn:
        await get_org(conn, request.org_id)
    span, book = to_span(query, request.org_id), request.services.generation.price_book
    return await plan(request.system_db, span, book, max_events=MAX_EVENTS)


async def apply_plan(request: ActingRequest, wanted: NewRerating) -> Rerating:
    """Price a period anew as it was shown, or a bounded part of it. Raises: as `plan_of`, and
    ChangeNotAnnounced."""

    async def note(conn: AsyncConnection, begun: Rerating) -> None:
        view = to_view(msgspec.structs.replace(begun, lines=[]))
        await noted(conn, request, "rerating.created", begun.id, view)

    try:
        async with recounting(request.system_db, request.redis) as announce:
            return await apply(
                request.system_db,
                to_span(wanted, request.org_id),
                request.services.generation.price_book,
                wanted.digest,
                note=note,
                announce=announce,
                max_batches=MAX_BATCHES,
                max_events=MAX_EVENTS,
            )
    except RedisError as error:
        raise ChangeNotAnnounced("redis", "counters do not know what was spent") from error


list_ = reratings.list_all(
    "List the periods of an organization that were priced anew",
    OrgPageQuery,
    select=lambda org_id, _query: reratings_of(org_id),
    row=lambda row: to_view(to_rerating(row)),
)


routes = [preview, create, list_]
