"""Fills the organizations of `server`: each function of SEEDS makes what some pages show.

To add a page to all tests of pages: append a function here that makes its rows, and where the page
has more addresses than its own, name them in ADDRESSES.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import sqlalchemy as sa

from billing.money import PICO_PER_USD
from gateway.audit.log import COMMAND_LINE
from gateway.audit.tables import entries
from gateway.db import tenant
from gateway.installation.items import create_item, homes, read_number, report_home
from gateway.installation.merge import ChangeCheck, StoredSetting
from gateway.installation.model_versions import ModelVersion, RunningModels
from gateway.limits.spending import counter_of
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.members.members import add_member
from gateway.tenancy.money.plans import create_plan
from gateway.tenancy.money.spend_caps import create_spend_cap
from gateway.tenancy.projects import create_project
from gateway.tenancy.tables import api_keys
from gateway.tenancy.tables import projects as projects_table
from gateway.webhooks.endpoints import create_endpoint, select_endpoints
from gateway.webhooks.tables import deliveries, endpoints
from tests.billing.console_seeds import invoice_addresses, sow_billing
from tests.budget import cycles
from tests.gateway.console import mcp_seeds
from tests.gateway.console.server import ConsoleServer, Organization
from tests.gateway.request_log.console_seeds import addresses_of_requests, make_requests

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'{{7*7}}${7*7} =cmd|' /C"
"""A name that attacks whoever shows it unescaped."""
MANY = cycles(1000, 300)
PLAN = "steady"
FAILING_HOME = "host:/srv/failing"
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
    """Make budgets of some keys, from hardly touched to spent, of an organization and a project;
    put people into projects."""
    for org in (server.little, server.much):
        for amount_usd, project_id in ((500, None), (120, org.project_id)):
            await create_spend_cap(
                server.services.system_db,
                server.services.redis,
                org_id=org.id,
                project_id=project_id,
                amount_pico=amount_usd * PICO_PER_USD,
                hard=False,
                actor=COMMAND_LINE,
            )
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


async def plans(server: ConsoleServer) -> None:
    """Make a plan, and put a project of each organization on it."""
    async with tenant(server.services.system_db, server.little.id) as conn:
        await create_plan(
            conn,
            name=PLAN,
            values={"requests_per_minute": 600, "tokens_per_minute": 2_000_000},
            operator_org=server.little.id,
            actor=COMMAND_LINE,
        )
    for org in (server.little, server.much):
        async with tenant(server.services.db, org.id) as conn:
            project = sa.update(projects_table).where(projects_table.c.id == org.project_id)
            await conn.execute(project.values(plan=PLAN))


def things(server: ConsoleServer, org: Organization) -> list[str]:
    """A key, a project, a person and a plan."""

    async def newest() -> list[str]:
        async with tenant(server.services.db, org.id) as conn:
            key_id = await conn.scalar(sa.select(sa.func.min(api_keys.c.id)))
            newest = await conn.scalar(sa.select(sa.func.max(api_keys.c.id)))
        return [
            f"/console/keys/{key_id}",
            f"/console/keys/{newest}",
            f"/console/keys/{newest}/use",
        ]

    return [
        *server.call(newest),
        f"/console/projects/{org.project_id}",
        f"/console/people/{org.users['developer']}",
        f"/console/plans/{PLAN}",
        "/console/search?q=e",
        "/console/keys?state=expired",
        "/console/projects?state=archived",
    ]


async def webhooks(server: ConsoleServer) -> None:
    """Much has an endpoint with MANY deliveries, each with a failure that somebody else wrote."""
    for org, number in ((server.little, 3), (server.much, MANY)):
        async with tenant(server.services.db, org.id) as conn:
            made = await create_endpoint(
                conn,
                server.services.webhooks.secrets,
                org_id=org.id,
                url=f"https://hooks.example/{org.name}",
                description=HOSTILE,
                event_types=["budget.threshold_reached", "batch.failed"],
                actor=COMMAND_LINE,
            )
            rows = [
                {
                    "id": f"whd_{org.name}_{each:06}",
                    "org_id": org.id,
                    "endpoint_id": made.endpoint.id,
                    "event_id": f"alert_{org.name}_{each:06}",
                    "event_type": "budget.threshold_reached",
                    "body": "{}",
                    "state": ("delivered", "delivered", "dead")[each % 3],
                    "attempts": 1 + each % 3 * 9,
                    "status": (200, 204, None)[each % 3],
                    "failure": (None, None, HOSTILE)[each % 3],
                }
                for each in range(number)
            ]
            await conn.execute(sa.insert(deliveries).values(expires_at=sa.func.now()), rows)


async def stored_settings(server: ConsoleServer) -> None:
    """Store a model as `POST /v1/admin/settings/models` does, of a name that attacks, and tell of
    a home that has it in force, and of one where it did not start. Both stay in sight."""
    configuration = server.services.configuration
    wanted = ChangeCheck(configuration.settings, configuration.merger)
    model = StoredSetting(kind="model", name=HOSTILE, content={"upstream": UPSTREAM})
    async with server.services.system_db.begin() as conn:
        await create_item(
            conn,
            model,
            check_all=lambda stored, all_: wanted.check(stored.items, all_, stored.file_names),
            operator_org=server.little.id,
            actor=COMMAND_LINE,
        )
        number = await read_number(conn)
        await report_home(conn, "host:/srv/tollgate", number, "", {}, running("serving"))
        failed = running("failed", "draining", "warming", problem=HOSTILE)
        await report_home(conn, FAILING_HOME, number, HOSTILE, {}, failed)
        later = sa.func.now() + timedelta(days=1)
        await conn.execute(sa.update(homes).values(seen_at=later))


def running(*states: str, problem: str = "") -> RunningModels:
    """Return a model in some states, each of another version."""
    return RunningModels(
        release="0.1.0",
        models=tuple(
            ModelVersion(
                model=HOSTILE,
                version=f"{at:010x}",
                weights="/srv/models/a-long-folder/" + "of-weights-" * 8,
                place=f"engine-{at}",
                state=state,
                since=int(time.time()) + 1,
                problem=problem if state == "failed" else "",
            )
            for at, state in enumerate(states)
        ),
    )


def endpoint_addresses(server: ConsoleServer, org: Organization) -> list[str]:
    async def first() -> str:
        async with tenant(server.services.db, org.id) as conn:
            return str(
                await conn.scalar(select_endpoints(org.id).with_only_columns(endpoints.c.id))
            )

    endpoint = server.call(first)
    return [f"/console/webhooks/{endpoint}", f"/console/webhooks/{endpoint}?state=dead"]


def audit_addresses(server: ConsoleServer, org: Organization) -> list[str]:
    """The oldest entries are behind; one of a hostile name is looked at."""

    async def last() -> str:
        async with tenant(server.services.db, org.id) as conn:
            made = sa.select(entries.c.id).where(entries.c.org_id == org.id)
            made = made.where(entries.c.action == "webhook_endpoint.created")
            return str(await conn.scalar(made.limit(1)))

    return [f"/console/audit/{server.call(last)}"]


async def billing(server: ConsoleServer) -> None:
    await sow_billing(server, HOSTILE, MANY)


UPSTREAM = "https://models.example/v1"
SEEDS: list[Callable[[ConsoleServer], Awaitable[None]]] = [
    *(keys, projects, plans, budgets, webhooks, stored_settings, billing, mcp_seeds.sow),
    make_requests,
]
ADDRESSES: list[Callable[[ConsoleServer, Organization], list[str]]] = [
    *(things, endpoint_addresses, audit_addresses, mcp_seeds.addresses, addresses_of_requests),
    lambda _, org: invoice_addresses(org),
]
"""Each returns addresses below /console that are looked at beside those of all pages."""


async def sow(server: ConsoleServer) -> None:
    for each in SEEDS:
        await each(server)
