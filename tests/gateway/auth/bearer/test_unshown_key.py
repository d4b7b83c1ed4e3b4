"""The principal of a key that nobody shows: what a batch's lines run as, hours after it came."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.auth.bearer.api_keys import principal_of
from gateway.auth.errors import ExpiredKey, InvalidKey, RevokedKey
from gateway.principal import Principal
from gateway.tenancy.keys.keys import CreatedKey, revoke_key
from gateway.tenancy.tables import api_keys
from tests.gateway.auth.bearer.test_api_keys import authenticating, make_key

NOW = datetime.now(UTC)


async def of(db: AsyncEngine, created: CreatedKey, *, org_id: str | None = None) -> Principal:
    async with db.connect() as conn:
        row = created.row
        return await principal_of(conn, org_id=org_id or row.org_id, key_id=row.id)


async def test_it_is_what_the_shown_key_would_be(db: AsyncEngine, redis: Redis) -> None:
    created = await make_key(db, expires_at=NOW + timedelta(hours=1))
    async with authenticating(db, redis) as authenticator:
        assert await of(db, created) == await authenticator.authenticate(created.secret)


async def test_another_tenant_has_no_such_key(db: AsyncEngine) -> None:
    created = await make_key(db)
    with pytest.raises(InvalidKey):
        await of(db, created, org_id="org_other")


async def test_a_revoked_key_runs_nothing_more(db: AsyncEngine, redis: Redis) -> None:
    created = await make_key(db)
    row = created.row
    await revoke_key(db, redis, row.id, org_id=row.org_id, actor=COMMAND_LINE)
    with pytest.raises(RevokedKey):
        await of(db, created)


async def test_nor_does_one_that_has_expired_since(db: AsyncEngine) -> None:
    created = await make_key(db)
    async with db.begin() as conn:
        await conn.execute(api_keys.update().values(expires_at=NOW - timedelta(seconds=1)))
    with pytest.raises(ExpiredKey):
        await of(db, created)
