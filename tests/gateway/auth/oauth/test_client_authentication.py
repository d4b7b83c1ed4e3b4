"""Client authentication believes some credentials, refuses others, and bounds how often one may
guess."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import httpx
import msgspec
import pytest
from joserfc import jws, jwt
from joserfc.jwk import ECKey, OctKey, RSAKey
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.auth.login.throttle import FAILED, Throttle
from gateway.auth.oauth import client_authentication
from gateway.auth.oauth.client_authentication import ClientAuthentication
from gateway.auth.oauth.clients.store import rotate_secret
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import DESCRIPTIONS, OAuthError
from gateway.auth.oauth.rfc7523_assertion import TYPE
from tests.gateway.auth.parts import ISSUER, NOW
from tests.gateway.auth.sending import CREDENTIALS, assertion, basic, code_form
from tests.gateway.auth.world import ACTOR, World, error_of

HERE = "192.0.2.1"
NESTED = base64.urlsafe_b64encode(b'{"x":' + b"[" * 5000).decode().rstrip("=")


async def test_each_way_to_authenticate(world: World, http: httpx.AsyncClient) -> None:
    key = ECKey.generate_key("P-256", {"kid": "k1"})
    jwks = {"keys": [key.as_dict(private=False)]}
    for method in ("client_secret_basic", "client_secret_post", "private_key_jwt", "none"):
        more = {"jwks": jwks} if method == "private_key_jwt" else {}
        client, secret = await world.client(method=method, **more)
        form, headers = await code_form(world, client), {}
        if method == "client_secret_basic":
            headers = basic(client.id, secret)
        elif method == "client_secret_post":
            form |= {"client_id": client.id, "client_secret": secret or ""}
        elif method == "private_key_jwt":
            form |= assertion(key, client.id)
        else:
            form |= {"client_id": client.id}
        answer = await http.post("/oauth/token", data=form, headers=headers)
        assert answer.status_code == 200, (method, answer.text)
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["access_token"].count(".") == 2


async def test_a_client_that_fails_gets_401_and_a_constant_text(
    world: World, http: httpx.AsyncClient
) -> None:
    client, secret = await world.client(grants=["client_credentials"], scopes=["inference"])
    public, _ = await world.client(method="none")
    bad: list[tuple[dict[str, str], dict[str, str]]] = [
        ({}, {}),
        ({}, basic(client.id, "wrong")),
        ({}, basic("client_unknown", secret)),
        ({}, basic("https://example.com/client", secret)),
        ({}, basic(public.id, "x")),
        ({"client_id": client.id}, {}),
        ({"client_id": client.id, "client_secret": secret or ""}, {}),
        ({}, {"authorization": "Bearer x"}),
        ({}, {"authorization": "Basic !!!"}),
        ({}, {"authorization": "Basic " + base64.b64encode(b"nocolon").decode()}),
        ({}, {"authorization": "Basic " + base64.b64encode(b"\xff:\xff").decode()}),
        ({}, {"authorization": "Basic " + "a" * 10_000}),
        ({"client_assertion_type": "saml", "client_assertion": "x"}, {}),
        ({"client_assertion_type": TYPE, "client_assertion": "x.y.z"}, {}),
        ({"client_assertion_type": TYPE, "client_assertion": "a" * 9000}, {}),
        ({"client_assertion_type": TYPE, "client_assertion": f"e30.{NESTED}.AA"}, {}),
    ]
    for form, headers in bad:
        answer = await http.post("/oauth/token", data={**CREDENTIALS, **form}, headers=headers)
        assert answer.status_code == 401, (form, headers)
        assert answer.json() == {
            "error": "invalid_client",
            "error_description": DESCRIPTIONS["invalid_client"],
        }
        assert answer.headers["www-authenticate"].startswith("Basic ")
    good = await http.post("/oauth/token", data=CREDENTIALS, headers=basic(client.id, secret))
    assert good.status_code == 200


async def test_more_than_one_way_is_malformed(world: World, http: httpx.AsyncClient) -> None:
    client, secret = await world.client(grants=["client_credentials"])
    header = basic(client.id, secret)
    both = {**CREDENTIALS, "client_id": client.id, "client_secret": secret or ""}
    other = {**CREDENTIALS, "client_id": "client_other"}
    twice = [("authorization", header["authorization"])] * 2
    answers = [
        await http.post("/oauth/token", data=both, headers=header),
        await http.post("/oauth/token", data=other, headers=header),
        await http.post("/oauth/token", data=CREDENTIALS, headers=twice),
    ]
    assert [each.json()["error"] for each in answers] == ["invalid_request"] * 3


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"grant_type=a&grant_type=b", None),
        (b"grant_type=a&client_id=x&client_id=x", None),
        (b"grant_type", None),
        (b"grant_type=%ff", None),
        (b"grant_type=%00", None),
        ("grant_type=é".encode(), None),
        (b"&".join(b"a%d=1" % n for n in range(65)), None),
        (b'{"grant_type": "client_credentials"}', "application/json"),
        (b"grant_type=client_credentials", "text/plain"),
        (b"grant_type=client_credentials", ""),
    ],
)
async def test_malformed_bodies_are_refused(
    http: httpx.AsyncClient, body: bytes, content_type: str | None
) -> None:
    form = "application/x-www-form-urlencoded" if content_type is None else content_type
    for path in ("/oauth/token", "/oauth/revoke", "/oauth/introspect"):
        answer = await http.post(path, content=body, headers={"content-type": form})
        assert answer.status_code == 400
        assert answer.json() == {
            "error": "invalid_request",
            "error_description": DESCRIPTIONS["invalid_request"],
        }


async def test_a_parameter_without_a_value_counts_as_not_sent(
    world: World, http: httpx.AsyncClient
) -> None:
    client, secret = await world.client(grants=["client_credentials"], scopes=["inference"])
    body = urlencode({**CREDENTIALS, "scope": "", "client_secret": ""})
    headers = {**basic(client.id, secret), "content-type": "application/x-www-form-urlencoded"}
    answer = await http.post("/oauth/token", content=body, headers=headers)
    assert answer.status_code == 200


async def test_guesses_are_bounded_and_lock_nobody_else_out(
    world: World, http: httpx.AsyncClient
) -> None:
    client, secret = await world.client(grants=["client_credentials"], scopes=["inference"])
    other, other_secret = await world.client(grants=["client_credentials"], scopes=["inference"])
    post, right = http.post, basic(client.id, secret)
    assert (await post("/oauth/token", data=CREDENTIALS, headers=right)).status_code == 200
    for _ in range(client_authentication.MAX_FAILURES):
        answer = await post("/oauth/token", data=CREDENTIALS, headers=basic(client.id, "guess"))
        assert answer.status_code == 401
    for _ in range(2):
        answer = await post("/oauth/token", data=CREDENTIALS, headers=right)
        assert answer.status_code == 200, "a neighbour's guesses lock its owner out"
        answer = await post("/oauth/token", data=CREDENTIALS, headers=basic(client.id, "guess"))
        assert answer.status_code == 429, "nor does its owner free who guesses"
        assert answer.json() == {
            "error": "temporarily_unavailable",
            "error_description": DESCRIPTIONS["temporarily_unavailable"],
        }
        assert int(answer.headers["retry-after"]) == client_authentication.FAILURE_WINDOW_S
        assert "www-authenticate" not in answer.headers
    answer = await post("/oauth/token", data=CREDENTIALS, headers=basic(other.id, other_secret))
    assert answer.status_code == 200
    elsewhere = await world.authority.clients.authenticate(
        Form({}, {}), right["authorization"], "192.0.2.7"
    )
    assert elsewhere.id == client.id
    world.clock.now += client_authentication.FAILURE_WINDOW_S
    await world.redis.flushdb()  # whose time no test moves
    answer = await post("/oauth/token", data=CREDENTIALS, headers=basic(client.id, "guess"))
    assert answer.status_code == 401


@pytest.mark.parametrize("method", ["none", "private_key_jwt"])
async def test_a_client_without_a_secret_has_nothing_to_guess_at(
    world: World, http: httpx.AsyncClient, method: str
) -> None:
    """Else whoever knows its name could lock out who shares their address."""
    key = ECKey.generate_key("P-256", {"kid": "k1"})
    jwks = {"jwks": {"keys": [key.as_dict(private=False)]}} if method != "none" else {}
    client, _ = await world.client(method=method, **jwks)
    stranger = ECKey.generate_key("P-256", {"kid": "k1"})
    named = {"client_id": client.id}
    wrong = [{**named, "client_secret": "guess"}, assertion(stranger, client.id), {}]
    for _ in range(client_authentication.MAX_FAILURES + 1):
        for each in wrong:
            answer = await http.post("/oauth/token", data={**CREDENTIALS, **each})
            assert answer.status_code == 401
    form = await code_form(world, client)
    form |= named if method == "none" else assertion(key, client.id)
    assert (await http.post("/oauth/token", data=form)).status_code == 200


async def test_a_secret_that_was_right_and_is_no_longer_is_a_guess(world: World) -> None:
    client, secret = await world.client(grants=["client_credentials"])
    right = basic(client.id, secret)["authorization"]
    process = another_process(world, world.redis)
    await process.authenticate(Form({}, {}), right, HERE)
    for _ in range(FAILED.free):
        assert (await guess(process, client.id, "guess", HERE)).status == 401
    fresh = another_process(world, world.redis)
    assert (await fresh.authenticate(Form({}, {}), right, HERE)).id == client.id, "told by another"
    async with world.db.begin() as conn:
        await rotate_secret(
            conn,
            world.peppers,
            org_id=world.org_id,
            client_id=client.id,
            grace_s=0,
            actor=ACTOR,
            now=datetime.now(UTC),
        )
    for status in (401, 429):
        assert (await guess(fresh, client.id, secret or "", HERE)).status == status


def another_process(world: World, redis: Redis) -> ClientAuthentication:
    return ClientAuthentication(
        world.clients, db=world.db, throttle=Throttle(redis), audiences=frozenset({ISSUER})
    )


async def guess(process: ClientAuthentication, client_id: str, secret: str, at: str) -> OAuthError:
    header = basic(client_id, secret)["authorization"]
    with pytest.raises(OAuthError) as refused:
        await process.authenticate(Form({}, {}), header, at)
    return refused.value


async def test_guesses_are_counted_over_all_processes(world: World) -> None:
    client, secret = await world.client(grants=["client_credentials"])
    other, other_secret = await world.client(grants=["client_credentials"])
    processes = [another_process(world, world.redis) for _ in range(FAILED.free)]
    right = basic(client.id, secret)["authorization"]
    for process in processes[1:]:
        refused = await guess(process, client.id, "guess", HERE)
        assert refused.status == 401
    assert (await processes[0].authenticate(Form({}, {}), right, HERE)).id == client.id
    for process in processes:
        refused = await guess(process, client.id, "guess", HERE)
        assert refused.status == 401, "who got in started anew"
    for process in (processes[0], another_process(world, world.redis)):
        refused = await guess(process, client.id, "guess", HERE)
        assert refused.status == 429 and 0 < (refused.retry_after_s or 0) <= FAILED.first_s
    keys = await world.redis.dbsize()
    assert (await guess(processes[0], "client_nobody", "guess", HERE)).status == 401
    assert await world.redis.dbsize() == keys, "whoever makes names up fills no memory"
    for_others = basic(other.id, other_secret)["authorization"]
    assert (await processes[0].authenticate(Form({}, {}), for_others, HERE)).id == other.id
    assert (await processes[0].authenticate(Form({}, {}), right, "2001:db8::1")).id == client.id


async def test_without_redis_each_process_bounds_guesses_and_lets_who_is_right_in(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    client, secret = await world.client(grants=["client_credentials"])
    nowhere = Redis.from_url("redis://127.0.0.1:1", retry=Retry(NoBackoff(), 0))
    process = another_process(world, nowhere)
    right = basic(client.id, secret)["authorization"]
    assert (await process.authenticate(Form({}, {}), right, HERE)).id == client.id
    for _ in range(client_authentication.MAX_FAILURES):
        assert (await guess(process, client.id, "guess", HERE)).status == 401
    assert (await guess(process, client.id, "guess", HERE)).status == 429
    assert (await process.authenticate(Form({}, {}), right, HERE)).id == client.id
    assert caplog.text.count("counted per process only") == 1
    other = another_process(world, nowhere)
    for _ in range(client_authentication.MAX_FAILURES):
        assert (await guess(other, client.id, "guess", HERE)).status == 401
    assert (await guess(other, client.id, secret or "", HERE)).status == 429, "it knows of nothing"
    assert (await other.authenticate(Form({}, {}), right, "192.0.2.2")).id == client.id
    await nowhere.aclose()


async def test_a_redis_that_is_silent_delays_a_token_by_little(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def silent(*_args: Any, **_named: Any) -> Any:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    client, secret = await world.client(grants=["client_credentials"])
    process = another_process(world, world.redis)
    monkeypatch.setattr(process._throttle, "failures", silent)
    right = basic(client.id, secret)["authorization"]
    assert (await process.authenticate(Form({}, {}), right, HERE)).id == client.id
    assert 0 < asked * client_authentication.SHARED_TIMEOUT_S < 1.0


async def test_an_assertion_is_good_once_and_only_as_it_should_be(
    world: World, http: httpx.AsyncClient
) -> None:
    key = RSAKey.generate_key(2048, {"kid": "k1"})
    jwks = {"keys": [key.as_dict(private=False)]}
    client, _ = await world.client(
        method="private_key_jwt", jwks=jwks, grants=["client_credentials"], scopes=["inference"]
    )

    async def status(form: dict[str, str]) -> int:
        return (await http.post("/oauth/token", data={**CREDENTIALS, **form})).status_code

    once = assertion(key, client.id)
    assert [await status(once), await status(once)] == [200, 401], "a replay"
    for aud in (ISSUER, f"{ISSUER}/oauth/token", [ISSUER, f"{ISSUER}/oauth/token"]):
        assert await status(assertion(key, client.id, aud=aud)) == 200
    refused: list[dict[str, Any]] = [
        {"aud": "https://elsewhere.example"},
        {"aud": [ISSUER, "https://elsewhere.example"]},
        {"aud": []},
        {"iss": "client_other"},
        {"exp": int(NOW)},
        {"exp": int(NOW) + 3600},
        {"exp": None},
        {"iat": int(NOW) + 300},
        {"nbf": int(NOW) + 300},
        {"jti": ""},
        {"jti": "x" * 257},
    ]
    for changes in refused:
        assert await status(assertion(key, client.id, **changes)) == 401, changes
    assert await status(assertion(key, client.id, iat=int(NOW) + 60)) == 200
    stranger = RSAKey.generate_key(2048, {"kid": "k1"})
    assert await status(assertion(stranger, client.id)) == 401
    unknown = RSAKey.generate_key(2048, {"kid": "k2"})
    assert await status(assertion(unknown, client.id)) == 401
    public = OctKey.import_key(base64.urlsafe_b64encode(key.as_pem(private=False)).decode())
    claims = {"iss": client.id, "sub": client.id, "aud": ISSUER, "jti": "c", "exp": NOW + 60}
    confused = jwt.encode({"alg": "HS256", "kid": "k1"}, claims, public, algorithms=["HS256"])
    form = {"client_assertion_type": TYPE, "client_assertion": confused}
    assert await status(form) == 401, "algorithm confusion"
    world.clock.now += 10_000
    late = assertion(key, client.id, iat=int(world.clock()), exp=int(world.clock()) + 60)
    assert await status(late) == 200, "and old ones are swept away"


async def test_an_assertion_nested_too_deep_is_no_assertion(
    world: World, http: httpx.AsyncClient
) -> None:
    """Well signed: by a client that is known."""
    key = ECKey.generate_key("P-256", {"kid": "k1"})
    client, _ = await world.client(
        method="private_key_jwt",
        grants=["client_credentials"],
        jwks={"keys": [key.as_dict(private=False)]},
    )
    said = {"iss": client.id, "sub": client.id, "aud": ISSUER, "jti": "c", "exp": NOW + 60}
    nested = msgspec.Raw(b"[" * 1100 + b"]" * 1100)
    payload = msgspec.json.encode({**said, "x": nested})
    header = {"alg": "ES256", "kid": "k1"}
    made = jws.serialize_compact(header, payload, key, algorithms=["ES256"])
    form = {"client_assertion_type": TYPE, "client_assertion": made}
    answer = await http.post("/oauth/token", data={**CREDENTIALS, **form})
    assert (answer.status_code, answer.json()["error"]) == (401, "invalid_client")


async def test_keys_at_a_jwks_uri(world: World) -> None:
    key = ECKey.generate_key("P-256", {"kid": "k1"})
    good = key.as_dict(private=False)
    found: dict[str, Any] | None = {"keys": ["no key", good]}
    client, _ = await world.client(
        method="private_key_jwt",
        jwks={"keys": [key.as_dict()]} | {"keys": [key.as_dict(private=False)]},
    )
    remote = msgspec.structs.replace(client, jwks=None, jwks_uri="https://app.example.com/jwks")

    async def find(client_id: str) -> Any:
        return remote

    async def fetch(uri: str) -> dict[str, Any] | None:
        assert uri == remote.jwks_uri
        return found

    clients = SimpleNamespace(find=find)
    authentication = client_authentication.ClientAuthentication(
        clients,  # type: ignore[arg-type]
        db=world.db,
        throttle=Throttle(world.redis),
        audiences=frozenset({ISSUER}),
        fetch=fetch,
        clock=world.clock,
    )
    form = Form(assertion(key, client.id), {})
    assert await authentication.authenticate(form, None, "192.0.2.1") == remote
    for found in (None, {}, {"keys": None}, {"keys": ["x"]}, {"keys": [{**good, "x": 1}]}):
        form = Form(assertion(key, client.id), {})
        asking = authentication.authenticate(form, None, "192.0.2.1")
        assert await error_of(asking) == "invalid_client", found
