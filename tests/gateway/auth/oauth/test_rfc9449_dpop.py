"""Tokens that are bound to a key, and the proofs of it."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import httpx
import msgspec
import pytest
from joserfc import jws, jwt
from joserfc.jwk import ECKey, OctKey
from redis.asyncio import Redis

from gateway.auth.oauth import rfc9449_dpop
from gateway.auth.oauth.rfc9449_dpop import InvalidProof
from gateway.routes.shared.guards import sent_path
from tests.gateway.auth.parts import ISSUER, NOW
from tests.gateway.auth.sending import code_form, proof
from tests.gateway.auth.world import (
    World,
)


async def test_a_proof_binds_what_is_issued(world: World, http: httpx.AsyncClient) -> None:
    key = ECKey.generate_key("P-256")
    client, _ = await world.client(method="none")
    form = {**await code_form(world, client), "client_id": client.id}
    answer = await http.post("/oauth/token", data=form, headers={"dpop": proof(key)})
    assert answer.status_code == 200 and answer.json()["token_type"] == "DPoP"
    token = answer.json()["access_token"]
    ath = base64.urlsafe_b64encode(hashlib.sha256(token.encode()).digest()).rstrip(b"=").decode()
    shown = {"htm": "GET", "htu": f"{ISSUER}/v1/probe?x=1#y", "ath": ath}

    async def status(scheme: str, *proofs: str) -> int:
        headers = [("authorization", f"{scheme} {token}"), *(("dpop", each) for each in proofs)]
        return (await http.get("/v1/probe?x=1", headers=headers)).status_code

    once = proof(key, **shown)
    assert await status("DPoP", once) == 200
    assert await status("DPoP", once) == 401, "a replay"
    assert await status("dpop", proof(key, **shown)) == 200
    assert await status("Bearer") == 401, "a bound token is no bearer token"
    assert await status("DPoP") == 401
    assert await status("DPoP", proof(key, **shown), proof(key, **shown)) == 401
    heads = [
        await http.head(
            "/v1/probe", headers={"authorization": f"DPoP {token}", "dpop": proof(key, **said)}
        )
        for said in (shown | {"htm": "HEAD"}, shown)
    ]
    assert [each.status_code for each in heads] == [200, 401]
    other = ECKey.generate_key("P-256")
    assert await status("DPoP", proof(other, **shown)) == 401
    for changes in (
        {"ath": None},
        {"ath": "x"},
        {"ath": "é"},
        {"htm": "POST"},
        {"htu": f"{ISSUER}/v1"},
    ):
        assert await status("DPoP", proof(key, **{**shown, **changes})) == 401, changes
    api_key = {"authorization": "DPoP sk-tg-" + "0" * 43}
    key_ath = hashlib.sha256(api_key["authorization"][5:].encode()).digest()
    said = base64.urlsafe_b64encode(key_ath).rstrip(b"=").decode()
    headers = {**api_key, "dpop": proof(key, **{**shown, "ath": said})}
    assert (await http.get("/v1/probe", headers=headers)).status_code == 401


async def test_a_path_is_compared_as_it_is_written(world: World, http: httpx.AsyncClient) -> None:
    """RFC 9449, section 4.3, after RFC 3986, section 6.2.2."""
    key = ECKey.generate_key("P-256")
    client, _ = await world.client(method="none")
    form = {**await code_form(world, client), "client_id": client.id}
    answer = await http.post("/oauth/token", data=form, headers={"dpop": proof(key)})
    token = answer.json()["access_token"]
    ath = base64.urlsafe_b64encode(hashlib.sha256(token.encode()).digest()).rstrip(b"=").decode()

    async def status(sent: str, stated: str) -> int:
        made = proof(key, htm="GET", htu=ISSUER + stated, ath=ath)
        headers = {"authorization": f"DPoP {token}", "dpop": made}
        return (await http.get(sent, headers=headers)).status_code

    same = (
        ("/v1/probe/penny%20x", "/v1/probe/penny%20x"),
        ("/v1/probe/a%2fb", "/v1/probe/a%2Fb"),
        ("/v1/probe/%7Epenny", "/v1/probe/~penny"),
        ("/v1/probe/pe%C3%B1%C3%B1y", "/v1/probe/pe%c3%b1%c3%b1y"),
    )
    for sent, stated in same:
        assert await status(sent, stated) == 200, (sent, stated)
    for sent, stated in (
        ("/v1/probe/a%2fb", "/v1/probe/a/b"),
        ("/v1/probe/penny%20x", "/v1/probe/penny"),
        ("/v1/probe/penny%2520x", "/v1/probe/penny%20x"),
    ):
        assert await status(sent, stated) == 401, (sent, stated)


@pytest.mark.parametrize("raw", [b"/v1/models/penny%20x", None])
def test_a_server_that_does_not_say_what_was_sent_is_made_up_for(raw: bytes | None) -> None:
    scope: Any = {"path": "/v1/models/penny x", "raw_path": raw}
    assert sent_path(scope) == "/v1/models/penny%20x"


def signed(key: ECKey, payload: bytes) -> str:
    """Sign a payload that no encoder of claims would write."""
    header = {"alg": "ES256", "typ": "dpop+jwt", "jwk": key.as_dict(private=False)}
    registry = rfc9449_dpop.ProofJwsRegistry(algorithms=["ES256"])
    return jws.serialize_compact(header, payload, key, registry=registry)


async def test_bad_proofs_are_refused(world: World, http: httpx.AsyncClient) -> None:
    key = ECKey.generate_key("P-256")
    client, _ = await world.client(method="none", dpop_bound_access_tokens=True)
    form = {**await code_form(world, client), "client_id": client.id}
    private = {"alg": "ES256", "typ": "dpop+jwt", "jwk": key.as_dict(private=True)}
    secret = OctKey.generate_key(256)
    claims = {"jti": "j", "htm": "POST", "htu": f"{ISSUER}/oauth/token", "iat": int(NOW)}
    registry = rfc9449_dpop.ProofJwsRegistry(algorithms=["ES256", "HS256"])
    symmetric = {"alg": "HS256", "typ": "dpop+jwt", "jwk": secret.as_dict(private=True)}
    bad = [
        "",
        "x",
        "a.b.c",
        "é",
        "a" * 5000,
        proof(key, iat=int(NOW) - 61),
        proof(key, iat=int(NOW) + 300),
        proof(key, iat=None),
        proof(key, jti=""),
        proof(key, htu="https://elsewhere.example/oauth/token"),
        proof(key, htm="post"),
        proof(key, htu="http://["),
        proof(key, htu="http://\u2100/oauth/token"),
        signed(key, b'{"x":' + b"[" * 1100 + b"]" * 1100 + b"}"),
        jwt.encode(private, claims, key, registry=registry),
        jwt.encode(symmetric, claims, secret, registry=registry),
        jwt.encode({**private, "typ": "JWT"}, claims, key, registry=registry),
        jwt.encode({"alg": "ES256", "typ": "dpop+jwt"}, claims, key, registry=registry),
    ]
    for each in bad:
        headers = [(b"dpop", each.encode())]
        answer = await http.post("/oauth/token", data=form, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (400, "invalid_dpop_proof"), each
    two = [("dpop", proof(key)), ("dpop", proof(key))]
    for headers_ in (two, []):
        answer = await http.post("/oauth/token", data=form, headers=headers_)
        assert answer.json()["error"] == "invalid_dpop_proof"
    odd = signed(key, msgspec.json.encode({**claims, "jti": "HALF"}).replace(b"HALF", rb"\ud800"))
    answer = await http.post("/oauth/token", data=form, headers={"dpop": odd})
    assert answer.status_code == 200, "half a character tells proofs apart as well as any"


async def test_the_vector_of_dpop(redis: Redis) -> None:
    """RFC 9449, figure 2: the proof of section 4.1, at its time."""
    vector = (
        "eyJ0eXAiOiJkcG9wK2p3dCIsImFsZyI6IkVTMjU2IiwiandrIjp7Imt0eSI6IkVDIiwieCI6Imw4dEZyaHgtMz"
        "R0VjNoUklDUkRZOXpDa0RscEJoRjQyVVFVZldWQVdCRnMiLCJ5IjoiOVZFNGpmX09rX282NHpiVFRsY3VOSmFq"
        "SG10NnY5VERWclUwQ2R2R1JEQSIsImNydiI6IlAtMjU2In19.eyJqdGkiOiItQndDM0VTYzZhY2MybFRjIiwia"
        "HRtIjoiUE9TVCIsImh0dSI6Imh0dHBzOi8vc2VydmVyLmV4YW1wbGUuY29tL3Rva2VuIiwiaWF0IjoxNTYyMjY"
        "yNjE2fQ.2-GxA6T8lP4vfrg8v-FdWP0A0zdrj8igiMLvqRMUvwnQg4PtFLbdLXiOSsX0x7NVY-FNyJK70nfbV37"
        "xRZT3Lg"
    )
    url = "https://server.example.com/token"
    jkt = await rfc9449_dpop.verify(vector, redis=redis, method="POST", url=url, now=1562262616)
    assert jkt == "0ZcOCORZNYy-DWpqq30jZyJGHTN0d2HglBV3uiguA4I"
    with pytest.raises(InvalidProof):
        await rfc9449_dpop.verify(vector, redis=redis, method="POST", url=url, now=1562262616)
