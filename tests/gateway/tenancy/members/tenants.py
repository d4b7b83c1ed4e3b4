"""An org with a project and an owner, as the tests of who belongs to it find it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import COMMAND_LINE, Actor
from gateway.audit.tables import entries
from gateway.db import tenant
from gateway.tenancy import projects
from gateway.tenancy.members import users
from gateway.tenancy.members.users import User
from gateway.tenancy.orgs import create_org
from tests.gateway.a_secret import a_secret

ACTOR = Actor(kind="api_key", id="key_1")
NOW = datetime(2026, 11, 21, tzinfo=UTC)
ME: dict[str, Actor] = {"actor": ACTOR}


SECRET = a_secret("one")


class Tenant:
    """An org with a project and an owner; `db` sees it alone."""

    def __init__(self, db: AsyncEngine, org_id: str, project_id: str, owner: User) -> None:
        self.db = db
        self.org_id = org_id
        self.project_id = project_id
        self.owner = owner

    def __call__(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return tenant(self.db, self.org_id)

    @property
    def here(self) -> dict[str, str]:
        return {"org_id": self.org_id, "project_id": self.project_id}

    async def add(self, email: str, role: str = "developer") -> User:
        async with self() as conn:
            return await users.create_user(
                conn, org_id=self.org_id, email=email, name="N", role=role, **ME
            )

    async def actions(self) -> list[str]:
        async with self() as conn:
            found = await conn.scalars(sa.select(entries.c.action).order_by(entries.c.sequence))
            return list(found)


async def found_tenant(system_db: AsyncEngine, db: AsyncEngine, name: str) -> Tenant:
    async with system_db.begin() as conn:
        org = await create_org(conn, name=name, actor=COMMAND_LINE)
    async with tenant(db, org.id) as conn:
        project = await projects.create_project(conn, org_id=org.id, name="web", **ME)
        owner = await users.create_user(
            conn, org_id=org.id, email=f"owner@{name}.example", name="O", role="owner", **ME
        )
    return Tenant(db, org.id, project.id, owner)
