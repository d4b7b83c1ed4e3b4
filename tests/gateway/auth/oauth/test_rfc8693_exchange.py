"""An agent acts for a user: with less, for no longer, and only while it may."""

from __future__ import annotations

from typing import Any

import httpx
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.gateway.auth.bearer.revoking import PROMISED_S, revoke, seconds_until_refused
from tests.gateway.auth.parts import ISSUER
from tests.gateway.auth.sending import basic
from tests.gateway.auth.world import (
    ACCESS_TOKEN,
    EXCHANGE,
    World,
    error_of,
)


async def test_exchange(world: World, http: httpx.AsyncClient) -> None:
    user_app, _ = await world.client()
    agent, secret = await world.client(
        grants=["client_credentials", EXCHANGE], scopes=["inference", "usage:read"]
    )
    mcp, api = f"{ISSUER}/mcp/{world.org_id}", f"{ISSUER}/v1"
    code, grant = await world.code(
        user_app, scopes=("inference", "usage:read", "mcp:call"), resources=[mcp, api]
    )
    subject = (await world.redeem(user_app, code))["access_token"]
    world.clock.now += 100
    form = {"grant_type": EXCHANGE, "subject_token": subject, "subject_token_type": ACCESS_TOKEN}
    answer = (
        await http.post(
            "/oauth/token", data={**form, "audience": api}, headers=basic(agent.id, secret)
        )
    ).json()
    assert answer["issued_token_type"] == ACCESS_TOKEN and "refresh_token" not in answer
    assert answer["expires_in"] == 500, "not after the subject's"
    claims = await world.claims(answer["access_token"])
    before = await world.claims(subject)
    assert claims.sub == before.sub and claims.grant_id == grant.id and claims.aud == api
    assert claims.scopes == {"inference", "usage:read"}, "what the agent may, too"
    assert claims.act is not None and claims.act.sub == agent.id and claims.act.act is None
    assert claims.derived_from == [before.jti]
    second, _ = await world.client(grants=[EXCHANGE], scopes=["inference"])
    chained = await world.tokens_of(second, **{**form, "subject_token": answer["access_token"]})
    deeper = await world.claims(chained["access_token"])
    assert deeper.act is not None and deeper.act.sub == second.id
    assert deeper.act.act is not None and deeper.act.act.sub == agent.id
    await world.principal(chained["access_token"])
    revoked = await http.post(
        "/oauth/revoke",
        data={"token": answer["access_token"]},
        headers=basic(agent.id, secret),
    )
    assert revoked.status_code == 200
    await seconds_until_refused(world.tokens, chained["access_token"])
    asking = world.tokens_of(second, **{**form, "subject_token": chained["access_token"]})
    assert await error_of(asking) == "invalid_grant", "revoked with what it came from"
    assert (await world.claims(subject)).grant_id == grant.id


async def test_an_exchange_only_narrows(world: World) -> None:
    user_app, _ = await world.client()
    scopes = ["inference", "usage:read", "mcp:call"]
    agent, _ = await world.client(grants=["client_credentials", EXCHANGE], scopes=scopes)
    subject = (await world.login(user_app, scopes=("inference",)))["access_token"]
    actor = (await world.tokens_of(agent, grant_type="client_credentials"))["access_token"]
    form = {"grant_type": EXCHANGE, "subject_token": subject, "subject_token_type": ACCESS_TOKEN}
    acting = {"actor_token": actor, "actor_token_type": ACCESS_TOKEN}
    answer = await world.tokens_of(agent, **form, **acting)
    claims = await world.claims(answer["access_token"])
    assert claims.act is not None and claims.act.sub == agent.id
    assert (await world.claims(actor)).jti in claims.derived_from
    refused: list[tuple[dict[str, Any], str]] = [
        ({"scope": "inference usage:read"}, "invalid_scope"),
        ({"resource": f"{ISSUER}/mcp/{world.org_id}"}, "invalid_target"),
        ({"audience": "elsewhere"}, "invalid_target"),
        ({"requested_token_type": "urn:ietf:params:oauth:token-type:saml2"}, "invalid_request"),
        ({"subject_token": "x"}, "invalid_grant"),
        ({"subject_token_type": "urn:x"}, "invalid_request"),
        ({"actor_token_type": ACCESS_TOKEN}, "invalid_request"),
        ({"actor_token": subject, "actor_token_type": ACCESS_TOKEN}, "invalid_grant"),
        ({"actor_token": actor, "actor_token_type": "urn:x"}, "invalid_request"),
    ]
    for changes, error in refused:
        assert await error_of(world.tokens_of(agent, **{**form, **changes})) == error, changes
    chain = subject
    for _ in range(4):
        chain = (await world.tokens_of(agent, **{**form, "subject_token": chain}))["access_token"]
    asking = world.tokens_of(agent, **{**form, "subject_token": chain})
    assert await error_of(asking) == "invalid_grant", "too many actors"
    public, _ = await world.client(method="none", grants=[*("authorization_code",), EXCHANGE])
    assert await error_of(world.tokens_of(public, **form)) == "unauthorized_client"
    bound = await world.client(method="none", dpop_bound_access_tokens=True)
    code, _ = await world.code(bound[0])
    token = (await world.redeem(bound[0], code, jkt="k"))["access_token"]
    asking = world.tokens_of(agent, **{**form, "subject_token": token})
    assert await error_of(asking) == "invalid_grant", "whose key was not shown"


async def test_a_client_that_is_archived_takes_along_what_was_exchanged(world: World) -> None:
    robot, _ = await world.client(grants=["client_credentials"])
    agent, _ = await world.client(grants=[EXCHANGE])
    second, _ = await world.client(grants=[EXCHANGE])
    token = (await world.tokens_of(robot, grant_type="client_credentials"))["access_token"]
    chain, form = [token], {"grant_type": EXCHANGE, "subject_token_type": ACCESS_TOKEN}
    for client in (agent, second):
        answer = await world.tokens_of(client, **form, subject_token=chain[-1])
        chain.append(answer["access_token"])
    for each in chain:
        await world.principal(each)
    await revoke(world, "client", agent.id)
    for each in chain[1:]:
        assert await seconds_until_refused(world.tokens, each) < PROMISED_S
    await world.principal(token)
    await revoke(world, "client", robot.id)
    assert await seconds_until_refused(world.tokens, token) < PROMISED_S


async def test_another_orgs_token_cannot_be_exchanged(
    world: World, redis: Redis, db: AsyncEngine
) -> None:
    agent, _ = await world.client(grants=[EXCHANGE])
    mine = world.org_id
    await world.settle("other")
    assert world.org_id != mine
    stranger, _ = await world.client()
    subject = (await world.login(stranger))["access_token"]
    form = {"grant_type": EXCHANGE, "subject_token": subject, "subject_token_type": ACCESS_TOKEN}
    assert await error_of(world.tokens_of(agent, **form)) == "invalid_grant"
