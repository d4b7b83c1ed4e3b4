"""Two tenants, one issuer, and what authenticates its tokens: for the tests of federation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.auth.federation.external_issuers import ExternalIssuers
from gateway.auth.federation.issuer_directory import IssuerDirectory
from gateway.auth.federation.issuer_keys import IssuerKeys
from gateway.auth.federation.issuers import (
    CIPHER_PURPOSE,
    Issuer,
    Rules,
    create_issuer,
)
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine
from gateway.principal import Principal
from gateway.secret import Cipher
from gateway.tenancy.changes import changing
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from tests.gateway.a_secret import a_secret
from tests.gateway.auth.issuing import (
    AUDIENCE,
    ISSUER,
    NOW,
    Clock,
    FakeIssuer,
    FarEnd,
)

PUBLIC_URL = "https://gateway.example.com"


class Tenant:
    def __init__(self, org_id: str, project_id: str) -> None:
        self.org_id = org_id
        self.project_id = project_id

    def rules(self, **more: Any) -> Rules:
        given: dict[str, Any] = {
            "name": "Example",
            "issuer": ISSUER,
            "audience": AUDIENCE,
            "project_id": self.project_id,
            "default_role": "developer",
        }
        return Rules(**(given | more))


class World:
    """Two tenants, one issuer, and what authenticates its tokens."""

    def __init__(self, db: AsyncEngine, system_db: AsyncEngine, redis: redis.asyncio.Redis) -> None:
        self.db, self.system_db = db, system_db
        self.redis = redis
        self.cipher = Cipher(a_secret("s1"), CIPHER_PURPOSE)
        self.far_end = FarEnd()
        self.issuer = FakeIssuer(self.far_end)
        self.wall_clock = Clock(NOW)
        self.clock = Clock(1000.0)
        self.keys = IssuerKeys(self.far_end, clock=self.clock)  # type: ignore[arg-type]
        self.directory = IssuerDirectory(db=system_db, redis=redis)
        self.external = ExternalIssuers(
            directory=self.directory,
            keys=self.keys,
            public_url=PUBLIC_URL,
            wall_clock=self.wall_clock,
        )
        self.alice: Tenant
        self.mallory: Tenant

    async def list_for(self, whose: Tenant, **more: Any) -> Issuer:
        async with changing(self.db, self.redis, "issuer_x", org_id=whose.org_id) as conn:
            return await create_issuer(
                conn,
                self.cipher,
                org_id=whose.org_id,
                rules=whose.rules(**more),
                actor=COMMAND_LINE,
            )

    async def authenticate(self, token: str | None = None, **claims: Any) -> Principal:
        found = self.issuer.sign(self.issuer.claims(**claims)) if token is None else token
        return await self.external.authenticate(found)


@pytest.fixture
async def world(postgres_url: str, redis: redis.asyncio.Redis) -> AsyncIterator[World]:
    db = create_engine(postgres_url, role=ROLE_TENANT)
    system_db = create_engine(postgres_url, role=ROLE_SYSTEM)
    made = World(db, system_db, redis)
    tenants = []
    for name in ("alice", "mallory"):
        async with system_db.begin() as conn:
            org = await create_org(conn, name=name, actor=COMMAND_LINE)
            project = await create_project(conn, org_id=org.id, name="p", actor=COMMAND_LINE)
        tenants.append(Tenant(org.id, project.id))
    made.alice, made.mallory = tenants
    await made.directory.start()
    yield made
    await made.directory.close()
    await made.keys.close()
    await db.dispose()
    await system_db.dispose()
