"""The first start: an organization, which operates the installation, a project and two keys, so
that there is something to call with.

The keys are returned once; who loses them (credentials.json) has not revoked them: they go on
working until `revoke_key`, and new ones are made with `create_key`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import FIRST_START
from gateway.permissions import SCOPE_MCP_CALL
from gateway.principal import SCOPE_ADMIN, SCOPE_INFERENCE, SCOPE_USAGE_READ, Plan
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.money.plans import record_changes, sync_plans
from gateway.tenancy.orgs import create_org, find_operator
from gateway.tenancy.projects import create_project
from gateway.tenancy.tables import orgs

FIRST_NAME = "default"
BOOTSTRAP_LOCK = 0x6964656E_74697479
"""Postgres advisory lock: "identity" in ASCII."""


class BootstrapResult(msgspec.Struct, frozen=True, kw_only=True):
    """The keys made by this call; None when there was an organization already."""

    api_key: str | None = None
    admin_key: str | None = None

    def __repr__(self) -> str:
        return f"BootstrapResult(first_start={self.api_key is not None})"


async def bootstrap(
    db: AsyncEngine,
    *,
    pepper: bytes,
    pepper_id: str,
    plans: Sequence[Plan],
    default_plan: str | None,
) -> BootstrapResult:
    """Bring the plans up to date and, in an empty database, make the first org, project, API key
    and admin key.

    The API key gets `default_plan`. One transaction under a lock: of many that start at once, one
    makes the keys.
    Raises: InvalidField, NotFound (default_plan is not in plans).
    """
    async with db.begin() as conn:
        await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(BOOTSTRAP_LOCK)))
        changes = await sync_plans(conn, plans)
        if await conn.scalar(sa.select(orgs.c.id).limit(1)) is not None:
            operator = await find_operator(conn)
            if operator is not None:
                await record_changes(conn, changes, operator_org=operator)
            return BootstrapResult()
        org = await create_org(conn, name=FIRST_NAME, is_operator=True, actor=FIRST_START)
        project = await create_project(conn, org_id=org.id, name=FIRST_NAME, actor=FIRST_START)
        api_key = await create_key(
            conn,
            org_id=org.id,
            project_id=project.id,
            name=FIRST_NAME,
            scopes=[SCOPE_INFERENCE, SCOPE_MCP_CALL],
            plan=default_plan,
            pepper=pepper,
            pepper_id=pepper_id,
            actor=FIRST_START,
        )
        admin_key = await create_key(
            conn,
            org_id=org.id,
            project_id=None,
            name="admin",
            scopes=[SCOPE_ADMIN, SCOPE_USAGE_READ],
            pepper=pepper,
            pepper_id=pepper_id,
            actor=FIRST_START,
        )
        await record_changes(conn, changes, operator_org=org.id)
    return BootstrapResult(api_key=api_key.secret, admin_key=admin_key.secret)
