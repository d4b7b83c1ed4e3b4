"""/v1/admin/spend-caps: what an org, a project or a key may spend. Who administers the billing of
an org sets its own; an operator, who names another org by `org_id`, sets caps that it cannot lift.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, get, patch, post
from litestar.params import FromPath

from billing.money import format_usd, usd
from foundation.structs import given
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import Precondition, answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.routes.shared.resource import check_id, org_of
from gateway.tenancy.money import spend_caps as verbs
from gateway.tenancy.money.spend_caps import Check, SpendCapRow
from gateway.tenancy.tables import spend_caps as table
from gateway.wire.admin.billing.spend_caps import Id, NewSpendCap, SpendCapPatch, SpendCapView
from gateway.wire.admin.plans import to_seconds
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.page_query import OrgQuery
from gateway.wire.shared.refusals import decode_kept

SCOPE = "admin:billing"
OPERATOR = "operator:orgs"
TAGS = ["Spend caps"]
_new_decoder = msgspec.json.Decoder(NewSpendCap)
_patch_decoder = msgspec.json.Decoder(SpendCapPatch)


class SpendCapsQuery(PageQuery):
    org_id: Id | None = None
    include_archived: bool = False


def to_view(row: SpendCapRow) -> SpendCapView:
    fields: dict[str, Any] = msgspec.structs.asdict(row)
    return SpendCapView(
        amount_usd=format_usd(fields.pop("amount_pico")),
        **fields | {name: to_seconds(fields[name]) for name in ("created_at", "archived_at")},
    )


def unless_changed(precondition: Precondition) -> Check:
    return lambda row: precondition.check(to_view(row))


def in_org(request: AuthenticatedRequest) -> tuple[str, str | None]:
    """Raises: BadField, NotAllowed."""
    return org_of(request.user, parse_query(request.url.query, OrgQuery).org_id)


@post(
    "/v1/admin/spend-caps",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Cap what an organization, a project or a key may spend",
    operation_class=describes(
        query=OrgQuery, body=NewSpendCap, answer=SpendCapView, status=201, idempotent=True
    ),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    wanted = decode_kept(_new_decoder, await plain_body(request))
    org_id, operator_org = in_org(request)
    found = services(request)
    row = await verbs.create_spend_cap(
        found.system_db,
        found.redis,
        org_id=org_id,
        project_id=wanted.project_id,
        key_id=wanted.key_id,
        model=wanted.model,
        tag=wanted.tag,
        period=wanted.period,
        amount_pico=usd(wanted.amount_usd),
        hard=wanted.hard,
        by_operator=org_id != request.user.org_id,
        operator_org=operator_org,
        actor=actor_of(request),
    )
    return answer(request, to_view(row), status=201)


@get(
    "/v1/admin/spend-caps",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the spend caps of an organization",
    operation_class=describes(query=SpendCapsQuery, answer=Listing[SpendCapView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, SpendCapsQuery)
    org_id, _ = org_of(request.user, query.org_id)
    listed = verbs.listed_spend_caps(org_id, include_archived=query.include_archived)
    async with tenant(services(request).db, org_id) as conn:
        rows = await conn.execute(keyset(listed, table.c.id, query))
        found = [to_view(verbs.to_spend_cap(row)) for row in rows]
    return answer(request, to_listing(found, query))


@get(
    "/v1/admin/spend-caps/{cap_id:str}",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="One spend cap",
    operation_class=describes(query=OrgQuery, answer=SpendCapView),
)
async def retrieve(request: AuthenticatedRequest, cap_id: FromPath[str]) -> Response[bytes]:
    org_id, _ = in_org(request)
    check_id("cap_id", cap_id)
    async with tenant(services(request).db, org_id) as conn:
        row = await verbs.get_spend_cap(conn, org_id=org_id, cap_id=cap_id)
    return answer(request, to_view(row))


@patch(
    "/v1/admin/spend-caps/{cap_id:str}",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Change a spend cap",
    operation_class=describes(
        query=OrgQuery, body=SpendCapPatch, answer=SpendCapView, conditional=True
    ),
)
async def update(request: AuthenticatedRequest, cap_id: FromPath[str]) -> Response[bytes]:
    check = unless_changed(if_match(request))
    values = given(decode_kept(_patch_decoder, await plain_body(request)))
    org_id, operator_org = in_org(request)
    if "amount_usd" in values:
        values["amount_pico"] = usd(values.pop("amount_usd"))
    found = services(request)
    row = await verbs.update_spend_cap(
        found.system_db,
        found.redis,
        check_id("cap_id", cap_id),
        values,
        org_id=org_id,
        operator_org=operator_org,
        actor=actor_of(request),
        check=check,
    )
    return answer(request, to_view(row))


@post(
    "/v1/admin/spend-caps/{cap_id:str}/archive",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Lift a spend cap",
    operation_class=describes(
        query=OrgQuery, answer=SpendCapView, idempotent=True, conditional=True
    ),
)
async def archive(request: AuthenticatedRequest, cap_id: FromPath[str]) -> Response[bytes]:
    org_id, operator_org = in_org(request)
    found = services(request)
    row = await verbs.archive_spend_cap(
        found.system_db,
        found.redis,
        check_id("cap_id", cap_id),
        org_id=org_id,
        operator_org=operator_org,
        actor=actor_of(request),
        check=unless_changed(if_match(request)),
    )
    return answer(request, to_view(row))


routes = [create, list_, retrieve, update, archive]
