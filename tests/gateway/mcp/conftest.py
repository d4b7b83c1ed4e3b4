"""Two tenants of the stores of trust."""

from __future__ import annotations

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.tenancy.orgs import create_org


@pytest.fixture
async def orgs(db: AsyncEngine) -> list[str]:
    async with db.begin() as conn:
        return [
            (await create_org(conn, name=name, actor=COMMAND_LINE)).id
            for name in ("alice", "mallory")
        ]
