"""/v1/admin/reratings: a period of an org priced anew. An operator sees first what that would
change, by invoice line, and applies what was seen, by its digest.

A call applies a bounded part; sent again it goes on. Whole months of large tenants are the command
line's (`tollgate billing rerate`).
"""

from __future__ import annotations

import asyncio

import msgspec
from litestar import Response, get, post
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.corrections.rerating import Rerating, apply, plan, reratings_of, to_rerating
from billing.tables import reratings
from gateway.limits.recounts import recounting
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.admin.billing.billing_account import SCOPE, noted
from gateway.routes.admin.billing.invoices import InvoicesQuery
from gateway.routes.admin.billing.spend_caps import in_org
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, keyset, to_listing
from gateway.routes.shared.problem import MEDIA_TYPE, Problem
from gateway.routes.shared.resource import org_of
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
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.page_query import OrgQuery
from gateway.wire.shared.refusals import decode_kept

RERATINGS = "/v1/admin/reratings"
TAGS = ["Reratings"]
REFUSED = {404: {MEDIA_TYPE: Problem}, 409: {MEDIA_TYPE: Problem}}
MAX_EVENTS = 50_000
"""Of a period that a request looks through: some five seconds."""
MAX_BATCHES = 20
"""That one request applies."""
_new = msgspec.json.Decoder(NewRerating)


@get(
    RERATINGS + "/preview",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="What it would change to price a period of an organization anew, by invoice line",
    operation_class=describes(query=PreviewQuery, answer=PreviewView, said=REFUSED),
)
async def preview(request: AuthenticatedRequest) -> Response[bytes]:
    query, found = parse_query(request.url.query, PreviewQuery), services(request)
    org_id, _ = org_of(request.user, query.org_id)
    async with found.system_db.connect() as conn:
        await get_org(conn, org_id)
    span, book = to_span(query, org_id), found.generation.price_book
    shown = await plan(found.system_db, span, book, max_events=MAX_EVENTS)
    return answer(request, await asyncio.to_thread(to_preview, shown))


@post(
    RERATINGS,
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Price a period anew, as it was shown; sent again it goes on, until it is applied",
    operation_class=describes(query=OrgQuery, body=NewRerating, answer=ReratingView),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    wanted, (org_id, _) = decode_kept(_new, await plain_body(request)), in_org(request)
    found = services(request)

    async def note(conn: AsyncConnection, begun: Rerating) -> None:
        view = to_view(msgspec.structs.replace(begun, lines=[]))
        await noted(conn, request, org_id, "rerating.created", begun.id, view)

    try:
        async with recounting(found.system_db, found.redis) as announce:
            done = await apply(
                found.system_db,
                to_span(wanted, org_id),
                found.generation.price_book,
                wanted.digest,
                note=note,
                announce=announce,
                max_batches=MAX_BATCHES,
                max_events=MAX_EVENTS,
            )
    except RedisError as error:
        raise ChangeNotAnnounced("redis", "counters do not know what was spent") from error
    return answer(request, await asyncio.to_thread(to_view, done))


@get(
    RERATINGS,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the periods of an organization that were priced anew",
    operation_class=describes(query=InvoicesQuery, answer=Listing[ReratingView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, InvoicesQuery)
    org_id, _ = org_of(request.user, query.org_id)
    async with services(request).system_db.connect() as conn:
        rows = await conn.execute(keyset(reratings_of(org_id), reratings.c.id, query))
        found = [to_view(to_rerating(row)) for row in rows]
    return answer(request, to_listing(found, query))


routes = [preview, create, list_]
