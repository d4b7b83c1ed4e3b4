"""A token says what it may and no more: what whose it is confers now, and what its client may have;
and an agent acts only while its own service account is there."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from gateway.auth.errors import RevokedToken
from gateway.auth.oauth.rfc6749_authorize import check_request, read_parameters
from gateway.tenancy.member_tables import service_accounts, users
from tests.gateway.auth.parts import ISSUER
from tests.gateway.auth.sending import basic
from tests.gateway.auth.world import ACCESS_TOKEN, CODES, EXCHANGE, REDIRECT, World, error_of

WIDE = ("openid", "inference", "admin:*")
ALONE = ("client_credentials",)


async def give_role(world: World, role: str) -> None:
    async with world.db.begin() as conn:
        await conn.execute(sa.update(users).values(role=role).where(users.c.id == world.user_id))
    world.tokens.changed(world.user_id)


async def leave_account(world: World, account_id: str, **values: Any) -> None:
    async with world.db.begin() as conn:
        gone = sa.update(service_accounts).where(service_accounts.c.id == account_id)
        await conn.execute(gone.values(**values))
    world.tokens.changed(account_id)


def exchanging(subject: str) -> dict[str, str]:
    return {"grant_type": EXCHANGE, "subject_token": subject, "subject_token_type": ACCESS_TOKEN}


async def test_a_demoted_users_tokens_say_less_at_once(
    world: World, http: httpx.AsyncClient
) -> None:
    await give_role(world, "owner")
    client, secret = await world.client(scopes=WIDE)
    agent, _ = await world.client(grants=[EXCHANGE], scopes=WIDE)
    first = await world.login(client, scopes=WIDE)
    assert first["scope"] == "admin:* inference openid"
    late, _ = await world.code(client, scopes=WIDE)
    await give_role(world, "developer")

    async def said(token: str) -> str:
        sent = await http.post(
            "/oauth/introspect", data={"token": token}, headers=basic(client.id, secret)
        )
        assert sent.json()["active"], sent.text
        return str(sent.json()["scope"])

    less = "inference openid"
    assert await said(first["access_token"]) == await said(first["refresh_token"]) == less
    assert (await world.redeem(client, late))["scope"] == less
    exchanged = await world.tokens_of(agent, **exchanging(first["access_token"]))
    assert exchanged["scope"] == less
    second = await world.refresh(client, first["refresh_token"])
    assert second["scope"] == less
    assert (await world.claims(second["access_token"])).scope == less
    await give_role(world, "owner")
    again = await world.refresh(client, second["refresh_token"])
    assert again["scope"] == first["scope"], "what was allowed once is not lost with a role"


async def test_where_nothing_is_left_nothing_is_spent(world: World) -> None:
    await give_role(world, "owner")
    client, _ = await world.client(scopes=["admin:*"])
    first = await world.login(client, scopes=["admin:*"])
    await give_role(world, "reader")
    assert await error_of(world.refresh(client, first["refresh_token"])) == "invalid_scope"
    await give_role(world, "owner")
    assert (await world.refresh(client, first["refresh_token"]))["scope"] == "admin:*"


async def test_of_all_administration_a_part_can_be_asked_for(world: World) -> None:
    await give_role(world, "owner")
    client, _ = await world.client(scopes=["openid", "admin:*"])
    query = {
        "response_type": "code",
        "client_id": client.id,
        "redirect_uri": REDIRECT,
        "scope": "openid admin:read",
        "code_challenge": "c" * 43,
        "code_challenge_method": "S256",
    }
    asked = check_request(read_parameters(str(httpx.QueryParams(query))), client, ISSUER)
    assert asked.scopes == {"openid", "admin:read"}
    part = await world.login(client, scopes=sorted(asked.scopes))
    assert part["scope"] == "admin:read openid"
    whole = await world.login(client, scopes=["openid", "admin:*"])
    narrowed = await world.refresh(client, whole["refresh_token"], scope="admin:read")
    assert narrowed["scope"] == "admin:read"
    robot, _ = await world.client(grants=ALONE, scopes=["admin:*"])
    own = await world.tokens_of(robot, grant_type=ALONE[0], scope="admin:keys usage:read")
    assert own["scope"] == "admin:keys usage:read"
    agent, _ = await world.client(grants=[EXCHANGE], scopes=["admin:read"])
    exchanged = await world.tokens_of(agent, **exchanging(whole["access_token"]))
    assert exchanged["scope"] == "admin:read"
    narrow, _ = await world.client(grants=[*CODES, *ALONE], scopes=["admin:read"])
    asking = world.tokens_of(narrow, grant_type=ALONE[0], scope="admin:*")
    assert await error_of(asking) == "invalid_scope", "and not the other way"


@pytest.mark.parametrize("end", [{"archived_at": sa.func.now()}, {"project_role": "none"}])
async def test_an_agent_acts_while_its_own_account_is_there(
    world: World, end: dict[str, Any]
) -> None:
    app, _ = await world.client(service_account_id=world.account_id)
    agent, _ = await world.client(grants=[EXCHANGE], service_account_id=world.account_id)
    second, _ = await world.client(grants=[EXCHANGE])
    subject = (await world.login(app))["access_token"]
    acting = (await world.tokens_of(agent, **exchanging(subject)))["access_token"]
    behind = (await world.tokens_of(second, **exchanging(acting)))["access_token"]
    for each in (acting, behind):
        assert (await world.principal(each)).agent_ids == {world.account_id}
    await leave_account(world, world.account_id, **end)
    for each in (acting, behind):
        with pytest.raises(RevokedToken):
            await world.principal(each)
    assert await error_of(world.tokens_of(agent, **exchanging(subject))) == "invalid_grant"
    assert await error_of(world.tokens_of(second, **exchanging(acting))) == "invalid_grant"
    await world.principal(subject)
    await world.tokens_of(second, **exchanging(subject))
