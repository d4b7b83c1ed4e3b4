"""/v1/admin/balance/settings and /v1/admin/top-ups: when a prepaid org is told that little is left,
and how more comes in by itself.

The org's own billing says what it wants; an operator, who hears of each top-up by webhook, grants
it once it is paid.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from litestar import Response, get, patch, post
from litestar.params import FromPath

from billing.credits.balance_watch import settings_of
from billing.credits.top_ups import TopUp, to_top_up, top_ups_of
from billing.tables import top_ups as table
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.admin.billing.credits import CreditsQuery, tell
from gateway.routes.admin.billing.spend_caps import in_org
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, keyset, to_listing
from gateway.routes.shared.resource import check_id, org_of
from gateway.tenancy.money import top_ups as verbs
from gateway.wire.admin.billing.top_ups import (
    BalanceSettingsPatch,
    BalanceSettingsView,
    TopUpFailure,
    TopUpView,
    to_settings_view,
    to_top_up_view,
    to_values,
)
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.page_query import OrgQuery
from gateway.wire.shared.refusals import decode_kept

SETTINGS = "/v1/admin/balance/settings"
TOP_UPS = "/v1/admin/top-ups"
ONE = TOP_UPS + "/{top_up_id:str}"
CHANGE = needs("admin:billing")
ANSWER = needs("operator:orgs")
TAGS = ["Credits"]
_patch_decoder = msgspec.json.Decoder(BalanceSettingsPatch)
_failure_decoder = msgspec.json.Decoder(TopUpFailure)


@get(
    SETTINGS,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="When an organization is told that little is left, and whether it tops up by itself",
    operation_class=describes(query=OrgQuery, answer=BalanceSettingsView),
)
async def retrieve_settings(request: AuthenticatedRequest) -> Response[bytes]:
    org_id, _ = in_org(request)
    async with tenant(services(request).db, org_id) as conn:
        found = await settings_of(conn, org_id)
    return answer(request, to_settings_view(org_id, found))


@patch(
    SETTINGS,
    opt=CHANGE,
    tags=TAGS,
    summary="Say when to be told that little is left, and whether to top up by itself",
    operation_class=describes(
        query=OrgQuery, body=BalanceSettingsPatch, answer=BalanceSettingsView, conditional=True
    ),
)
async def update_settings(request: AuthenticatedRequest) -> Response[bytes]:
    org_id, operator_org = in_org(request)
    precondition = if_match(request)
    wanted = decode_kept(_patch_decoder, await plain_body(request))
    after = await verbs.update_wanted(
        services(request).system_db,
        to_values(wanted),
        org_id=org_id,
        operator_org=operator_org,
        actor=actor_of(request),
        check=lambda before: precondition.check(to_settings_view(org_id, before)),
    )
    return answer(request, to_settings_view(org_id, after))


@get(
    TOP_UPS,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the top-ups that an organization's balance has asked for",
    operation_class=describes(query=CreditsQuery, answer=Listing[TopUpView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, CreditsQuery)
    org_id, _ = org_of(request.user, query.org_id)
    async with tenant(services(request).db, org_id) as conn:
        rows = await conn.execute(keyset(top_ups_of(org_id), table.c.id, query))
        found = [to_top_up_view(to_top_up(row)) for row in rows]
    return answer(request, to_listing(found, query))


@get(
    ONE,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="One top-up",
    operation_class=describes(query=OrgQuery, answer=TopUpView),
)
async def retrieve(request: AuthenticatedRequest, top_up_id: FromPath[str]) -> Response[bytes]:
    org_id, _ = in_org(request)
    check_id("top_up_id", top_up_id)
    async with tenant(services(request).db, org_id) as conn:
        found = await verbs.get_top_up(conn, org_id=org_id, top_up_id=top_up_id)
    return answer(request, to_top_up_view(found))


@post(
    ONE + "/grant",
    opt=ANSWER,
    status_code=200,
    tags=TAGS,
    summary="Credit a top-up that was paid, once",
    operation_class=describes(query=OrgQuery, answer=TopUpView, idempotent=True, conditional=True),
)
async def grant(request: AuthenticatedRequest, top_up_id: FromPath[str]) -> Response[bytes]:
    granted = await ended(request, top_up_id, verbs.grant_top_up)
    tell(request, granted.org_id)
    return answer(request, to_top_up_view(granted))


@post(
    ONE + "/fail",
    opt=ANSWER,
    status_code=200,
    tags=TAGS,
    summary="Say that a top-up is not paid",
    operation_class=describes(
        query=OrgQuery, body=TopUpFailure, answer=TopUpView, idempotent=True, conditional=True
    ),
)
async def fail(request: AuthenticatedRequest, top_up_id: FromPath[str]) -> Response[bytes]:
    wanted = decode_kept(_failure_decoder, await plain_body(request))
    failing = partial(verbs.fail_top_up, reason=wanted.reason)
    return answer(request, to_top_up_view(await ended(request, top_up_id, failing)))


async def ended(
    request: AuthenticatedRequest, top_up_id: str, end: Callable[..., Awaitable[TopUp]]
) -> TopUp:
    """End a top-up, if it is still what the caller has seen. `end`: the function that ends it."""
    org_id, _ = in_org(request)
    precondition = if_match(request)
    return await end(
        services(request).system_db,
        check_id("top_up_id", top_up_id),
        org_id=org_id,
        operator_org=request.user.org_id,
        actor=actor_of(request),
        check=lambda before: precondition.check(to_top_up_view(before)),
    )


routes = [retrieve_settings, update_settings, list_, retrieve, grant, fail]
