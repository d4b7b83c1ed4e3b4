"""/v1/admin/signing_keys: for who runs the installation, and nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
import pytest
import sqlalchemy as sa
from litestar import Litestar
from litestar.config.app import AppConfig
from litestar.datastructures import State
from redis.asyncio import Redis

from gateway.app.create import refuse
from gateway.audit.log import COMMAND_LINE
from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.oauth.tokens.signing_keys import JWKS_MAX_AGE_S, VERIFY_FOR_S
from gateway.networks import Networks
from gateway.routes.admin.installation import signing_keys
from gateway.routes.shared.guards import authenticate
from gateway.tenancy.keys.keys import create_key
from tests.gateway.auth.world import World

PATH = "/v1/admin/signing_keys"


async def a_key(world: World, scope: str) -> dict[str, str]:
    async with world.db.begin() as conn:
        made = await create_key(
            conn,
            org_id=world.org_id,
            project_id=world.project_id,
            name=scope.replace(":*", ""),
            scopes=[scope],
            pepper=b"p" * 32,
            pepper_id="p",
            actor=COMMAND_LINE,
        )
    return {"authorization": f"Bearer {made.secret}"}


@pytest.fixture
async def operator(world: World, redis: Redis) -> AsyncIterator[httpx.AsyncClient]:
    async with world.db.begin() as conn:
        await conn.execute(sa.text("UPDATE orgs SET is_operator = true"))
    authenticator = Authenticator(db=world.db, redis=redis, pepper=b"p" * 32, pepper_id="p")
    await authenticator.start()
    services = SimpleNamespace(
        authenticator=authenticator,
        authority=world.authority,
        system_db=world.db,
        trusted_proxies=Networks.of([]),
    )

    def wire(config: AppConfig) -> AppConfig:
        config.state = State({"services": services, "public_url": "http://test"})
        return config

    app = Litestar(
        signing_keys.routes,
        guards=[authenticate],
        exception_handlers={Exception: refuse},
        on_app_init=[wire],
        openapi_config=None,
        logging_config=None,
    )
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    headers = await a_key(world, "admin:*")
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers=headers
    ) as found:
        yield found
    await authenticator.close()


async def test_keys_are_listed_rotated_and_revoked(
    world: World, operator: httpx.AsyncClient
) -> None:
    listed = (await operator.get(PATH)).json()
    assert [each["state"] for each in listed["data"]] in (["active", "next"], ["next", "active"])
    assert listed["has_more"] is False and listed["object"] == "list"
    assert set(listed["data"][0]) == {
        *("object", "id", "state", "created_at", "activated_at", "retired_at", "verify_until")
    }
    one = (await operator.get(PATH, params={"limit": 1, "order": "desc"})).json()
    assert one["has_more"] is True and one["last_id"] == listed["last_id"]
    soon = await operator.post(f"{PATH}/rotate")
    assert (soon.status_code, soon.json()["code"]) == (409, "too_soon")
    assert soon.headers["retry-after"] == str(JWKS_MAX_AGE_S)
    world.clock.now += JWKS_MAX_AGE_S
    old = world.keys.ring.active.kid
    rotated = await operator.post(f"{PATH}/rotate")
    assert rotated.status_code == 200 and rotated.json()["state"] == "active"
    assert world.keys.ring.active.kid == rotated.json()["id"] != old
    assert VERIFY_FOR_S > 600 and old in world.keys.ring.verifying
    revoked = await operator.post(f"{PATH}/{old}/revoke")
    assert revoked.json()["state"] == "retired" and old not in world.keys.ring.verifying
    missing = await operator.post(f"{PATH}/nobody/revoke")
    assert (missing.status_code, missing.json()["param"]) == (404, "kid")
    assert (await operator.get(PATH, params={"limit": 0})).status_code == 400
    async with world.db.connect() as conn:
        actions = await conn.scalars(
            sa.text(
                "SELECT action FROM audit_entries WHERE action LIKE 'signing%' ORDER BY sequence"
            )
        )
        assert list(actions) == ["signing_key.rotated", "signing_key.revoked"]


async def test_nobody_else_may(world: World, operator: httpx.AsyncClient) -> None:
    headers = await a_key(world, "inference")
    for method, path in (("GET", PATH), ("POST", f"{PATH}/rotate"), ("POST", f"{PATH}/x/revoke")):
        answer = await operator.request(method, path, headers=headers)
        assert answer.status_code == 403
        assert answer.headers["content-type"] == "application/problem+json"
