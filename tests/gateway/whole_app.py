"""The application as `create_app` makes it, on a real Postgres and a real Redis, with two tenants
and no engine: for tests of administration. What `open_services` would open stands in a namespace.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import redis.asyncio
from litestar import Litestar

from gateway.app.create import create_app
from gateway.audit.log import COMMAND_LINE
from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.bearer.last_used import LastUsed
from gateway.auth.cors_origins import CorsOrigins
from gateway.batches.circuit_breaker import CircuitBreakers
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.fleet.router import Fleet, Route
from gateway.lanes import LaneDeadlines, SloTable
from gateway.networks import Networks
from gateway.routes.shared.services import Services
from gateway.secret import Secret, SecretKey
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry
from gateway.tenancy.idempotency_keys import IdempotencyKeys
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project

SECRET = Secret(version=1, keys=(SecretKey(id="one", secret=base64.b64encode(b"s" * 32).decode()),))
MODELS = ("penny", "big", "wide")


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    org_id: str
    project_id: str
    admin: str
    """An admin key."""
    key: str
    """One for inference."""


class World(msgspec.Struct, frozen=True, kw_only=True):
    app: Litestar
    client: httpx.AsyncClient
    services: Any
    acme: Tenant
    other: Tenant

    async def call(
        self, method: str, path: str, key: str | None, body: Any = None, **options: Any
    ) -> httpx.Response:
        headers = options.pop("headers", {})
        if key is not None:
            headers = {"authorization": f"Bearer {key}", **headers}
        return await self.client.request(method, path, json=body, headers=headers, **options)


@asynccontextmanager
async def world(
    postgres_url: str, store: redis.asyncio.Redis, home: Path, **wired: Any
) -> AsyncIterator[World]:
    """`wired`: services beside or in the place of those that stand here."""
    key = SECRET.current
    async with AsyncExitStack() as stack:
        db = create_engine(postgres_url, role=ROLE_TENANT)
        system_db = create_engine(postgres_url, role=ROLE_SYSTEM)
        for pool in (db, system_db):
            stack.push_async_callback(pool.dispose)
        last_used = LastUsed(system_db)
        authenticator = Authenticator(
            db=system_db,
            redis=store,
            pepper=key.derive(PEPPER_PURPOSE),
            pepper_id=key.id,
            on_use=last_used.note,
        )
        await authenticator.start()
        stack.push_async_callback(authenticator.close)
        cors_origins = CorsOrigins(system_db)
        stack.push_async_callback(cors_origins.close)
        unused: Any = (None,)
        routes = [Route(model=name, kind="engine", replicas=unused) for name in MODELS]
        services = {
            "telemetry": Telemetry(models=MODELS),
            "authenticator": authenticator,
            "last_used": last_used,
            "db": db,
            "system_db": system_db,
            "redis": store,
            "cors_origins": cors_origins,
            "trusted_proxies": Networks(),
            "idempotency_keys": IdempotencyKeys(db=db, system_db=system_db, secret=SECRET),
            "generation": SimpleNamespace(
                fleet=Fleet(routes), deadlines=LaneDeadlines(), slos=SloTable()
            ),
            "started_at": 0,
        }
        app = create_app(load({"home": home}, {}))
        app.state.services = SimpleNamespace(**(services | wired))
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        client = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://test")
        )
        yield World(
            app=app,
            client=client,
            services=app.state.services,
            acme=await make_tenant(postgres_url, "acme", is_operator=True),
            other=await make_tenant(postgres_url, "other", is_operator=False),
        )


def services_with(**given: Any) -> Services:
    """Return the services of a worker that uses these alone."""
    required = (each.name for each in msgspec.structs.fields(Services) if each.required)
    batches = SimpleNamespace(breakers=CircuitBreakers())
    return Services(**{**dict.fromkeys(required), "batches": batches, **given})


async def make_tenant(postgres_url: str, name: str, *, is_operator: bool) -> Tenant:
    owner = create_engine(postgres_url)
    pepper = {"pepper": SECRET.current.derive(PEPPER_PURPOSE), "pepper_id": SECRET.current.id}
    async with owner.begin() as conn:
        org = await create_org(conn, name=name, is_operator=is_operator, actor=COMMAND_LINE)
    async with tenant(owner, org.id) as conn:
        project = await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
        of = {"org_id": org.id, "project_id": project.id, **pepper}
        admin = await create_key(conn, name="admin", scopes=["admin:*"], **of, actor=COMMAND_LINE)  # type: ignore[arg-type]
        key = await create_key(conn, name="first", scopes=["inference"], **of, actor=COMMAND_LINE)  # type: ignore[arg-type]
    await owner.dispose()
    return Tenant(org_id=org.id, project_id=project.id, admin=admin.secret, key=key.secret)
