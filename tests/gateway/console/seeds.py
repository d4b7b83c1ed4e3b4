"""Fills the organizations of `server`: each function of SEEDS makes what some pages show.

To add a page to all tests of pages: append a function here that makes its rows, and where the page
has more addresses than its own, name them in ADDRESSES.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import sqlalchemy as sa

from billing.money import PICO_PER_USD
from gateway.audit.log import COMMAND_LINE
from gateway.db import tenant
from gateway.limits.spending import counter_of
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.members.members import add_member
from gateway.tenancy.money.spend_caps import create_spend_cap
from gateway.tenancy.projects import create_project
from gateway.tenancy.tables import api_keys
from tests.gateway.console.server import ConsoleServer, Organization

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'{{7*7}}${7*7} =cmd|' /C"
"""A name that attacks whoever shows it unescaped."""
MANY = 1000
BUDGET_USD, USED = 20, (5, 12, 17, 20)


async def keys(server: ConsoleServer) -> None:
    await make_keys(server, server.little, ["web", "nightly-eval", "support-bot", "agents-prod"])
    await make_keys(server, server.much, [HOSTILE[:100], *(f"key {n}" for n in range(MANY))])


async def make_keys(server: ConsoleServer, org: Organization, names: list[str]) -> None:
    pepper_id, pepper = server.services.authenticator.pepper
    async with tenant(server.services.db, org.id) as conn:
        for name in names:
            await create_key(
                conn,
                org_id=org.id,
                project_id=org.project_id,
                name=name,
                scopes=["inference"],
                pepper=pepper,
                pepper_id=pepper_id,
                actor=COMMAND_LINE,
            )


async def projects(server: ConsoleServer) -> None:
    async with tenant(server.services.db, server.much.id) as conn:
        for name in (HOSTILE[:100], *(f"project {n}" for n in range(60))):
            await create_project(conn, org_id=server.much.id, name=name, actor=COMMAND_LINE)


async def budgets(server: ConsoleServer) -> None:
    """Make budgets of some keys, from hardly touched to spent; put people into projects."""
    for org in (server.little, server.much):
        async with tenant(server.services.db, org.id) as conn:
            first = sa.select(api_keys.c.id).order_by(api_keys.c.id).limit(len(USED))
            key_ids = list((await conn.scalars(first)).all())
            for role in ("developer", "reader"):
                await add_member(
                    conn,
                    org_id=org.id,
                    project_id=org.project_id,
                    user_id=org.users[role],
                    role="owner" if role == "developer" else "member",
                    actor=COMMAND_LINE,
                )
        for key_id, used_usd in zip(key_ids, USED, strict=False):
            await create_spend_cap(
                server.services.system_db,
                server.services.redis,
                org_id=org.id,
                key_id=key_id,
                amount_pico=BUDGET_USD * PICO_PER_USD,
                actor=COMMAND_LINE,
            )
            counter = counter_of("key", key_id, "month", time.time())
            await server.services.redis.hset(counter.key(org.id), "n", used_usd * 10**9)


def things(server: ConsoleServer, org: Organization) -> list[str]:
    """A key, a project and a person."""

    async def newest() -> list[str]:
        async with tenant(server.services.db, org.id) as conn:
            key_id = await conn.scalar(sa.select(sa.func.min(api_keys.c.id)))
            newest = await conn.scalar(sa.select(sa.func.max(api_keys.c.id)))
        return [f"/console/keys/{key_id}", f"/console/keys/{newest}"]

    return [
        *server.call(newest),
        f"/console/projects/{org.project_id}",
        f"/console/people/{org.users['developer']}",
        "/console/search?q=e",
        "/console/keys?state=expired",
        "/console/projects?state=archived",
    ]


SEEDS: list[Callable[[ConsoleServer], Awaitable[None]]] = [keys, projects, budgets]
ADDRESSES: list[Callable[[ConsoleServer, Organization], list[str]]] = [things]
"""Each returns addresses below /console that are looked at beside those of all pages."""


async def sow(server: ConsoleServer) -> None:
    for each in SEEDS:
        await each(server)
