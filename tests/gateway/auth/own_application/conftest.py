"""Gives each test of pages here an application of its own: one with other settings, which its
module makes, or one that knows no issuer yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.oauth.clients.store import Client
from tests.gateway.auth.browsing import (
    at_the_account,
    live_app,
    new_browser,
    register,
    with_password,
)
from tests.gateway.auth.conftest import Clock, Tenant


@pytest.fixture
async def app(
    tmp_path: Path, postgres_url: str, redis_url: str, clock: Clock, patient: None
) -> AsyncIterator[Litestar]:
    async with live_app(tmp_path, postgres_url, redis_url, clock) as made:
        yield made


@pytest.fixture
async def ada(app: Litestar, db: AsyncEngine, acme: Tenant) -> Tenant:
    """Can sign in."""
    return await with_password(app, db, acme)


@pytest.fixture
async def client(app: Litestar, tenant_db: AsyncEngine, ada: Tenant) -> Client:
    return (await register(tenant_db, app, ada)).client


@pytest.fixture
async def browser(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    async with new_browser(app) as made:
        yield made


@pytest.fixture
async def signed_in(browser: httpx.AsyncClient, ada: Tenant) -> httpx.AsyncClient:
    return await at_the_account(browser, ada)
