"""Bad input: every way in which a token that somebody else signed can lie."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from joserfc.jwk import OctKey

from gateway.auth.errors import InvalidToken
from gateway.auth.federation.external_tokens import (
    MAX_TOKEN_BYTES,
    check_claims,
    read,
    texts_at,
    verify,
)
from tests.gateway.auth.issuing import (
    AUDIENCE,
    ISSUER,
    NOW,
    FakeIssuer,
    FarEnd,
    ec_key,
    import_public,
    okp_key,
    rsa_key,
)


@pytest.fixture(scope="module")
def issuer() -> FakeIssuer:
    return FakeIssuer(FarEnd())


def part(value: Any) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def claims_of(issuer: FakeIssuer, token: str) -> dict[str, Any]:
    return verify(read(token), import_public(issuer.keys[0]))


def check(claims: dict[str, Any], *, leeway_s: float = 30, now: float = NOW) -> float:
    return check_claims(claims, issuer=ISSUER, audience=AUDIENCE, leeway_s=leeway_s, now=now)


def test_a_good_token_says_what_was_signed(issuer: FakeIssuer) -> None:
    claims = claims_of(issuer, issuer.sign())
    assert claims["sub"] == "someone"
    assert check(claims) == NOW + 330


@pytest.mark.parametrize(
    ("alg", "key"),
    [
        ("PS256", rsa_key()),
        ("ES256", ec_key("e")),
        ("EdDSA", okp_key("o")),
        ("Ed25519", okp_key("o")),
    ],
)
def test_each_kind_of_key_pair_is_verified(issuer: FakeIssuer, alg: str, key: Any) -> None:
    token = issuer.sign(key=key, alg=alg)
    assert verify(read(token), import_public(key))["sub"] == "someone"


def test_algorithm_confusion_a_mac_under_the_public_key_is_refused(issuer: FakeIssuer) -> None:
    public = import_public(issuer.keys[0])
    pem = public.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for secret in (pem, pem.strip(), json.dumps(public.as_dict()).encode()):
        signed = f"{part({'alg': 'HS256', 'kid': 'k1', 'typ': 'JWT'})}.{part(issuer.claims())}"
        mac = hmac.digest(secret, signed.encode(), hashlib.sha256)
        with pytest.raises(InvalidToken, match="algorithm"):
            read(f"{signed}.{part(mac)}")


@pytest.mark.parametrize(
    "alg", ["none", "None", "NONE", "", "HS256", "HS512", "RSA-OAEP", "ES256K"]
)
def test_none_and_all_that_is_no_key_pair_is_refused(issuer: FakeIssuer, alg: str) -> None:
    with pytest.raises(InvalidToken, match="algorithm"):
        read(f"{part({'alg': alg})}.{part(issuer.claims())}.")


def test_an_algorithm_that_does_not_fit_the_key_is_refused(issuer: FakeIssuer) -> None:
    token = issuer.sign(key=ec_key("e"), alg="ES256")
    with pytest.raises(InvalidToken, match="signature"):
        verify(read(token), import_public(issuer.keys[0]))


def test_a_missing_signature_is_refused(issuer: FakeIssuer) -> None:
    head, payload, _ = issuer.sign().split(".")
    with pytest.raises(InvalidToken, match="signature"):
        verify(read(f"{head}.{payload}."), import_public(issuer.keys[0]))


def test_changed_claims_are_refused(issuer: FakeIssuer) -> None:
    head, _, signature = issuer.sign().split(".")
    with pytest.raises(InvalidToken, match="signature"):
        claims_of(issuer, f"{head}.{part(issuer.claims(sub='admin'))}.{signature}")


def test_a_signature_of_another_key_with_the_same_kid_is_refused(issuer: FakeIssuer) -> None:
    with pytest.raises(InvalidToken, match="signature"):
        claims_of(issuer, issuer.sign(key=rsa_key("k1")))


def test_a_key_that_comes_with_the_token_is_not_believed(issuer: FakeIssuer) -> None:
    own = rsa_key("k1")
    token = issuer.sign(key=own, jwk=own.as_dict(private=False), jku="https://evil.example.com/")
    with pytest.raises(InvalidToken, match="signature"):
        claims_of(issuer, token)


def test_an_oversized_token_is_refused_before_it_is_read(issuer: FakeIssuer) -> None:
    with pytest.raises(InvalidToken, match="too long"):
        read(issuer.sign(issuer.claims(fill="x" * MAX_TOKEN_BYTES)))


def test_a_parameter_that_stands_there_twice_is_refused(issuer: FakeIssuer) -> None:
    head = part({"alg": "RS256"})
    for header, payload in (
        (part(b'{"alg":"RS256","alg":"none"}'), part({})),
        (head, part(b'{"iss":"a","iss":"b"}')),
        (head, part(b'{"a":{"b":1,"b":2}}')),
    ):
        with pytest.raises(InvalidToken, match="not base64url of JSON"):
            read(f"{header}.{payload}.x")


@pytest.mark.parametrize(
    "token",
    [
        "",
        "a.b",
        "a.b.c.d",
        "a.b.c.d.e",
        f"{part({'alg': 'RS256'})}.{part([])}.x",
        f"{part([])}.{part({})}.x",
        f"{part(b'{')}.{part({})}.x",
        f"{part(b'[' * 3000)}.{part({})}.x",
        f"{part({'alg': 'RS256'})}.{part(b'NaN')}.x",
        f"{part({'alg': 'RS256'})}.{part(bytes([0xFF]))}.x",
        f"{part({'alg': 'RS256'})}.!!!.x",
        f"{part({'alg': 'RS256'})}.\u00e9.x",
        f"{part({'alg': ['RS256']})}.{part({})}.x",
        f"{part({'alg': 'RS256', 'kid': 5})}.{part({})}.x",
        f"{part({'alg': 'RS256', 'typ': 5})}.{part({})}.x",
    ],
)
def test_what_is_no_jwt_is_refused(token: str) -> None:
    with pytest.raises(InvalidToken):
        read(token)


@given(st.text(max_size=200))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    with pytest.raises(InvalidToken):
        read(text)


@pytest.mark.parametrize("kind", ["dpop+jwt", "logout+jwt", "JWE", "secevent+jwt"])
def test_another_type_of_token_is_refused(issuer: FakeIssuer, kind: str) -> None:
    with pytest.raises(InvalidToken, match="type"):
        read(issuer.sign(typ=kind))


def test_an_extension_that_must_be_understood_is_refused(issuer: FakeIssuer) -> None:
    signed = issuer.sign().split(".")
    for extra in ({"crit": ["b64"], "b64": False}, {"b64": False}, {"crit": ["x"], "x": 1}):
        head = part({"alg": "RS256", "kid": "k1", **extra})
        with pytest.raises(InvalidToken, match="extension"):
            read(".".join([head, *signed[1:]]))


CLOCK_SKEW_S = 300


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("expired 5 minutes ago", {"exp": NOW - CLOCK_SKEW_S}),
        ("issued in 5 minutes", {"iat": NOW + CLOCK_SKEW_S, "exp": NOW + 600}),
        ("good in 5 minutes", {"nbf": NOW + CLOCK_SKEW_S, "exp": NOW + 600}),
    ],
)
@pytest.mark.parametrize("leeway_s", [0, 30, 120])
def test_a_clock_that_is_5_minutes_off_is_too_far_off(
    issuer: FakeIssuer, kind: str, more: dict[str, Any], leeway_s: int
) -> None:
    with pytest.raises(InvalidToken):
        check(issuer.claims(**more), leeway_s=leeway_s)


def test_a_clock_within_the_leeway_is_near_enough(issuer: FakeIssuer) -> None:
    check(issuer.claims(exp=NOW - 29, iat=NOW + 29, nbf=NOW + 29))
    with pytest.raises(InvalidToken, match="expired"):
        check(issuer.claims(exp=NOW - 30))


@pytest.mark.parametrize(
    "more",
    [
        {"iss": "https://issuer.example.com/"},
        {"iss": None},
        {"iss": ["https://issuer.example.com"]},
        {"aud": "api://other"},
        {"aud": []},
        {"aud": None},
        {"aud": {"api://tollgate": 1}},
        {"aud": [["api://tollgate"]]},
        {"sub": None},
        {"sub": ""},
        {"sub": 5},
        {"sub": "x" * 256},
        {"sub": "a\x00b"},
        {"exp": None},
        {"exp": "1700000300"},
        {"exp": True},
        {"exp": -1},
        {"exp": 10**400},
        {"exp": NOW + 48 * 3600},
        {"iat": "now"},
        {"nbf": False},
    ],
)
def test_claims_that_are_not_for_us_or_not_now_are_refused(
    issuer: FakeIssuer, more: dict[str, Any]
) -> None:
    with pytest.raises(InvalidToken):
        check(issuer.claims(**more))


def test_one_audience_of_several_is_ours(issuer: FakeIssuer) -> None:
    check(issuer.claims(aud=["api://other", AUDIENCE], iat=None))


def test_a_claim_is_found_by_its_name_or_along_its_path() -> None:
    claims = {
        "roles": ["a", 5, "b"],
        "https://x.example.com/role": "c",
        "realm_access": {"roles": ["d"]},
        "text": "e",
    }
    assert texts_at(claims, "roles") == ["a", "b"]
    assert texts_at(claims, "https://x.example.com/role") == ["c"]
    assert texts_at(claims, "realm_access.roles") == ["d"]
    assert texts_at(claims, "text.more") == []
    assert texts_at(claims, "nothing") == []


def test_a_mac_key_is_no_key_to_verify_with() -> None:
    key = OctKey.generate_key(256)
    token = FakeIssuer(FarEnd()).sign(key=key, alg="HS256")
    with pytest.raises(InvalidToken, match="algorithm"):
        read(token)
