"""Shows /console/plans: named sets of limits, which projects, keys and organizations are on;
operators make, change and archive them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args
from urllib.parse import quote, unquote

from litestar import Response

from engine.protocol import Lane
from gateway.console.formats import count
from gateway.console.tables import Table, TableColumn
from gateway.db import tenant
from gateway.limits.live_use import LiveUse
from gateway.limits.outcomes import add_limits
from gateway.limits.redis.scope_limits import ScopeLimits
from gateway.limits.redis.scripts import LimiterUnavailable
from gateway.principal import PLAN_LIMITS, Plan
from gateway.routes.admin.installation.plans import select_plans
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.routes.console.keys import EVERY_LANE, USE_COLUMNS
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.keys.restrictions import narrowed
from gateway.tenancy.money.plans import (
    PlanHolder,
    PlanRow,
    archive_plan,
    create_plan,
    get_plan,
    list_holders,
    update_plan,
)
from gateway.tenancy.pages import read_page
from gateway.tenancy.tables import plans
from gateway.wire.shared.page_query import ArchivedPageQuery

OPERATORS = "operator:plans"
DOTS = (".", "..")
"""The names that a path has for itself and for what is above it."""
ODD = re.compile(r"[/%]|^\.\.?$")
LANES = (("", "each request's own"), *((lane, lane) for lane in get_args(Lane)))

page = ConsolePage(name="plans", title="Plans", below="projects")


def limits_in_words(plan: PlanRow) -> str:
    found = [
        f"{count(value)} {limit.title}"
        for limit in PLAN_LIMITS
        if (value := getattr(plan, limit.name)) is not None
    ]
    return ", ".join(found) or "no limits"


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    async with request.transaction() as conn:
        listed = select_plans(request.org_id, ArchivedPageQuery())
        rows, more = await read_page(conn, listed, plans.c.name, request.cursor("asc"))
    found = [PlanRow(**row._mapping) for row in rows]
    table = Table(
        "Plans",
        found,
        TableColumn("Plan", "name", link=lambda plan: address_of(plan.name)),
        TableColumn("Limits", limits_in_words),
        TableColumn("Lane", lambda plan: plan.lane or "each request's own"),
        TableColumn("Price list", lambda plan: plan.price_list or "default"),
        TableColumn("From", lambda plan: "tollgate.toml" if plan.in_settings else "the API"),
    )
    return request.render(
        "plans",
        table=table,
        more=found[-1].name if more else None,
        limits=[(limit, None) for limit in PLAN_LIMITS],
        lanes=LANES,
    )


def address_of(name: str) -> str:
    """Return the page of a plan, whose name may hold anything. What means something in a path is
    quoted twice: servers and browsers undo it once before they look for `/` and `..`."""
    coded = quote(name, safe="")
    if name in DOTS:
        coded = name.replace(".", "%2E")
    return f"{page.path}/{quote(coded, safe='') if ODD.search(name) else coded}"


def name_of(request: ConsoleRequest) -> str:
    return unquote(request.ids["name"])


@page.get("/{name:str}")
async def show_one(request: ConsoleRequest) -> Response[bytes]:
    async with request.transaction() as conn:
        plan = await get_plan(conn, name_of(request))
        holders = await list_holders(conn, org_id=request.org_id, plan=plan.name)
    use = await use_of(request, plan, holders)
    names = {(each.scope, each.id): each.name for each in holders}
    table = Table(
        "Who is on it, and what they use now",
        () if use is None else use.limits,
        TableColumn(
            "Who",
            lambda each: names[each.scope.scope, each.scope.owner_id],
            link=lambda each: page_of(each.scope),
            detail=lambda each: {"org": "the organization"}.get(each.scope.scope, each.scope.scope),
        ),
        *USE_COLUMNS,
    )
    return request.render(
        "plan",
        table=table,
        holders=holders,
        use=use,
        plan=plan,
        path=address_of(plan.name),
        limits=[(limit, getattr(plan, limit.name)) for limit in PLAN_LIMITS],
        lanes=LANES,
        may_change=request.can(OPERATORS) and not plan.in_settings and plan.archived_at is None,
    )


async def use_of(
    request: ConsoleRequest, plan: PlanRow, holders: Sequence[PlanHolder]
) -> LiveUse | None:
    """Return what those who are on a plan use of it now; None: the store does not answer."""
    limits = Plan(**{name: getattr(plan, name) for name in Plan.__struct_fields__})
    scopes: list[ScopeLimits] = []
    for each in holders:
        add_limits(scopes, each.scope, each.id, narrowed(limits, each.own), EVERY_LANE)
    try:
        return await request.services.generation.limiter.use_now(request.org_id, scopes)
    except LimiterUnavailable:
        return None


def page_of(scope: ScopeLimits) -> str | None:
    places = {"key": "keys", "project": "projects"}
    found = places.get(scope.scope)
    return None if found is None else f"/console/{found}/{scope.owner_id}"


def values_of(request: ConsoleRequest) -> dict[str, Any]:
    """Read what a plan's form says. Raises: InvalidField."""
    lane = request.form.get("lane", "")
    if lane not in dict(LANES):
        raise InvalidField("lane", "must be one of those offered")
    return {**request.read_limits(PLAN_LIMITS), "lane": lane or None}


@page.post("/create", needs=OPERATORS, again=show)
async def create(request: ConsoleRequest) -> Response[bytes]:
    name, values = request.form.get("name", "").strip(), values_of(request)
    async with tenant(request.system_db, request.org_id) as conn:
        made = await create_plan(
            conn, name=name, values=values, operator_org=request.org_id, actor=request.actor
        )
    return request.done(f"The plan {made.name} can be given.", to=address_of(made.name))


@page.post("/{name:str}/update", needs=OPERATORS, again=show_one)
async def update(request: ConsoleRequest) -> Response[bytes]:
    name, values = name_of(request), values_of(request)
    await update_plan(request.system_db, request.redis, name, values, **by_operator(request))
    return request.done("Every worker goes by it within a second.", to=address_of(name))


@page.post("/{name:str}/archive", needs=OPERATORS, again=show_one)
async def archive(request: ConsoleRequest) -> Response[bytes]:
    name = name_of(request)
    await archive_plan(request.system_db, request.redis, name, **by_operator(request))
    return request.done(f"{name} can no longer be given; who is on it stays on it.")


def by_operator(request: ConsoleRequest) -> dict[str, Any]:
    return {"operator_org": request.org_id, "actor": request.actor}


routes = page.routes
