"""The budgets of an organization and of a project stand on the pages of what spends from them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from billing.money import PICO_PER_USD
from billing.queries import ask
from gateway.console.budgets import Budget, budgets_query, with_held
from gateway.db import tenant
from gateway.limits.spending import counter_of
from gateway.tenancy.tables import api_keys
from tests.gateway.console.conftest import Visit
from tests.gateway.console.server import ConsoleServer

ORG, PROJECT = "$\u00a0500.00 a month", "$\u00a0120.00 a month"


def test_an_organizations_budget_is_on_each_page_that_spends_from_it(
    visit: Visit, console: ConsoleServer
) -> None:
    org = console.little

    async def newest() -> Any:
        async with tenant(console.services.db, org.id) as conn:
            return await conn.scalar(sa.select(sa.func.max(api_keys.c.id)))

    pages = {
        "/console/overview": [ORG],
        "/console/keys": [ORG],
        f"/console/keys?project={org.project_id}": [PROJECT, ORG],
        f"/console/keys/{console.call(newest)}": [PROJECT, ORG],
        f"/console/projects/{org.project_id}": [PROJECT, ORG],
    }
    for address, wanted in pages.items():
        tab = visit("little", "reader", address)
        rows = tab.locator("table.budgets tbody tr").all_inner_texts()
        for row, text in zip(rows[-len(wanted) :], wanted, strict=True):
            assert row.startswith(text) and "warns only" in row and "in " in row, (address, rows)


def test_what_runs_is_held_and_never_counted_twice(console: ConsoleServer) -> None:
    org, services, now = console.little, console.services, datetime.now(UTC)

    async def read() -> list[Budget]:
        counter = counter_of("org", org.id, "month", now.timestamp())
        before = await services.redis.hget(counter.key(org.id), "n")
        async with tenant(services.db, org.id) as conn:
            found = await ask(conn, budgets_query(org.id, org.project_id))
        booked = found[-1].used_pico
        await services.redis.hset(counter.key(org.id), "n", booked // 1000 + 3 * 10**9)
        try:
            return await with_held(services.redis, org.id, found, now)
        finally:
            if before is None:
                await services.redis.hdel(counter.key(org.id), "n")

    of_project, of_org = console.call(read)
    assert (of_project.scope, of_project.held_pico) == ("project", 0)
    assert 0 <= 3 * PICO_PER_USD - of_org.held_pico < 1000
    assert of_org.left_pico == of_org.amount_pico - of_org.used_pico - of_org.held_pico
    assert of_org.resets_at is not None and of_org.resets_at > now
