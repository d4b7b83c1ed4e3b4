"""Two tenants with a user each, and workers' pools."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.tenancy.members.users import create_user
from gateway.tenancy.orgs import create_org


class Tenant(msgspec.Struct, frozen=True):
    org_id: str
    user_id: str
    colleague_id: str


class Tenants(msgspec.Struct, frozen=True):
    alice: Tenant
    mallory: Tenant


@pytest.fixture
async def tenants(db: AsyncEngine) -> Tenants:
    made = []
    async with db.begin() as conn:
        for name in ("alice", "mallory"):
            org = await create_org(conn, name=name, actor=COMMAND_LINE)
            users = [
                await create_user(
                    conn,
                    org_id=org.id,
                    email=f"{each}@{name}.example",
                    name=each,
                    role="developer",
                    actor=COMMAND_LINE,
                )
                for each in ("one", "two")
            ]
            made.append(Tenant(org.id, users[0].id, users[1].id))
    return Tenants(*made)
