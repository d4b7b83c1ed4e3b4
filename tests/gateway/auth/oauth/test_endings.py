"""Grants and tokens end with a client that is archived or leaves, and with a password that is
changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import sqlalchemy as sa

from gateway.audit.tables import entries
from gateway.auth.bearer.revocations import announcing
from gateway.auth.bearer.subjects import find_principal
from gateway.auth.login.change import change_password
from gateway.auth.login.sessions import find_session, holds_session, start_session
from gateway.auth.oauth import rfc6749_token
from gateway.auth.oauth.clients.store import Client, archive_client, archive_registered
from gateway.auth.oauth.tokens.consents import is_remembered, remember
from gateway.auth.oauth.tokens.grants import find_grant
from gateway.secret import Peppers
from gateway.tenancy.errors import NotFound
from gateway.tenancy.member_tables import users
from tests.gateway.a_secret import a_secret
from tests.gateway.auth.bearer.revoking import PROMISED_S, seconds_until_refused
from tests.gateway.auth.world import ACTOR, REDIRECT, World, error_of

SESSIONS = Peppers(a_secret("one"), "session")


async def archive(world: World, client: Client) -> None:
    async with announcing(world.redis, clock=world.clock) as told, world.db.begin() as conn:
        await archive_client(conn, org_id=world.org_id, client_id=client.id, actor=ACTOR)
        await told.revoke(conn, org_id=world.org_id, kind="client", subject=client.id)


async def leave(world: World, client: Client) -> None:
    async with announcing(world.redis, clock=world.clock) as told, world.db.begin() as conn:
        orgs = await archive_registered(conn, client, actor=ACTOR, audit_org=world.org_id)
        assert set(orgs) == {world.org_id}
        await told.revoke(conn, org_id=min(orgs), kind="client", subject=client.id)


async def change(world: World, user_id: str) -> None:
    async with announcing(world.redis, clock=world.clock) as told, world.db.begin() as conn:
        await change_password(
            conn, told, org_id=world.org_id, user_id=user_id, password_hash="new", actor=ACTOR
        )


async def audited(world: World, action: str) -> list[Any]:
    found = sa.select(entries.c.target, entries.c.after).where(entries.c.action == action)
    async with world.db.connect() as conn:
        return [(row.target, json.loads(row.after)) for row in await conn.execute(found)]


@pytest.mark.parametrize("end", [archive, leave])
async def test_a_client_takes_its_grants_and_all_tokens_with_it(
    world: World, end: Callable[[World, Client], Awaitable[None]]
) -> None:
    own: dict[str, Any] = {"org_id": None, "project_id": None} if end is leave else {}
    async with world.db.begin() as conn:
        await conn.execute(sa.update(users).values(role="admin"))  # has all projects
    client, _ = await world.client(**own)
    bystander, _ = await world.client()
    other = await world.login(bystander)
    code, grant = await world.code(client)
    unused, _ = await world.code(client)
    answer = await world.redeem(client, code)
    await world.principal(answer["access_token"])
    await end(world, client)
    assert await seconds_until_refused(world.tokens, answer["access_token"]) < PROMISED_S
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"
    assert await error_of(world.redeem(client, unused)) == "invalid_grant"
    async with world.db.connect() as conn:
        ended = await find_grant(conn, org_id=world.org_id, grant_id=grant.id)
    assert ended.revoked_at is not None and ended.revoked_because == "client_archived"
    said = {"revoked_because": "client_archived", "grants": 2}
    assert await audited(world, "oauth_grants.revoked") == [(client.id, said)]
    await world.principal(other["access_token"])
    await world.refresh(bystander, other["refresh_token"])


async def test_what_is_issued_while_a_client_is_archived_dies_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = await world.client()
    code, _ = await world.code(client)
    archiving: list[asyncio.Task[None]] = []

    async def overtaken(*args: Any) -> Any:
        found = await find_principal(*args)
        if not archiving:
            archiving.append(asyncio.create_task(archive(world, client)))
            await asyncio.sleep(0.1)
            assert not archiving[0].done(), "it waits for what is being issued"
        return found

    monkeypatch.setattr(rfc6749_token, "find_principal", overtaken)
    answer = await world.redeem(client, code)
    await archiving[0]
    assert await seconds_until_refused(world.tokens, answer["access_token"]) < PROMISED_S
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"


async def test_a_new_password_ends_what_the_old_one_gave(world: World) -> None:
    client, _ = await world.client()
    async with world.db.begin() as conn:
        theirs = await world.add_user(conn, "developer", "eve@acme.example")
        cookies = [
            await start_session(
                conn,
                SESSIONS,
                org_id=world.org_id,
                user_id=user_id,
                amr=["pwd"],
                actor=ACTOR,
                now=world.keys.now(),
            )
            for user_id in (world.user_id, theirs)
        ]
        allowed: dict[str, Any] = {
            "org_id": world.org_id,
            "user_id": world.user_id,
            "client_id": client.id,
            "redirect_uri": REDIRECT,
            "resources": [],
            "scopes": ["inference"],
        }
        await remember(conn, now=world.keys.now(), **allowed)
        session = await find_session(conn, SESSIONS, cookies[0], now=world.keys.now())
        assert session is not None and await holds_session(conn, session)
    answer = await world.login(client)
    await world.principal(answer["access_token"])
    await change(world, world.user_id)
    assert await seconds_until_refused(world.tokens, answer["access_token"]) < PROMISED_S
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"
    async with world.db.connect() as conn:
        live = [
            await find_session(conn, SESSIONS, each, now=world.keys.now()) is not None
            for each in cookies
        ]
        assert live == [False, True], "theirs, nobody else's"
        assert not await holds_session(conn, session)
        assert not await is_remembered(conn, **allowed), "an application has to ask again"
    said = {"revoked_because": "password_changed", "grants": 1}
    assert await audited(world, "oauth_grants.revoked") == [(world.user_id, said)]
    world.clock.now += 1
    await world.principal((await world.login(client))["access_token"])
    with pytest.raises(NotFound):
        await change(world, "user_unknown")
