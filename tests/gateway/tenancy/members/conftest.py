"""Two tenants on a migrated Postgres, seen as a worker sees them."""

from __future__ import annotations

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.gateway.tenancy.members.tenants import Tenant, found_tenant


@pytest.fixture
async def acme(system_db: AsyncEngine, tenant_db: AsyncEngine) -> Tenant:
    return await found_tenant(system_db, tenant_db, "acme")


@pytest.fixture
async def other(system_db: AsyncEngine, tenant_db: AsyncEngine) -> Tenant:
    return await found_tenant(system_db, tenant_db, "other")
