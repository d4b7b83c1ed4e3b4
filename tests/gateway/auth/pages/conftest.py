"""A worker's application, which serves all tests here, somebody of a fresh organization who can
sign in, and their browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import redis.asyncio
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.login.throttle import PREFIX
from gateway.auth.oauth.clients.store import Client
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine
from gateway.ids import uuid7
from tests.databases import Databases
from tests.gateway.auth.browsing import (
    SharedApplication,
    at_the_account,
    live_app,
    new_browser,
    register,
    with_password,
)
from tests.gateway.auth.conftest import Clock, Tenant, make_tenant
from tests.gateway.conftest import be_patient
from tests.shared_application import (
    in_one_task,
    on_one_loop,
    run_on_one_loop,
    stores_of_its_own,
)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    run_on_one_loop(items, HERE, "application")


@on_one_loop(scope="session")
async def application(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SharedApplication]:
    folder, clock = tmp_path_factory.mktemp("application"), Clock()
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        async with stores_of_its_own(databases, redis_server_url) as (url, redis_url):
            db = create_engine(url)
            tenant_db = create_engine(url, role=ROLE_TENANT)
            system_db = create_engine(url, role=ROLE_SYSTEM)
            store = redis.asyncio.from_url(redis_url)
            async with in_one_task(live_app(folder, url, redis_url, clock)) as app:
                patch.undo()
                yield SharedApplication(app, clock, db, tenant_db, system_db, store)
            await store.aclose()
            for pool in (db, tenant_db, system_db):
                await pool.dispose()


@on_one_loop()
async def app(application: SharedApplication, patient: None) -> Litestar:
    """Nobody has failed to sign in."""
    async for key in application.redis.scan_iter(f"{PREFIX}:*"):
        await application.redis.delete(key)
    return application.app


@pytest.fixture
def clock(application: SharedApplication) -> Clock:
    application.clock.now = datetime.now(tz=UTC).replace(microsecond=0)
    return application.clock


@pytest.fixture
def db(application: SharedApplication) -> AsyncEngine:
    return application.db


@pytest.fixture
def tenant_db(application: SharedApplication) -> AsyncEngine:
    return application.tenant_db


@pytest.fixture
def system_db(application: SharedApplication) -> AsyncEngine:
    return application.system_db


@on_one_loop()
async def acme(db: AsyncEngine) -> Tenant:
    return await make_tenant(db, f"acme-{uuid7().hex}")


@on_one_loop()
async def other(db: AsyncEngine) -> Tenant:
    return await make_tenant(db, f"other-{uuid7().hex}")


@on_one_loop()
async def ada(app: Litestar, db: AsyncEngine, clock: Clock, acme: Tenant) -> Tenant:
    """Can sign in."""
    return await with_password(app, db, acme)


@on_one_loop()
async def client(app: Litestar, tenant_db: AsyncEngine, ada: Tenant) -> Client:
    return (await register(tenant_db, app, ada)).client


@on_one_loop()
async def browser(app: Litestar, clock: Clock) -> AsyncIterator[httpx.AsyncClient]:
    async with new_browser(app) as made:
        yield made


@on_one_loop()
async def signed_in(browser: httpx.AsyncClient, ada: Tenant) -> httpx.AsyncClient:
    return await at_the_account(browser, ada)
