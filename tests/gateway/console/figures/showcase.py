"""Makes an organization as one looks after some weeks, for the pictures that the README shows."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from billing.money import PICO_PER_USD
from gateway.audit.log import COMMAND_LINE
from gateway.auth.login.passwords import Passwords
from gateway.request_log.rows import RequestRow
from gateway.request_log.writer import RequestLog
from gateway.tenancy.members.users import create_user
from gateway.tenancy.money.credits import create_credit
from gateway.tenancy.money.spend_caps import create_spend_cap
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from mcp_bridge.caller import Caller
from tests.gateway.console.mcp_seeds import ask
from tests.gateway.console.server import PASSWORD, ConsoleServer, Organization
from tests.gateway.request_log.console_seeds import bill, request_of

HOUR_MS = 3_600_000
HOURS = 48
PROJECTS = {
    "agents-prod": ("qwen-32b", 14, 320, 0.51),
    "support-bot": ("qwen-32b", 9, 120, 0.88),
    "web": ("llama-8b", 8, 200, 0.44),
    "nightly-eval": ("llama-8b", 6, 13, 1.0),
    "research": ("claude-upstream", 3, 160, 0.26),
}
"""The model of each, its requests in a busy hour, its monthly budget in USD and the part of it that
is spent."""


async def make_showcase(server: ConsoleServer) -> Organization:
    services = server.services
    hashed = await Passwords().hash(PASSWORD)
    async with services.system_db.begin() as conn:
        made = await create_org(conn, name="acme", actor=COMMAND_LINE)
        person = {"email": "owner@acme.example", "name": "Ada", "role": "owner"}
        user = await create_user(
            conn, org_id=made.id, **person, actor=COMMAND_LINE, password_hash=hashed
        )
        projects = [
            (await create_project(conn, org_id=made.id, name=name, actor=COMMAND_LINE)).id
            for name in PROJECTS
        ]
    await create_credit(
        services.system_db,
        org_id=made.id,
        amount_pico=1000 * PICO_PER_USD,
        operator_org=server.little.id,
        actor=COMMAND_LINE,
    )
    org = Organization(name="acme", id=made.id, project_id=projects[0], users={"owner": user.id})
    await make_traffic(server, org, projects)
    await make_budgets(server, org, projects)
    caller = Caller(org_id=org.id, project_id=org.project_id, subject=user.id, client="key_agents")
    await ask(server, caller, "files", "delete_folder", {"path": "/srv/reports/2025"})
    return org


async def make_traffic(server: ConsoleServer, org: Organization, projects: Sequence[str]) -> None:
    log = RequestLog(server.services.system_db, keep_days=30, on_dropped=lambda number: None)
    draw, now_ms, number = random.Random(7), int(time.time() * 1000), 0
    sums: Counter[tuple[str, str, str, int]] = Counter()
    for hour in range(HOURS):
        at_ms = now_ms - hour * HOUR_MS
        busy = 0.25 + 0.75 * max(0.0, math.sin((at_ms / HOUR_MS % 24 - 5) / 24 * 2 * math.pi))
        for project, (model, most, _, _) in zip(projects, PROJECTS.values(), strict=True):
            for _ in range(max(1, round(most * busy * draw.uniform(0.85, 1.1)))):
                number += 1
                row = made_of(org, project, model, at_ms - draw.randrange(HOUR_MS), number, draw)
                log.put(row)
                tokens = 12 * row.output_tokens
                sums[row.project, row.key, row.model, row.at_ms // HOUR_MS] += tokens
    await log.flush()
    await bill(server, org, sums)


def made_of(
    org: Organization, project: str, model: str, at_ms: int, number: int, draw: random.Random
) -> RequestRow:
    row = request_of(org, [f"key_{project[-6:]}"], number)
    is_slow = model == "qwen-32b" and draw.random() < 0.03
    ttft_us = round(draw.lognormvariate(12.1, 0.22) * (3 if is_slow else 1))
    tpot_us = round(draw.lognormvariate(9.95, 0.12))
    return msgspec.structs.replace(
        row,
        id=f"{at_ms:012x}7{number:019x}",
        at_ms=at_ms,
        project=project,
        model=model,
        lane="interactive",
        status=503 if draw.random() < 0.002 else 200,
        is_good=ttft_us <= 450_000 and tpot_us <= 40_000,
        ttft_us=ttft_us,
        tpot_us=tpot_us,
        output_tokens=draw.randrange(120, 480),
    )


async def make_budgets(server: ConsoleServer, org: Organization, projects: Sequence[str]) -> None:
    services = server.services
    await create_spend_cap(
        services.system_db,
        services.redis,
        org_id=org.id,
        amount_pico=1000 * PICO_PER_USD,
        actor=COMMAND_LINE,
    )
    for project, (_, _, usd, part) in zip(projects, PROJECTS.values(), strict=True):
        await create_spend_cap(
            services.system_db,
            services.redis,
            org_id=org.id,
            project_id=project,
            amount_pico=usd * PICO_PER_USD,
            actor=COMMAND_LINE,
        )
        spent = {"org": org.id, "project": project, "spent": round(usd * part * PICO_PER_USD)}
        async with services.system_db.begin() as conn:
            await conn.execute(SPENT, spent)
    async with services.system_db.begin() as conn:
        for each in (LINE, "UPDATE orgs SET prepaid = true WHERE id = :org"):
            await conn.execute(sa.text(each), {"org": org.id})


SPENT = sa.text("""
    INSERT INTO spend_to_date (org_id, scope, scope_id, period, period_start, spent_pico)
    VALUES (:org, 'project', :project, 'month', date_trunc('month', now(), 'UTC'), :spent)
""")
LINE = "INSERT INTO credit_lines (org_id, paid_pico) VALUES (:org, 0) ON CONFLICT DO NOTHING"
