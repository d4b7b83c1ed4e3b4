"""A worker's application, somebody of acme who can sign in, and their browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.oauth.clients.store import Client
from gateway.tenancy.member_tables import users
from tests.gateway.auth.browsing import (
    PASSWORD,
    desk_of,
    live_app,
    new_browser,
    register,
    sign_in,
)
from tests.gateway.auth.conftest import Clock, Tenant


@pytest.fixture
async def app(
    tmp_path: Path,
    postgres_url: str,
    redis_url: str,
    db: AsyncEngine,
    clock: Clock,
    patient: None,
) -> AsyncIterator[Litestar]:
    async with live_app(tmp_path, postgres_url, redis_url, clock) as made:
        yield made


@pytest.fixture
async def ada(app: Litestar, db: AsyncEngine, acme: Tenant) -> Tenant:
    """Can sign in."""
    hashed = await desk_of(app).passwords.hash(PASSWORD)
    async with db.begin() as conn:
        owner = sa.update(users).where(users.c.id == acme.user_id)
        await conn.execute(owner.values(password_hash=hashed))
    return acme


@pytest.fixture
async def client(app: Litestar, tenant_db: AsyncEngine, ada: Tenant) -> Client:
    return (await register(tenant_db, app, ada)).client


@pytest.fixture
async def browser(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    async with new_browser(app) as made:
        yield made


@pytest.fixture
async def signed_in(browser: httpx.AsyncClient, ada: Tenant) -> httpx.AsyncClient:
    done = await sign_in(browser, "/oauth/login", org="acme", email=ada.email)
    assert done.headers["location"] == "/oauth/account"
    return browser
