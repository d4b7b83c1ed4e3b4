"""The token endpoint's grants: what is issued, to whom, and what ends a grant."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
import sqlalchemy as sa
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.errors import InvalidToken, RevokedToken
from gateway.auth.oauth import rfc6749_token
from gateway.auth.oauth.rfc6749_errors import OAuthError
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.oidc import at_hash
from gateway.auth.oauth.tokens.refresh_tokens import GRANT_LIFETIME_S, LIFETIME_S, LOST_ANSWER_S
from gateway.auth.oauth.tokens.signing_keys import JWKS_MAX_AGE_S
from gateway.tenancy.member_tables import users
from tests.gateway.auth.parts import ISSUER, NOW
from tests.gateway.auth.world import REDIRECT, VERIFIER, World, error_of
from tests.pace import within

JKT = "0ZcOCORZNYy-DWpqq30jZyJGHTN0d2HglBV3uiguA4I"


async def is_revoked(world: World, grant_id: str) -> str | None:
    async with world.db.connect() as conn:
        found = sa.text("SELECT revoked_because FROM oauth_grants WHERE id = :id")
        return await conn.scalar(found, {"id": grant_id})


async def refused_soon(world: World, token: str) -> None:
    """Once the denylist has heard."""
    async with within(1.0):
        while True:
            try:
                await world.principal(token)
            except RevokedToken:
                return
            await asyncio.sleep(0.005)


async def test_a_code_becomes_tokens(world: World) -> None:
    client, _ = await world.client()
    code, grant = await world.code(client, scopes=("inference", "openid"), nonce="n-1")
    answer = await world.redeem(client, code)
    assert answer["token_type"] == "Bearer" and answer["expires_in"] == 600
    assert answer["scope"] == "inference openid"
    claims = await world.claims(answer["access_token"])
    assert claims.sub == claims.user_id == world.user_id and claims.grant_id == grant.id
    assert claims.aud == f"{ISSUER}/v1" and claims.client_id == client.id
    assert (claims.org_id, claims.project_id) == (world.org_id, world.project_id)
    principal = await world.principal(answer["access_token"])
    assert principal.role == "developer" and principal.key_id == client.id
    ring = world.keys.ring
    public = ring.verifying[ring.active.kid or ""]
    told = jwt.decode(answer["id_token"], public, algorithms=["RS256"])
    assert told.header["typ"] == "JWT"
    assert told.claims == {
        "iss": ISSUER,
        "sub": world.user_id,
        "aud": client.id,
        "exp": int(NOW) + 600,
        "iat": int(NOW),
        "auth_time": int(NOW),
        "at_hash": at_hash(answer["access_token"]),
        "nonce": "n-1",
        "amr": ["pwd"],
    }
    with pytest.raises(InvalidToken):
        await world.claims(answer["id_token"])


async def test_the_vector_of_pkce() -> None:
    """RFC 7636, appendix B."""
    challenge = create_s256_code_challenge("dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk")
    assert challenge == "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"


async def test_the_vector_of_at_hash() -> None:
    """OpenID Connect Core, appendix A.3, of the access token there."""
    token = "jHkWEdUXMU1BwAsC4vtUsZwnNvTIxEl0z9K3vx5KF0Y"
    assert at_hash(token) == "77QmUPtjPfzWtF2AnpK9RQ"


async def test_who_has_no_refresh_grant_gets_no_refresh_token(world: World) -> None:
    client, _ = await world.client(grants=["authorization_code"])
    answer = await world.login(client)
    assert "refresh_token" not in answer and "id_token" not in answer
    asking = world.refresh(client, "tg-refresh-x")
    assert await error_of(asking) == "unauthorized_client"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"code_verifier": "w" * 43}, "invalid_grant"),
        ({"code_verifier": "v" * 42}, "invalid_grant"),
        ({"code_verifier": "v" * 129}, "invalid_grant"),
        ({"code_verifier": "é" * 43}, "invalid_grant"),
        ({"code_verifier": create_s256_code_challenge(VERIFIER)}, "invalid_grant"),
        ({"redirect_uri": REDIRECT + "/"}, "invalid_grant"),
        ({"redirect_uri": "https://app.example.com/cаllback"}, "invalid_grant"),
        ({"resource": "https://elsewhere.example"}, "invalid_target"),
        ({"resource": f"{ISSUER}/mcp/org_{'0' * 32}"}, "invalid_target"),
    ],
)
async def test_what_does_not_fit_is_refused_and_spends_nothing(
    world: World, changes: dict[str, str], error: str
) -> None:
    client, _ = await world.client()
    code, grant = await world.code(client)
    assert await error_of(world.redeem(client, code, **changes)) == error
    assert await is_revoked(world, grant.id) is None
    assert "access_token" in await world.redeem(client, code)


async def test_a_redirect_uri_may_be_left_out(world: World) -> None:
    """OAuth 2.1 has none in the token request; one that is sent must be the code's."""
    client, _ = await world.client()
    code, _ = await world.code(client)
    sent = {"grant_type": "authorization_code", "code": code, "code_verifier": VERIFIER}
    assert "access_token" in await world.tokens_of(client, **sent)


