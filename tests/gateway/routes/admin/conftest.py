"""The whole application in this process, on a real Postgres and Redis: `world` has the operator's
admin key and makes clients of the official SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.invoices.invoicer import Invoicer
from gateway.app.create import create_app
from gateway.audit.log import COMMAND_LINE
from gateway.cache_report.leases import CacheLeases
from gateway.db import create_engine
from gateway.home import Home
from gateway.ids import uuid7
from gateway.principal import SCOPE_ADMIN, SCOPE_INFERENCE, SCOPE_USAGE_READ
from gateway.processes import database
from gateway.processes.bootstrap import FIRST_NAME
from gateway.routes.shared.services import Services
from gateway.secret import Secret, SecretKey
from gateway.settings.load import load
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from tests.databases import Databases
from tests.gateway.conftest import be_patient
from tests.shared_application import (
    in_one_task,
    on_one_loop,
    run_on_one_loop,
    stores_of_its_own,
)

HERE = Path(__file__).parent
CONFIG = """
[[model]]
name = "far"
upstream = "http://127.0.0.1:9/v1"
[plan.default]
tokens_per_minute = 1000000
[plan.gold]
requests_per_minute = 10
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    run_on_one_loop(items, HERE, "application")


class World:
    def __init__(
        self, app: Litestar, db: AsyncEngine, secret: SecretKey, admin_key: str, api_key: str
    ) -> None:
        self.app, self.db, self.secret = app, db, secret
        self.admin_key, self.api_key = admin_key, api_key
        asgi: Any = app
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=asgi), base_url="http://test"
        )
        self._sdk_http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=asgi))
        self.sdk = self.sdk_of(admin_key)

    @property
    def services(self) -> Services:
        found: Services = self.app.state.services
        return found

    def sdk_of(self, admin_key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key="unused",
            admin_api_key=admin_key,
            http_client=self._sdk_http,
            max_retries=0,
        )

    async def call(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str
    ) -> httpx.Response:
        """`headers`: `if_match=...` is the header If-Match."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named["authorization"] = f"Bearer {key or self.admin_key}"
        return await self.http.request(method, path, json=body, headers=named)

    async def close(self) -> None:
        await self.http.aclose()
        await self._sdk_http.aclose()


@pytest.fixture
async def config_text() -> str:
    return CONFIG


@asynccontextmanager
async def open_world(
    folder: Path, config: str, db: AsyncEngine, postgres_url: str, redis_url: str
) -> AsyncIterator[World]:
    """Start the application with these settings, whose state is in `folder`. It makes no invoice
    and ends no lease of itself: the tests do both, by a clock of their own."""
    file = folder / "tollgate.toml"
    file.write_text(config)
    environ = {"TOLLGATE_DATABASE_URL": postgres_url, "TOLLGATE_REDIS_URL": redis_url}
    settings = load({"home": folder / "home", "config": file}, environ)
    Home(settings.home).create()
    made = await database.prepare(settings, postgres_url, redis_url, "http://test/v1")
    assert made is not None
    app = create_app(settings)
    async with AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for each in (Invoicer, CacheLeases):
                patch.setattr(each, "start", lambda self: None)
            await stack.enter_async_context(app.lifespan())
        secret = Secret.load(settings.secret_key_file).current
        found = World(app, db, secret, made.admin_key, made.api_key)
        yield found
        await found.close()


@pytest.fixture
async def own_world(
    db: AsyncEngine,
    postgres_url: str,
    redis_url: str,
    tmp_path: Path,
    config_text: str,
    patient: None,
) -> AsyncIterator[World]:
    """An application of this test alone, just installed."""
    async with in_one_task(open_world(tmp_path, config_text, db, postgres_url, redis_url)) as found:
        yield found


@on_one_loop(scope="session")
async def application(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """The application of all tests that want no other."""
    folder = tmp_path_factory.mktemp("application")
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        async with stores_of_its_own(databases, redis_server_url) as (url, redis_url):
            db = create_engine(url)
            async with in_one_task(open_world(folder, CONFIG, db, url, redis_url)) as opened:
                patch.undo()
                yield opened
            await db.dispose()


@on_one_loop()
async def world(application: World, patient: None) -> AsyncIterator[World]:
    """The application, as who operates it from an organization without anything in it."""
    made = application
    name = f"org-{uuid7().hex}"
    async with made.db.begin() as conn:
        org = await create_org(conn, name=name, is_operator=True, actor=COMMAND_LINE)
        project = await create_project(conn, org_id=org.id, name=FIRST_NAME, actor=COMMAND_LINE)
        make = partial(
            create_key,
            conn,
            org_id=org.id,
            pepper=made.secret.derive(PEPPER_PURPOSE),
            pepper_id=made.secret.id,
            actor=COMMAND_LINE,
        )
        admin = await make(project_id=None, name="admin", scopes=[SCOPE_ADMIN, SCOPE_USAGE_READ])
        api = await make(project_id=project.id, name=FIRST_NAME, scopes=[SCOPE_INFERENCE])
    found = World(made.app, made.db, made.secret, admin.secret, api.secret)
    yield found
    await found.close()


@on_one_loop()
async def org_id(world: World) -> str:
    return (await world.services.authenticator.authenticate(world.admin_key)).org_id


@on_one_loop()
async def project_id(world: World) -> str:
    made = await world.sdk.admin.organization.projects.create(name="web")
    return made.id
