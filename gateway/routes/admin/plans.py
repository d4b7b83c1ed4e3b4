"""/v1/admin/plans: named limits, with lane and price list. Everybody who administers sees them; an
operator makes and changes those that do not stand in the settings file.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from litestar import Response, get, patch, post
from litestar.params import FromPath

from foundation.structs import given
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import Precondition, answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.tenancy.money import plans as verbs
from gateway.tenancy.money.plans import Check, PlanRow
from gateway.tenancy.tables import plans as table
from gateway.wire.admin.plans import NewPlan, PlanPatch, PlanView, to_seconds
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import decode_kept

SCOPE = "operator:plans"
TAGS = ["Plans"]
_new_decoder = msgspec.json.Decoder(NewPlan)
_patch_decoder = msgspec.json.Decoder(PlanPatch)


class PlansQuery(PageQuery):
    include_archived: bool = False


def to_view(row: PlanRow) -> PlanView:
    fields: dict[str, Any] = msgspec.structs.asdict(row)
    return PlanView(
        read_only=fields.pop("in_settings"),
        **fields | {name: to_seconds(fields[name]) for name in ("created_at", "archived_at")},
    )


def unless_changed(precondition: Precondition) -> Check:
    return lambda row: precondition.check(to_view(row))


@post(
    "/v1/admin/plans",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Create a plan",
    operation_class=describes(body=NewPlan, answer=PlanView, status=201, idempotent=True),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    wanted = decode_kept(_new_decoder, await plain_body(request))
    verbs.check_price_list(wanted.price_list, services(request).generation.price_book.lists.names)
    values = msgspec.structs.asdict(wanted)
    operator_org = request.user.org_id
    async with tenant(services(request).system_db, operator_org) as conn:
        row = await verbs.create_plan(
            conn,
            name=values.pop("name"),
            values=values,
            operator_org=operator_org,
            actor=actor_of(request),
        )
    return answer(request, to_view(row), status=201)


@get(
    "/v1/admin/plans",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the plans, by name",
    operation_class=describes(query=PlansQuery, answer=Listing[PlanView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, PlansQuery)
    listed = sa.select(table)
    if not query.include_archived:
        listed = listed.where(table.c.archived_at.is_(None))
    async with tenant(services(request).db, request.user.org_id) as conn:
        rows = await conn.execute(keyset(listed, table.c.name, query))
        found = [to_view(PlanRow(**row._mapping)) for row in rows]
    listing = to_listing(found, query, id_of=lambda plan: plan.name)
    return answer(request, listing)


@get(
    "/v1/admin/plans/{name:str}",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="One plan",
    operation_class=describes(answer=PlanView),
)
async def retrieve(request: AuthenticatedRequest, name: FromPath[str]) -> Response[bytes]:
    async with tenant(services(request).db, request.user.org_id) as conn:
        row = await verbs.get_plan(conn, name)
    return answer(request, to_view(row))


@patch(
    "/v1/admin/plans/{name:str}",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Change a plan",
    operation_class=describes(body=PlanPatch, answer=PlanView, conditional=True),
)
async def update(request: AuthenticatedRequest, name: FromPath[str]) -> Response[bytes]:
    check = unless_changed(if_match(request))
    values = given(decode_kept(_patch_decoder, await plain_body(request)))
    found = services(request)
    verbs.check_price_list(values.get("price_list"), found.generation.price_book.lists.names)
    row = await verbs.update_plan(
        found.system_db,
        found.redis,
        name,
        values,
        operator_org=request.user.org_id,
        actor=actor_of(request),
        check=check,
    )
    return answer(request, to_view(row))


@post(
    "/v1/admin/plans/{name:str}/archive",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Archive a plan: it can no longer be given",
    operation_class=describes(answer=PlanView, idempotent=True, conditional=True),
)
async def archive(request: AuthenticatedRequest, name: FromPath[str]) -> Response[bytes]:
    found = services(request)
    row = await verbs.archive_plan(
        found.system_db,
        found.redis,
        name,
        operator_org=request.user.org_id,
        actor=actor_of(request),
        check=unless_changed(if_match(request)),
    )
    return answer(request, to_view(row))


routes = [create, list_, retrieve, update, archive]
