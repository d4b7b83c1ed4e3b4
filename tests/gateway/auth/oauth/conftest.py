"""An authorization server, and two routes behind the guard, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from litestar import Litestar, Request, Response, get
from litestar.config.app import AppConfig
from litestar.datastructures import State
from redis.asyncio import Redis

from gateway.auth.bearer.api_keys import Authenticator
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine
from gateway.http_errors.table import to_http_error
from gateway.networks import Networks
from gateway.principal import Principal
from gateway.routes.asgi.head import HeadMethod
from gateway.routes.oauth import endpoints as oauth
from gateway.routes.shared.access import AUDIENCE, needs
from gateway.routes.shared.guards import authenticate
from tests.gateway.auth.parts import ISSUER
from tests.gateway.auth.world import (
    World,
    open_world,
)


@get("/v1/probe", opt=needs("inference"))
async def probe(request: Request[Principal, Any, Any]) -> str:
    return request.user.key_id


@get("/v1/probe/{name:path}", opt=needs("inference"))
async def probe_path(request: Request[Principal, Any, Any]) -> str:
    return str(request.path_params["name"])


@get("/probe/{org:str}", opt={**needs("inference"), AUDIENCE: "/mcp/{org}"})
async def probe_mcp(request: Request[Principal, Any, Any]) -> str:
    return request.user.key_id


def refuse(_request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    http_error = to_http_error(error)
    return Response(
        http_error.encode(), status_code=http_error.status, media_type="application/json"
    )


@pytest.fixture
async def world(postgres_url: str, redis: Redis) -> AsyncIterator[World]:
    db = create_engine(postgres_url, role=ROLE_SYSTEM, pool_size=25)
    async with open_world(db, redis) as made:
        yield made
    await db.dispose()


@pytest.fixture
async def http(world: World, postgres_url: str, redis: Redis) -> AsyncIterator[httpx.AsyncClient]:
    authenticator = Authenticator(
        db=world.db, redis=redis, pepper=b"p" * 32, pepper_id="p", tokens=world.tokens
    )
    await authenticator.start()
    tenant_db = create_engine(postgres_url, role=ROLE_TENANT)
    services = SimpleNamespace(
        authenticator=authenticator,
        authority=world.authority,
        db=tenant_db,
        system_db=world.db,
        trusted_proxies=Networks.of([]),
    )

    def wire(config: AppConfig) -> AppConfig:
        config.state = State({"services": services})
        return config

    app = Litestar(
        [*oauth.routes, probe, probe_path, probe_mcp],
        guards=[authenticate],
        exception_handlers={Exception: refuse},
        on_app_init=[wire],
        openapi_config=None,
    )
    app.asgi_handler = HeadMethod(app.asgi_handler)
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url=ISSUER) as found:
        yield found
    await authenticator.close()
    await tenant_db.dispose()
