"""/v1/admin/plans: named limits, with lane and price list. Everybody who administers sees them; an
operator makes and changes those that do not stand in the settings file.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta
from msgspec.structs import asdict

from foundation.structs import patch_of, with_fields
from gateway.db import tenant
from gateway.principal import LIMIT_NAMES, Plan
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.money import plans as verbs
from gateway.tenancy.money.plans import PlanRow
from gateway.tenancy.tables import plans as table
from gateway.wire.shared.page_query import ArchivedPageQuery
from gateway.wire.shared.resource import view_of

PlanName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class NewPlan(Plan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: PlanName


@patch_of(NewPlan, without=("name",))
class PlanPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


@with_fields(LIMIT_NAMES, int | None, after="name")
class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """A plan. `read_only`: it stands in the settings file, and is changed there."""

    object: str = "plan"
    name: str
    weight: float | None
    lane: str | None
    price_list: str | None
    read_only: bool
    created_at: int
    archived_at: int | None


plans = AdminResource[PlanRow](
    path="/v1/admin/plans",
    id_name="name",
    id_field="name",
    tag="Plans",
    change=needs("operator:plans"),
    view=PlanView,
    show=lambda row: view_of(PlanView, row, read_only=row.in_settings),
    checks_ids=False,
)


def select_plans(_org_id: str, query: ArchivedPageQuery) -> sa.Select[Any]:
    listed = sa.select(table)
    return listed if query.include_archived else listed.where(table.c.archived_at.is_(None))


list_ = plans.list_all(
    "List the plans, by name", ArchivedPageQuery, select=select_plans, row=PlanRow, key=table.c.name
)


@plans.get("One plan")
async def retrieve(request: AdminRequest) -> PlanRow:
    async with request.transaction() as conn:
        return await verbs.get_plan(conn, request.id)


@plans.create("Create a plan", NewPlan)
async def create(request: AdminRequest, wanted: NewPlan) -> PlanRow:
    values = asdict(wanted)
    check_price_list(request, values)
    async with tenant(request.system_db, request.org_id) as conn:
        return await verbs.create_plan(
            conn,
            name=values.pop("name"),
            values=values,
            operator_org=request.org_id,
            actor=request.actor,
        )


@plans.update("Change a plan", PlanPatch)
async def update(request: AdminRequest, values: dict[str, Any]) -> PlanRow:
    check_price_list(request, values)
    return await verbs.update_plan(
        request.system_db, request.redis, request.id, values, **by_operator(request)
    )


@plans.archive("Archive a plan: it can no longer be given")
async def archive(request: AdminRequest) -> PlanRow:
    return await verbs.archive_plan(
        request.system_db, request.redis, request.id, **by_operator(request)
    )


def check_price_list(request: AdminRequest, values: dict[str, Any]) -> None:
    """Raises: InvalidField."""
    known = request.services.generation.price_book.lists.names
    verbs.check_price_list(values.get("price_list"), known)


def by_operator(request: AdminRequest) -> dict[str, Any]:
    return {"operator_org": request.org_id, "actor": request.actor, "check": request.check}


routes = [create, list_, retrieve, update, archive]
