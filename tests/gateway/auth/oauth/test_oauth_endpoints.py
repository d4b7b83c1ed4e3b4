"""The authorization server over HTTP: revocation, introspection, userinfo, metadata, outages."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from authlib.oauth2.rfc8414 import AuthorizationServerMetadata
from joserfc.jwk import ECKey

from gateway.auth.oauth.rfc6749_errors import DESCRIPTIONS
from gateway.db import create_engine
from tests.gateway.auth.parts import ISSUER, NOW
from tests.gateway.auth.sending import CREDENTIALS, basic, proof
from tests.gateway.auth.world import (
    World,
    error_of,
)


async def test_a_token_is_for_the_resource_that_it_names(
    world: World, http: httpx.AsyncClient
) -> None:
    client, _ = await world.client()
    mcp = f"{ISSUER}/mcp/{world.org_id}"

    async def statuses(*resources: str) -> list[int]:
        answer = await world.login(client, resources=resources)
        headers = {"authorization": f"Bearer {answer['access_token']}"}
        paths = ("/v1/probe", f"/probe/{world.org_id}", f"/probe/org_{'0' * 32}")
        return [(await http.get(path, headers=headers)).status_code for path in paths]

    assert await statuses() == [200, 401, 401]
    assert await statuses(ISSUER) == [200, 401, 401]
    assert await statuses(mcp) == [401, 200, 401]
    assert await statuses(mcp, f"{ISSUER}/v1") == [200, 200, 401]


async def test_a_token_of_one_tenant_opens_nothing_of_another(
    world: World, http: httpx.AsyncClient
) -> None:
    mine, (client, _) = world.org_id, await world.client()
    token = (await world.login(client, resources=[f"{ISSUER}/mcp/{mine}"]))["access_token"]
    code, _ = await world.code(client)
    await world.settle("other")
    theirs = world.org_id
    headers = {"authorization": f"Bearer {token}"}
    assert (await http.get(f"/probe/{mine}", headers=headers)).status_code == 200
    assert (await http.get(f"/probe/{theirs}", headers=headers)).status_code == 401
    asking = world.redeem(client, code, resource=f"{ISSUER}/mcp/{theirs}")
    assert await error_of(asking) == "invalid_target"
    neighbour, _ = await world.client(grants=["client_credentials"], scopes=["inference"])
    sent = {"grant_type": "client_credentials", "resource": f"{ISSUER}/mcp/{mine}"}
    assert await error_of(world.ask(neighbour, **sent)) == "invalid_target"


async def test_tokens_are_taken_apart_before_they_are_believed(http: httpx.AsyncClient) -> None:
    for token in ("x", "a.b.c", "eyJ", "x" * 9000):
        headers = {"authorization": f"Bearer {token}"}
        assert (await http.get("/v1/probe", headers=headers)).status_code == 401


async def test_revocation(world: World, http: httpx.AsyncClient) -> None:
    client, secret = await world.client()
    other, other_secret = await world.client()
    answer = await world.login(client)
    mine, theirs = basic(client.id, secret), basic(other.id, other_secret)

    async def revoke(token: str, headers: dict[str, str]) -> tuple[int, str]:
        sent = await http.post("/oauth/revoke", data={"token": token}, headers=headers)
        return sent.status_code, sent.json()["error"] if sent.content else ""

    for name in ("access_token", "refresh_token"):
        assert await revoke(answer[name], theirs) == (400, "invalid_grant")
    assert await revoke("unknown", mine) == (200, "")
    assert await revoke(answer["access_token"], mine) == (200, "")
    assert await revoke(answer["access_token"], mine) == (200, "")
    answer = await world.refresh(client, answer["refresh_token"])
    assert await revoke(answer["refresh_token"], mine) == (200, "")
    assert await revoke(answer["refresh_token"], mine) == (200, "")
    assert await error_of(world.refresh(client, answer["refresh_token"])) == "invalid_grant"
    sent = await http.post("/oauth/revoke", headers=mine, data={"x": "y"})
    assert sent.json()["error"] == "invalid_request"


async def test_introspection(world: World, http: httpx.AsyncClient) -> None:
    client, secret = await world.client()
    reader, reader_secret = await world.client()
    public, _ = await world.client(method="none")
    answer = await world.login(client)

    async def said(token: str, client_id: str, key: str | None) -> dict[str, Any]:
        sent = await http.post(
            "/oauth/introspect", data={"token": token}, headers=basic(client_id, key)
        )
        assert sent.status_code == 200
        found: dict[str, Any] = sent.json()
        return found

    told = await said(answer["access_token"], reader.id, reader_secret)
    claims = await world.claims(answer["access_token"])
    assert told == {
        "active": True,
        "token_type": "Bearer",
        "scope": "inference",
        "client_id": client.id,
        "sub": world.user_id,
        "aud": f"{ISSUER}/v1",
        "iss": ISSUER,
        "jti": claims.jti,
        "iat": int(NOW),
        "exp": int(NOW) + 600,
    }
    told = await said(answer["refresh_token"], client.id, secret)
    assert told["active"] and told["sub"] == world.user_id and "token_type" not in told
    inactive = {"active": False}
    assert await said(answer["refresh_token"], reader.id, reader_secret) == inactive
    assert await said("unknown", reader.id, reader_secret) == inactive
    await world.refresh(client, answer["refresh_token"])
    assert await said(answer["refresh_token"], client.id, secret) == inactive
    again = await world.login(client)
    headers = basic(client.id, secret)
    await http.post("/oauth/revoke", data={"token": again["refresh_token"]}, headers=headers)
    assert await said(again["refresh_token"], client.id, secret) == inactive
    world.clock.now += 600
    assert await said(answer["access_token"], reader.id, reader_secret) == inactive
    sent = await http.post("/oauth/introspect", data={"token": "x", "client_id": public.id})
    assert (sent.status_code, sent.json()["error"]) == (401, "invalid_client")
    fresh = await world.login(client)
    await world.settle("other")
    stranger, stranger_secret = await world.client()
    assert await said(fresh["access_token"], stranger.id, stranger_secret) == inactive


async def test_userinfo(world: World, http: httpx.AsyncClient) -> None:
    client, _ = await world.client(grants=["authorization_code", "client_credentials"])

    async def said(token: str) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {token}"}
        answers = [
            await http.request(method, "/oauth/userinfo", headers=headers)
            for method in ("GET", "POST")
        ]
        assert answers[0].text == answers[1].text
        return answers[0].status_code, answers[0].json()

    scopes = ("openid", "email", "profile")
    mcp = f"{ISSUER}/mcp/{world.org_id}"
    full = (await world.login(client, scopes=scopes, resources=[mcp]))["access_token"]
    assert await said(full) == (
        200,
        {"sub": world.user_id, "name": "Ann", "email": "ann@acme.example"},
    )
    bare = (await world.login(client, scopes=("openid",)))["access_token"]
    assert await said(bare) == (200, {"sub": world.user_id})
    without = (await world.login(client, scopes=("inference",)))["access_token"]
    assert (await said(without))[0] == 403


async def test_metadata_is_what_the_rfc_wants(http: httpx.AsyncClient) -> None:
    found = (await http.get("/.well-known/oauth-authorization-server")).json()
    assert found == (await http.get("/.well-known/openid-configuration")).json()
    AuthorizationServerMetadata(found).validate()
    assert found["issuer"] == ISSUER
    assert found["code_challenge_methods_supported"] == ["S256"]
    assert "implicit" not in found["grant_types_supported"]
    assert found["authorization_response_iss_parameter_supported"] is True
    keys = await http.get(found["jwks_uri"])
    assert keys.headers["cache-control"] == "public, max-age=300"
    for key in keys.json()["keys"]:
        assert set(key) == {"kty", "n", "e", "kid", "use", "alg"}


async def test_an_outage_is_said_to_be_one(
    world: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, secret = await world.client(grants=["client_credentials"], scopes=["inference"])
    headers = basic(client.id, secret)
    key = ECKey.generate_key("P-256")

    async def lost(*args: Any, **more: Any) -> Any:
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(world.authority.redis, "set", lost)
        sent = {**headers, "dpop": proof(key)}
        answer = await http.post("/oauth/token", data=CREDENTIALS, headers=sent)
        assert (answer.status_code, answer.json()["error"]) == (503, "temporarily_unavailable")
    good = (await http.post("/oauth/token", data=CREDENTIALS, headers=headers)).json()
    with monkeypatch.context() as patch:
        patch.setattr(world.authority.redis, "eval", lost)
        sent_token = {"token": good["access_token"]}
        answer = await http.post("/oauth/revoke", data=sent_token, headers=headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    with monkeypatch.context() as patch:
        patch.setattr(world.clients, "find", lost)
        answer = await http.post("/oauth/token", data=CREDENTIALS, headers=headers)
        assert answer.status_code == 503
    nowhere = create_engine("postgresql+asyncpg://nobody@/none?host=/nonexistent")
    cut_off = msgspec.structs.replace(world.authority, db=nowhere)
    monkeypatch.setattr(
        http._transport.app.state.services,
        "authority",
        cut_off,  # type: ignore[attr-defined]
    )
    for path, form in (("token", CREDENTIALS), ("revoke", sent_token)):
        answer = await http.post(f"/oauth/{path}", data=form, headers=headers)
        assert answer.status_code == 503
    refresh = {"token": "tg-refresh-x"}
    answer = await http.post("/oauth/introspect", data=refresh, headers=headers)
    assert answer.status_code == 503
    await nowhere.dispose()


EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
BEARER_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
FORMS: dict[str, list[dict[str, str]]] = {
    "token": [
        {
            "grant_type": "authorization_code",
            "code": "x",
            "redirect_uri": "x",
            "code_verifier": "x",
        },
        {"grant_type": "refresh_token", "refresh_token": "x", "scope": "x"},
        {**CREDENTIALS, "scope": "inference"},
        {**CREDENTIALS, "resource": f"{ISSUER}/v1"},
        {
            "grant_type": EXCHANGE,
            "subject_token": "x",
            "subject_token_type": ACCESS_TOKEN,
            "requested_token_type": ACCESS_TOKEN,
            "audience": ISSUER,
        },
        {**CREDENTIALS, "client_assertion_type": BEARER_ASSERTION, "client_assertion": "x"},
        {**CREDENTIALS, "client_id": "x", "client_secret": "x"},
    ],
    "revoke": [{"token": "x", "token_type_hint": "x"}],
    "introspect": [{"token": "x", "token_type_hint": "x"}],
}
ECHO = "zebraquux"


async def test_every_error_has_a_constant_text(world: World, http: httpx.AsyncClient) -> None:
    """Any text in any parameter or header is answered with a code of these RFCs, and its text."""
    grants = ["authorization_code", "refresh_token", "client_credentials", EXCHANGE]
    client, secret = await world.client(grants=grants, scopes=["inference"])
    good = basic(client.id, secret)
    seen = set()
    for path, forms in FORMS.items():
        for form in forms:
            spoilt = [{**form, name: value} for name in form for value in (ECHO, f"{ECHO}\n\x01")]
            spoilt += [{**form, ECHO: ECHO}, {k: v for k, v in form.items() if v != "x"}]
            headers = {} if "client_secret" in form else good
            sent = [(each, headers) for each in spoilt]
            sent.append((form, {"authorization": f"Basic {ECHO}"}))
            sent.append((form, {**headers, "dpop": ECHO}))
            for data, given in sent:
                answer = await http.post(f"/oauth/{path}", data=data, headers=given)
                assert answer.status_code < 500 and ECHO not in answer.text, (data, answer.text)
                if answer.status_code >= 400:
                    said = answer.json()
                    assert said == {
                        "error": said["error"],
                        "error_description": DESCRIPTIONS[said["error"]],
                    }
                    seen.add(said["error"])
    assert seen >= {
        *("invalid_request", "invalid_client", "invalid_grant", "invalid_scope"),
        *("invalid_target", "invalid_dpop_proof", "unsupported_grant_type"),
    }
    assert all(text == text.strip() and text.endswith(".") for text in DESCRIPTIONS.values())
    assert json.dumps(dict(DESCRIPTIONS)).isascii()
