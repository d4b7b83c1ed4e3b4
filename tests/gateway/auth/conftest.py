"""Two organizations with a project and a user each, seen through the roles that the gateway
takes."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE, Actor
from gateway.ids import uuid7
from gateway.secret import Secret, SecretKey
from gateway.tenancy.member_tables import users
from gateway.tenancy.orgs import create_org
from gateway.tenancy.tables import projects

SECRET = Secret(
    version=1, keys=(SecretKey(id="test", secret=base64.b64encode(b"s" * 32).decode()),)
)
ACTOR = Actor(kind="system", id="test", ip="192.0.2.1")


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    org_id: str
    org_name: str
    project_id: str
    user_id: str
    email: str


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = datetime.now(tz=UTC).replace(microsecond=0)

    def __call__(self) -> datetime:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def make_user(
    db: AsyncEngine, org_id: str, email: str, *, role: str, password_hash: str | None = None
) -> str:
    user_id = f"user_{uuid7().hex}"
    row = {"id": user_id, "org_id": org_id, "email": email, "name": "Ada", "role": role}
    async with db.begin() as conn:
        await conn.execute(sa.insert(users).values(**row, password_hash=password_hash))
    return user_id


async def make_tenant(db: AsyncEngine, name: str, *, role: str = "owner") -> Tenant:
    project_id = f"proj_{uuid7().hex}"
    async with db.begin() as conn:
        org = await create_org(conn, name=name, actor=COMMAND_LINE)
        row = {"id": project_id, "org_id": org.id, "name": "main"}
        await conn.execute(sa.insert(projects).values(**row))
    email = f"ada@{name}.example"
    user_id = await make_user(db, org.id, email, role=role)
    return Tenant(org_id=org.id, org_name=name, project_id=project_id, user_id=user_id, email=email)


@pytest.fixture
async def acme(db: AsyncEngine) -> Tenant:
    return await make_tenant(db, "acme")


@pytest.fixture
async def other(db: AsyncEngine) -> Tenant:
    return await make_tenant(db, "other")
