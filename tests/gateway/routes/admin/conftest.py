"""The whole application in this process, on a real Postgres and Redis: `world` has the operator's
admin key and makes clients of the official SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.create import create_app
from gateway.home import Home
from gateway.processes import database
from gateway.routes.shared.services import Services
from gateway.settings.load import load

START_TIMEOUT_S = 30.0
CONFIG = """
[[model]]
name = "far"
upstream = "http://127.0.0.1:9/v1"
[plan.default]
tokens_per_minute = 1000000
[plan.gold]
requests_per_minute = 10
"""


class World:
    def __init__(self, app: Litestar, db: AsyncEngine, admin_key: str, api_key: str) -> None:
        self.app, self.db = app, db
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
    """Start the application with these settings, whose state is in `folder`."""
    file = folder / "tollgate.toml"
    file.write_text(config)
    environ = {"TOLLGATE_DATABASE_URL": postgres_url, "TOLLGATE_REDIS_URL": redis_url}
    settings = load({"home": folder / "home", "config": file}, environ)
    Home(settings.home).create()
    made = await database.prepare(settings, postgres_url, redis_url, "http://test/v1")
    assert made is not None
    app = create_app(settings)
    async with app.lifespan():
        found = World(app, db, made.admin_key, made.api_key)
        yield found
        await found.close()


@pytest.fixture
async def world(
    db: AsyncEngine,
    postgres_url: str,
    redis_url: str,
    tmp_path: Path,
    config_text: str,
    patient: None,
) -> AsyncIterator[World]:
    ready, done = asyncio.Future[World](), asyncio.Event()

    async def live() -> None:
        """A fixture begins and ends in two tasks; the lifespan must be one's."""
        async with open_world(tmp_path, config_text, db, postgres_url, redis_url) as opened:
            ready.set_result(opened)
            await done.wait()

    life = asyncio.create_task(live())
    either: set[asyncio.Future[Any]] = {life, ready}
    await asyncio.wait(either, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        life.result()
    yield ready.result()
    done.set()
    await life


@pytest.fixture
async def org_id(world: World) -> str:
    return (await world.services.authenticator.authenticate(world.admin_key)).org_id


@pytest.fixture
async def project_id(world: World) -> str:
    made = await world.sdk.admin.organization.projects.create(name="web")
    return made.id
