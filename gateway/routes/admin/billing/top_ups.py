"""/v1/admin/balance/settings and /v1/admin/top-ups: when a prepaid org is told that little is left,
and how more comes in by itself.

The org's own billing says what it wants; an operator, who hears of each top-up by webhook, grants
it once it is paid.
"""

from __future__ import annotations

from billing.credits.balance_watch import BalanceSettings, settings_of
from billing.credits.top_ups import TopUp, to_top_up, top_ups_of
from gateway.routes.admin.billing.credits import tell
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.money import top_ups as verbs
from gateway.wire.admin.billing.top_ups import (
    BalanceSettingsPatch,
    BalanceSettingsView,
    TopUpFailure,
    TopUpView,
    to_settings_view,
    to_values,
)
from gateway.wire.shared.page_query import OrgPageQuery
from gateway.wire.shared.resource import view_of

OwnSettings = tuple[str, BalanceSettings]
"""An organization and its settings."""

settings = AdminResource[OwnSettings](
    path="/v1/admin/balance/settings",
    tag="Credits",
    change=needs("admin:billing"),
    view=BalanceSettingsView,
    show=lambda own: to_settings_view(*own),
    in_any_org=True,
)
top_ups = AdminResource[TopUp](
    path="/v1/admin/top-ups",
    id_name="top_up_id",
    tag="Credits",
    change=needs("operator:orgs"),
    view=TopUpView,
    show=lambda top_up: view_of(TopUpView, top_up),
    in_any_org=True,
)


@settings.get("When an organization is told that little is left, and whether it tops up by itself")
async def retrieve_settings(request: AdminRequest) -> OwnSettings:
    async with request.transaction() as conn:
        return request.org_id, await settings_of(conn, request.org_id)


@settings.replace(
    "Say when to be told that little is left, and whether to top up by itself",
    BalanceSettingsPatch,
    method="PATCH",
)
async def update_settings(request: AdminRequest, wanted: BalanceSettingsPatch) -> OwnSettings:
    org_id = request.org_id
    after = await verbs.update_wanted(
        request.system_db,
        to_values(wanted),
        org_id=org_id,
        operator_org=request.operator_org,
        actor=request.actor,
        check=lambda before: request.check((org_id, before)),
    )
    return org_id, after


list_ = top_ups.list_all(
    "List the top-ups that an organization's balance has asked for",
    OrgPageQuery,
    select=lambda org_id, _query: top_ups_of(org_id),
    row=to_top_up,
)

retrieve = top_ups.retrieve("One top-up", verbs.get_top_up)


@top_ups.act("/grant", "Credit a top-up that was paid, once")
async def grant(request: AdminRequest) -> TopUp:
    granted = await verbs.grant_top_up(request.system_db, request.id, **request.operator_change)
    tell(request, granted.org_id)
    return granted


@top_ups.act("/fail", "Say that a top-up is not paid", body=TopUpFailure)
async def fail(request: AdminRequest, wanted: TopUpFailure) -> TopUp:
    return await verbs.fail_top_up(
        request.system_db, request.id, reason=wanted.reason, **request.operator_change
    )


routes = [retrieve_settings, update_settings, list_, retrieve, grant, fail]
