"""Two tenants on a migrated Postgres, seen as a worker sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine
from tests.gateway.members.tenants import Tenant, found_tenant


@pytest.fixture
async def system(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(postgres_url, role=ROLE_SYSTEM)
    yield engine
    await engine.dispose()


@pytest.fixture
async def app_db(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(postgres_url, role=ROLE_TENANT)
    yield engine
    await engine.dispose()


@pytest.fixture
async def acme(system: AsyncEngine, app_db: AsyncEngine) -> Tenant:
    return await found_tenant(system, app_db, "acme")


@pytest.fixture
async def other(system: AsyncEngine, app_db: AsyncEngine) -> Tenant:
    return await found_tenant(system, app_db, "other")
