"""The token endpoint where a key or Redis is gone: it refuses, and never answers half."""

from __future__ import annotations

import msgspec
import pytest
from joserfc import jwt

from gateway.app.create import connect_redis
from gateway.auth.bearer.revocations import Denylist
from gateway.auth.oauth import rfc6749_token
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.grants import find_grant
from gateway.auth.oauth.tokens.refresh_tokens import RefreshTokens
from tests.gateway.a_secret import a_secret
from tests.gateway.auth.world import World, error_of


async def ended_because(world: World, grant_id: str) -> str | None:
    async with world.db.connect() as conn:
        grant = await find_grant(conn, org_id=world.org_id, grant_id=grant_id)
    return grant.revoked_because


async def test_an_answer_under_a_secret_that_is_gone_is_not_given_again(world: World) -> None:
    client, _ = await world.client()
    code, grant = await world.code(client)
    answer = await world.redeem(client, code)
    both = RefreshTokens(a_secret("two", "one"))
    world.authority = msgspec.structs.replace(world.authority, refresh_tokens=both)
    await world.refresh(client, answer["refresh_token"])
    back = RefreshTokens(a_secret("one"))
    world.authority = msgspec.structs.replace(world.authority, refresh_tokens=back)
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"
    assert await ended_because(world, grant.id) == rfc6749_token.REFRESH_TOKEN_REUSED


async def test_an_answer_under_a_revoked_key_is_not_given_again(world: World) -> None:
    client, _ = await world.client()
    code, grant = await world.code(client)
    answer = await world.redeem(client, code)
    await world.refresh(client, answer["refresh_token"])
    kid = world.keys.ring.active.kid
    assert kid is not None
    async with world.db.begin() as conn:
        await signing_keys.revoke(conn, world.keys.cipher, kid, world.keys.now())
    await world.keys.reload()
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"
    assert await ended_because(world, grant.id) == rfc6749_token.REFRESH_TOKEN_REUSED


async def test_a_grant_ends_though_redis_hears_nothing_of_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = await world.client()
    code, grant = await world.code(client)
    answer = await world.redeem(client, code)
    claims = await world.claims(answer["access_token"])
    nobody = connect_redis("redis://127.0.0.1:1")
    world.authority = msgspec.structs.replace(world.authority, redis=nobody)
    assert await error_of(world.redeem(client, code)) == "invalid_grant"
    assert await ended_because(world, grant.id) == rfc6749_token.CODE_REPLAYED
    assert "could not be announced" in caplog.text
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"
    polling = Denylist(world.db, nobody, lambda each: None, wall_clock=world.clock)
    await polling.start()
    await polling.current()
    assert polling.denies(claims), "gateways without Redis see it in Postgres"
    await polling.close()
    await nobody.aclose()


async def test_a_client_without_a_secret_gets_nothing_for_itself(world: World) -> None:
    """No registration makes such a client; the endpoint does not rely on it."""
    client, _ = await world.client(method="none", grants=["client_credentials"])
    asking = world.ask(client, grant_type="client_credentials")
    assert await error_of(asking) == "unauthorized_client"


async def test_an_id_token_holds_a_nonce_only_where_one_was_sent(world: World) -> None:
    client, _ = await world.client()
    answer = await world.login(client, scopes=("openid",))
    ring = world.keys.ring
    public = ring.verifying[ring.active.kid or ""]
    told = jwt.decode(answer["id_token"], public, algorithms=["RS256"]).claims
    assert told["sub"] == world.user_id and "nonce" not in told
