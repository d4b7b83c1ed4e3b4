"""Grants and codes: one redemption, one minute, one client, one tenant."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.auth.oauth.tokens.grants import (
    CODE_KEPT_S,
    CODE_LIFETIME_S,
    Code,
    CodeReplayed,
    Grant,
    create_grant,
    find_grant,
    issue_code,
    redeem_code,
    revoke_grant,
    select_grants,
)
from gateway.auth.tables import oauth_codes, oauth_grants
from gateway.db import tenant
from gateway.secret import Peppers
from gateway.tenancy.errors import NotFound
from tests.gateway.auth.conftest import ACTOR, SECRET, Clock, Tenant

PEPPERS = Peppers(SECRET, "oauth-code")
RESOURCE = "https://tollgate.example/v1"


async def make_code(db: AsyncEngine, who: Tenant, clock: Clock) -> tuple[Grant, str]:
    async with tenant(db, who.org_id) as conn:
        grant = await create_grant(
            conn,
            org_id=who.org_id,
            user_id=who.user_id,
            client_id="client_a",
            project_id=who.project_id,
            resources=[RESOURCE],
            scopes=["openid", "inference"],
            actor=ACTOR,
        )
        code = await issue_code(
            conn,
            PEPPERS,
            grant=grant,
            redirect_uri="https://client.example/cb",
            code_challenge="c" * 43,
            nonce="n",
            auth_time=clock.now,
            amr=["pwd"],
            dpop_jkt=None,
            now=clock.now,
        )
    return grant, code


async def listed(conn: AsyncConnection, org_id: str, **narrowed: str) -> list[Grant]:
    statement = select_grants(org_id, **narrowed).order_by(oauth_grants.c.id)
    return [Grant(**row._mapping) for row in await conn.execute(statement)]


async def redeem(
    db: AsyncEngine, code: str, clock: Clock, client_id: str = "client_a"
) -> Code | CodeReplayed | None:
    async with db.begin() as conn:
        return await redeem_code(conn, PEPPERS, code=code, client_id=client_id, now=clock.now)


async def test_a_code_stands_for_its_grant_once(
    tenant_db: AsyncEngine, system_db: AsyncEngine, acme: Tenant, clock: Clock
) -> None:
    grant, code = await make_code(tenant_db, acme, clock)
    found = await redeem(system_db, code, clock)
    assert isinstance(found, Code)
    assert (found.grant_id, found.user_id, found.org_id) == (grant.id, acme.user_id, acme.org_id)
    assert (found.project_id, found.resources) == (acme.project_id, [RESOURCE])
    assert found.scopes == ["inference", "openid"] and found.amr == ["pwd"]
    assert found.code_challenge == "c" * 43 and found.nonce == "n"
    assert found.auth_time == clock.now and found.redeemed_at == clock.now
    assert await redeem(system_db, code, clock) == CodeReplayed(acme.org_id, grant.id)


async def test_of_twenty_at_once_one_wins_and_the_others_know_the_grant(
    tenant_db: AsyncEngine, system_db: AsyncEngine, acme: Tenant, clock: Clock
) -> None:
    grant, code = await make_code(tenant_db, acme, clock)
    found = await asyncio.gather(*(redeem(system_db, code, clock) for _ in range(20)))
    assert sum(isinstance(each, Code) for each in found) == 1
    assert found.count(CodeReplayed(acme.org_id, grant.id)) == 19


async def test_a_code_is_its_clients_and_lasts_a_minute(
    tenant_db: AsyncEngine, system_db: AsyncEngine, acme: Tenant, clock: Clock
) -> None:
    _, code = await make_code(tenant_db, acme, clock)
    assert await redeem(system_db, code, clock, "client_b") is None
    assert await redeem(system_db, code + "x", clock) is None
    clock.pass_s(CODE_LIFETIME_S)
    assert await redeem(system_db, code, clock) is None
    clock.pass_s(-1)
    assert isinstance(await redeem(system_db, code, clock), Code)


async def test_a_code_dies_with_its_grant(
    tenant_db: AsyncEngine, system_db: AsyncEngine, acme: Tenant, clock: Clock
) -> None:
    grant, code = await make_code(tenant_db, acme, clock)
    async with tenant(tenant_db, acme.org_id) as conn:
        assert await revoke_grant(
            conn, org_id=acme.org_id, grant_id=grant.id, because="user", actor=ACTOR
        )
    assert await redeem(system_db, code, clock) is None


async def test_a_redemption_that_rolls_back_was_none(
    tenant_db: AsyncEngine, system_db: AsyncEngine, acme: Tenant, clock: Clock
) -> None:
    _, code = await make_code(tenant_db, acme, clock)
    with pytest.raises(RuntimeError):
        async with system_db.begin() as conn:
            await redeem_code(conn, PEPPERS, code=code, client_id="client_a", now=clock.now)
            raise RuntimeError
    assert isinstance(await redeem(system_db, code, clock), Code)


async def test_the_code_itself_stands_nowhere_and_old_ones_are_swept_away(
    db: AsyncEngine, tenant_db: AsyncEngine, acme: Tenant, other: Tenant, clock: Clock
) -> None:
    _, first = await make_code(tenant_db, acme, clock)
    await make_code(tenant_db, other, clock)
    clock.pass_s(CODE_KEPT_S + CODE_LIFETIME_S + 1)
    await make_code(tenant_db, acme, clock)
    async with db.connect() as conn:
        rows = (await conn.execute(sa.select(oauth_codes))).all()
    assert [row.org_id for row in rows].count(acme.org_id) == 1, "the old one is gone"
    assert len(rows) == 2, "another tenant's stays"
    assert first not in str(rows)


async def test_grants_are_listed_and_revoked_inside_their_org(
    tenant_db: AsyncEngine, acme: Tenant, other: Tenant, clock: Clock
) -> None:
    mine = [(await make_code(tenant_db, acme, clock))[0] for _ in range(3)]
    theirs, _ = await make_code(tenant_db, other, clock)
    async with tenant(tenant_db, acme.org_id) as conn:
        assert await listed(conn, acme.org_id) == mine
        assert await listed(conn, acme.org_id, client_id="client_b") == []
        assert await listed(conn, acme.org_id, user_id=acme.user_id) == mine
        assert await listed(conn, other.org_id) == []
        for org_id in (acme.org_id, other.org_id):
            with pytest.raises(NotFound):
                await find_grant(conn, org_id=org_id, grant_id=theirs.id)
            with pytest.raises(NotFound):
                await revoke_grant(
                    conn, org_id=org_id, grant_id=theirs.id, because="x", actor=ACTOR
                )
        assert await revoke_grant(
            conn, org_id=acme.org_id, grant_id=mine[0].id, because="replay", actor=ACTOR
        )
        again = await revoke_grant(
            conn, org_id=acme.org_id, grant_id=mine[0].id, because="again", actor=ACTOR
        )
        found = await find_grant(conn, org_id=acme.org_id, grant_id=mine[0].id)
    assert not again and found.revoked_because == "replay" and found.revoked_at is not None
