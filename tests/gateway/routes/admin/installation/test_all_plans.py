"""/v1/admin/plans: the list of all, and what a start with other settings leaves of them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from gateway.principal import Plan
from gateway.tenancy.money.plans import sync_plans
from gateway.tenancy.tables import plans
from tests.gateway.routes.admin.conftest import World

NEW: dict[str, Any] = {"name": "silver", "tokens_per_minute": 100, "price_list": "default"}


async def test_plans_are_listed_by_name(world: World) -> None:
    await world.call("POST", "/v1/admin/plans", NEW)
    await world.call("POST", "/v1/admin/plans", {"name": "old"})
    await world.call("POST", "/v1/admin/plans/old/archive")
    first = (await world.call("GET", "/v1/admin/plans?limit=2")).json()
    assert [each["name"] for each in first["data"]] == ["default", "gold"]
    assert (first["has_more"], first["last_id"]) == (True, "gold")
    second = (await world.call("GET", "/v1/admin/plans?limit=2&after=gold")).json()
    assert [each["name"] for each in second["data"]] == ["silver"] and not second["has_more"]
    everything = "/v1/admin/plans?include_archived=true&order=desc"
    found = (await world.call("GET", everything)).json()
    assert [each["name"] for each in found["data"]] == ["silver", "old", "gold", "default"]


async def test_a_start_leaves_the_operators_plans_alone(world: World) -> None:
    await world.call("POST", "/v1/admin/plans", NEW)
    async with world.db.begin() as conn:
        await sync_plans(conn, [Plan(name="default")])
        rows = {row.name: row for row in await conn.execute(sa.select(plans))}
    assert rows["gold"].archived_at is not None, "gone from the settings"
    assert rows["silver"].archived_at is None and rows["silver"].tokens_per_minute == 100
    async with world.db.begin() as conn:
        await sync_plans(conn, [Plan(name="silver")])
    taken = (await world.call("GET", "/v1/admin/plans/silver")).json()
    assert (taken["read_only"], taken["tokens_per_minute"]) == (True, None)