@pytest.mark.parametrize("missing", ["code", "code_verifier"])
async def test_every_parameter_of_a_code_is_needed(world: World, missing: str) -> None:
    client, _ = await world.client()
    code, _ = await world.code(client)
    sent = {"code": code, "code_verifier": VERIFIER, "redirect_uri": REDIRECT}
    del sent[missing]
    asking = world.ask(client, grant_type="authorization_code", **sent)
    assert await error_of(asking) == "invalid_request"


async def test_a_code_is_good_for_a_minute_and_for_its_client(world: World) -> None:
    client, _ = await world.client()
    other, _ = await world.client()
    code, grant = await world.code(client)
    assert await error_of(world.redeem(client, "unknown")) == "invalid_grant"
    assert await error_of(world.redeem(other, code)) == "invalid_grant"
    world.clock.now += 60
    assert await error_of(world.redeem(client, code)) == "invalid_grant"
    assert await is_revoked(world, grant.id) is None


async def test_of_twenty_redemptions_one_wins_and_the_grant_ends(world: World) -> None:
    client, _ = await world.client()
    code, grant = await world.code(client)
    answers = await asyncio.gather(
        *(world.redeem(client, code) for _ in range(20)), return_exceptions=True
    )
    won = [each for each in answers if isinstance(each, dict)]
    lost = [each for each in answers if isinstance(each, OAuthError)]
    assert (len(won), len(lost)) == (1, 19)
    assert {each.error for each in lost} == {"invalid_grant"}
    assert await is_revoked(world, grant.id) == rfc6749_token.CODE_REPLAYED
    await refused_soon(world, won[0]["access_token"])
    refreshing = world.refresh(client, won[0]["refresh_token"])
    assert await error_of(refreshing) == "invalid_grant"


