"""/v1/admin/spend-caps: what an org, a project or a key may spend. Who administers the billing of
an org sets its own; an operator, who names another org by `org_id`, sets caps that it cannot lift.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from billing.money import usd
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.money import spend_caps as verbs
from gateway.tenancy.money.spend_caps import SpendCapRow
from gateway.wire.admin.billing.spend_caps import NewSpendCap, SpendCapPatch, SpendCapView
from gateway.wire.shared.page_query import OrgPageQuery
from gateway.wire.shared.resource import view_of


class SpendCapsQuery(OrgPageQuery):
    include_archived: bool = False


caps = AdminResource[SpendCapRow](
    path="/v1/admin/spend-caps",
    id_name="cap_id",
    tag="Spend caps",
    change=needs("admin:billing"),
    view=SpendCapView,
    show=lambda row: view_of(SpendCapView, row),
    in_any_org=True,
)

list_ = caps.list_all(
    "List the spend caps of an organization",
    SpendCapsQuery,
    select=lambda org_id, query: verbs.select_spend_caps(org_id, archived=query.include_archived),
    row=verbs.to_spend_cap,
)

retrieve = caps.retrieve("One spend cap", verbs.get_spend_cap)


@caps.create("Cap what an organization, a project or a key may spend", NewSpendCap)
async def create(request: AdminRequest, wanted: NewSpendCap) -> SpendCapRow:
    values = asdict(wanted)
    return await verbs.create_spend_cap(
        request.system_db,
        request.redis,
        org_id=request.org_id,
        amount_pico=usd(values.pop("amount_usd")),
        by_operator=request.org_id != request.user.org_id,
        operator_org=request.operator_org,
        actor=request.actor,
        **values,
    )


@caps.update("Change a spend cap", SpendCapPatch)
async def update(request: AdminRequest, values: dict[str, Any]) -> SpendCapRow:
    if "amount_usd" in values:
        values["amount_pico"] = usd(values.pop("amount_usd"))
    return await verbs.update_spend_cap(
        request.system_db, request.redis, request.id, values, **request.operator_change
    )


@caps.archive("Lift a spend cap")
async def archive(request: AdminRequest) -> SpendCapRow:
    return await verbs.archive_spend_cap(
        request.system_db, request.redis, request.id, **request.operator_change
    )


routes = [create, list_, retrieve, update, archive]