@pytest.mark.parametrize("kind", ["code", "refresh token"])
async def test_the_end_is_committed_before_the_error_is_raised(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    client, _ = await world.client()
    code, grant = await world.code(client)
    answer = await world.redeem(client, code)
    await world.refresh(client, answer["refresh_token"])
    world.clock.now += LOST_ANSWER_S + 1
    happened: list[str] = []

    class Observed(OAuthError):
        def __init__(self, *args: Any, **more: Any) -> None:
            happened.append("error")
            super().__init__(*args, **more)

    monkeypatch.setattr(rfc6749_token, "OAuthError", Observed)
    engine = world.db.sync_engine
    sa.event.listen(engine, "commit", lambda conn: happened.append("commit"))
    sa.event.listen(
        engine,
        "before_cursor_execute",
        lambda *args: happened.append("revoked") if "INTO revocations" in args[2] else None,
    )
    again = (
        world.redeem(client, code)
        if kind == "code"
        else world.refresh(client, answer["refresh_token"])
    )
    with pytest.raises(OAuthError):
        await again
    assert happened == ["revoked", "commit", "error"]
    assert await is_revoked(world, grant.id) is not None


async def test_resources_of_a_code_are_never_widened(world: World) -> None:
    client, _ = await world.client()
    mcp, api = f"{ISSUER}/mcp/{world.org_id}", f"{ISSUER}/v1"
    code, _ = await world.code(client, resources=[mcp, api])
    answer = await world.redeem(client, code, resource=mcp)
    assert (await world.claims(answer["access_token"])).aud == mcp
    answer = await world.refresh(client, answer["refresh_token"])
    assert (await world.claims(answer["access_token"])).audiences == {mcp, api}
    narrow, _ = await world.code(client, resources=[mcp])
    answer = await world.redeem(client, narrow)
    asking = world.refresh(client, answer["refresh_token"], resource=api)
    assert await error_of(asking) == "invalid_target"
    strangers, _ = await world.code(client, resources=[f"{ISSUER}/mcp/org_{'0' * 32}"])
    assert await error_of(world.redeem(client, strangers)) == "invalid_target"


async def test_a_refresh_rotates(world: World) -> None:
    client, _ = await world.client()
    answer = await world.login(client, scopes=("inference", "usage:read"))
    seen = {answer["refresh_token"]}
    for _ in range(4):
        answer = await world.refresh(client, answer["refresh_token"])
        assert answer["refresh_token"] not in seen
        seen.add(answer["refresh_token"])
        assert answer["scope"] == "inference usage:read"
        await world.claims(answer["access_token"])


async def test_a_refresh_narrows_for_once(world: World) -> None:
    client, _ = await world.client()
    answer = await world.login(client, scopes=("inference", "usage:read"))
    answer = await world.refresh(client, answer["refresh_token"], scope="inference")
    assert answer["scope"] == "inference"
    answer = await world.refresh(client, answer["refresh_token"])
    assert answer["scope"] == "inference usage:read"
    for scope in ("inference mcp:call", "inference  usage:read", "nonsense"):
        asking = world.refresh(client, answer["refresh_token"], scope=scope)
        assert await error_of(asking) == "invalid_scope"


async def test_a_lost_answer_is_given_again_byte_for_byte(world: World) -> None:
    client, _ = await world.client()
    answer = await world.login(client)
    sent = {"grant_type": "refresh_token", "refresh_token": answer["refresh_token"]}
    first = await world.ask(client, **sent)
    world.clock.now += JWKS_MAX_AGE_S  # a rotation in between changes nothing
    world.clock.now -= JWKS_MAX_AGE_S - LOST_ANSWER_S
    assert await world.ask(client, **sent) == first
    world.clock.now += 1
    assert await error_of(world.ask(client, **sent)) == "invalid_grant"


async def test_a_lost_answer_survives_a_rotation_of_the_signing_key(world: World) -> None:
    client, _ = await world.client()
    world.clock.now += JWKS_MAX_AGE_S
    answer = await world.login(client)
    sent = {"grant_type": "refresh_token", "refresh_token": answer["refresh_token"]}
    first = await world.ask(client, **sent)
    async with world.db.begin() as conn:
        assert await signing_keys.rotate(conn, world.keys.cipher, world.keys.now())
    await world.keys.reload()
    assert await world.ask(client, **sent) == first


async def test_of_twenty_refreshes_all_get_the_same(world: World) -> None:
    client, _ = await world.client()
    answer = await world.login(client)
    sent = {"grant_type": "refresh_token", "refresh_token": answer["refresh_token"]}
    answers = await asyncio.gather(*(world.ask(client, **sent) for _ in range(20)))
    assert len(set(answers)) == 1
    async with world.db.connect() as conn:
        count = sa.text("SELECT count(*) FROM oauth_refresh_tokens")
        assert await conn.scalar(count) == 2


@pytest.mark.parametrize("when", ["late", "successor used"])
async def test_a_refresh_token_that_comes_back_ends_the_grant(world: World, when: str) -> None:
    client, _ = await world.client()
    code, grant = await world.code(client)
    old = await world.redeem(client, code)
    new = await world.refresh(client, old["refresh_token"])
    if when == "late":
        world.clock.now += LOST_ANSWER_S + 1
    else:
        new = await world.refresh(client, new["refresh_token"])
    assert await error_of(world.refresh(client, old["refresh_token"])) == "invalid_grant"
    assert await is_revoked(world, grant.id) == rfc6749_token.REFRESH_TOKEN_REUSED
    assert await error_of(world.refresh(client, new["refresh_token"])) == "invalid_grant"
    await refused_soon(world, new["access_token"])
    await refused_soon(world, old["access_token"])


async def test_twenty_reuses_end_the_grant_once(world: World) -> None:
    client, _ = await world.client()
    answer = await world.login(client)
    await world.refresh(client, answer["refresh_token"])
    world.clock.now += LOST_ANSWER_S + 1
    work = (error_of(world.refresh(client, answer["refresh_token"])) for _ in range(20))
    assert set(await asyncio.gather(*work)) == {"invalid_grant"}
    async with world.db.connect() as conn:
        assert await conn.scalar(sa.text("SELECT count(*) FROM revocations")) == 1


async def test_a_refresh_token_is_its_clients_alone(world: World) -> None:
    client, _ = await world.client()
    other, _ = await world.client()
    code, grant = await world.code(client)
    answer = await world.redeem(client, code)
    for token in (answer["refresh_token"], "tg-refresh-unknown", "x", "tg-refresh-" + "a" * 500):
        assert await error_of(world.refresh(other, token)) == "invalid_grant"
    assert await is_revoked(world, grant.id) is None
    await world.refresh(client, answer["refresh_token"])


async def test_refresh_tokens_expire_unused_and_with_their_grant(world: World) -> None:
    client, _ = await world.client()
    answer = await world.login(client)
    world.clock.now += LIFETIME_S
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"
    async with world.db.begin() as conn:
        moment = sa.text("UPDATE oauth_grants SET created_at = to_timestamp(:now)")
        answer = await world.login(client)
        await conn.execute(moment, {"now": world.clock()})
    ends = world.clock() + GRANT_LIFETIME_S
    while world.clock() < ends - LIFETIME_S / 2:
        world.clock.now += LIFETIME_S / 2
        answer = await world.refresh(client, answer["refresh_token"])
    world.clock.now = ends
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"


async def test_expired_refresh_tokens_are_swept_away(world: World) -> None:
    client, _ = await world.client()
    answer = await world.login(client)
    for _ in range(5):
        world.clock.now += LIFETIME_S * 0.6
        answer = await world.refresh(client, answer["refresh_token"])
    async with world.db.connect() as conn:
        left = await conn.scalar(sa.text("SELECT count(*) FROM oauth_refresh_tokens"))
    assert left == 2


async def test_a_user_who_is_gone_gets_nothing(world: World) -> None:
    client, _ = await world.client()
    answer = await world.login(client)
    code, _ = await world.code(client)
    async with world.db.begin() as conn:
        await conn.execute(sa.update(users).values(archived_at=sa.func.now()))
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"
    assert await error_of(world.redeem(client, code)) == "invalid_grant"
    with pytest.raises(RevokedToken):
        await world.claims(answer["access_token"])


async def test_scopes_that_a_client_lost_are_lost(world: World) -> None:
    client, _ = await world.client(scopes=["inference", "usage:read"])
    answer = await world.login(client, scopes=("inference", "usage:read"))
    async with world.db.begin() as conn:
        await conn.execute(sa.text("UPDATE oauth_clients SET scopes = '{usage:read}'"))
    client = await world.clients.find(client.id) or client
    answer = await world.refresh(client, answer["refresh_token"])
    assert answer["scope"] == "usage:read"


async def test_tokens_bound_to_a_key(world: World) -> None:
    client, _ = await world.client(method="none", dpop_bound_access_tokens=True)
    code, _ = await world.code(client, dpop_jkt=JKT)
    assert await error_of(world.redeem(client, code)) == "invalid_dpop_proof"
    assert await error_of(world.redeem(client, code, jkt="another")) == "invalid_grant"
    answer = await world.redeem(client, code, jkt=JKT)
    assert answer["token_type"] == "DPoP"
    token = answer["access_token"]
    assert (await world.principal(token, jkt=JKT)).client_id == client.id
    for jkt in (None, "another"):
        with pytest.raises(InvalidToken):
            await world.principal(token, jkt=jkt)
    refresh_token = answer["refresh_token"]
    assert await error_of(world.refresh(client, refresh_token)) == "invalid_dpop_proof"
    assert await error_of(world.refresh(client, refresh_token, jkt="other")) == "invalid_grant"
    assert (await world.refresh(client, refresh_token, jkt=JKT))["token_type"] == "DPoP"
    plain, _ = await world.client()
    with pytest.raises(InvalidToken):
        await world.principal((await world.login(plain))["access_token"], jkt=JKT)


async def test_client_credentials(world: World) -> None:
    client, _ = await world.client(
        grants=["client_credentials"],
        scopes=["inference", "usage:read", "openid"],
        service_account_id=world.account_id,
    )
    sent = {"grant_type": "client_credentials"}
    answer = await world.tokens_of(client, **sent)
    assert answer["scope"] == "inference usage:read" and "refresh_token" not in answer
    principal = await world.principal(answer["access_token"])
    assert principal.role == "developer" and principal.service_account_id == world.account_id
    assert principal.grant_id is None and principal.user_id is None
    own = f"{ISSUER}/mcp/{world.org_id}"
    answer = await world.tokens_of(client, **sent, scope="inference", resource=own)
    assert (await world.claims(answer["access_token"])).aud == own
    assert answer["scope"] == "inference"
    asked: list[dict[str, Any]] = [
        {"scope": "openid"},
        {"scope": "mcp:call"},
        {"resource": f"{ISSUER}/mcp/org_{'0' * 32}"},
        {"resource": [own] * 9},
    ]
    errors = [await error_of(world.ask(client, **sent, **each)) for each in asked]
    assert errors == ["invalid_scope", "invalid_scope", "invalid_target", "invalid_target"]


async def test_client_credentials_need_somebody_to_bill(world: World) -> None:
    grants = ["client_credentials"]
    client, _ = await world.client(grants=grants, project_id=None)
    sent = {"grant_type": "client_credentials"}
    assert await error_of(world.ask(client, **sent)) == "unauthorized_client"
    client, _ = await world.client(
        grants=grants, project_id=None, service_account_id=world.account_id
    )
    claims = await world.claims((await world.tokens_of(client, **sent))["access_token"])
    assert claims.project_id == world.project_id and claims.sub == world.account_id
    client, _ = await world.client(grants=grants)
    async with world.db.begin() as conn:
        await conn.execute(sa.text("UPDATE oauth_clients SET archived_at = now()"))
    assert await error_of(world.ask(client, **sent)) == "invalid_grant"


@pytest.mark.parametrize(
    ("grant_type", "error"),
    [
        (None, "invalid_request"),
        ("password", "unsupported_grant_type"),
        ("implicit", "unsupported_grant_type"),
        ("client_credentials", "unauthorized_client"),
    ],
)
async def test_grant_types_that_are_not_offered(
    world: World, grant_type: str | None, error: str
) -> None:
    client, _ = await world.client()
    sent = {} if grant_type is None else {"grant_type": grant_type}
    assert await error_of(world.ask(client, **sent)) == error


async def test_no_token_stands_in_postgres(world: World, db: AsyncEngine) -> None:
    client, secret = await world.client()
    code, _ = await world.code(client)
    answer = await world.redeem(client, code)
    second = await world.refresh(client, answer["refresh_token"])
    assert secret is not None
    issued = [
        secret,
        code,
        *(each[name] for each in (answer, second) for name in ("access_token", "refresh_token")),
    ]
    issued += [hashlib.sha256(each.encode()).hexdigest() for each in issued]
    async with db.connect() as conn:
        tables = await conn.scalars(
            sa.text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        )
        for table in list(tables):
            for row in await conn.scalars(sa.text(f"SELECT t::text FROM {table} t")):
                assert not any(each in row for each in issued), table
