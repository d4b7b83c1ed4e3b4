"""Access tokens: what we issue can be read, and nothing else passes for it."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from joserfc import jws, jwt
from joserfc.jwk import KeySet, OctKey, RSAKey
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.errors import ExpiredToken, InvalidToken
from gateway.auth.oauth.tokens.rfc9068_access_token import (
    CLOCK_SKEW_S,
    MAX_LIFETIME_S,
    MAX_TOKEN_BYTES,
    AccessClaims,
    ActorClaim,
    as_audience,
    encode,
    read,
    sign,
)
from gateway.auth.oauth.tokens.signing_keys import JWKS_MAX_AGE_S, KeyRing, rotate
from tests.gateway.auth.parts import ISSUER, NOW, Clock, claims_of, open_ring


@pytest.fixture
async def ring(db: AsyncEngine) -> AsyncIterator[KeyRing]:
    async with open_ring(db, Clock()) as opened:
        yield opened


async def refused(ring: KeyRing, token: str, *, now: float = NOW) -> str:
    with pytest.raises(InvalidToken) as error:
        await read(ring, token, issuer=ISSUER, now=now)
    return str(error.value)


def forged(ring: KeyRing, header: dict[str, Any], claims: dict[str, Any] | None = None) -> str:
    """Signed by our key, whatever it says."""
    stated = {"alg": "RS256", "kid": ring.ring.active.kid, "typ": "at+jwt", **header}
    stated = {name: value for name, value in stated.items() if value is not None}
    body = msgspec.to_builtins(claims_of()) | (claims or {})
    return jwt.encode(stated, body, ring.ring.active, algorithms=["RS256"], default_type=None)


def segment(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


async def test_what_is_issued_can_be_read(ring: KeyRing) -> None:
    actor = ActorClaim(sub="client_b", act=ActorClaim(sub="client_a"))
    claims = claims_of(act=actor, aud=["a", "b"], grant_id="grant_1", derived_from=["j"])
    token = sign(ring.ring, claims)
    assert await read(ring, token, issuer=ISSUER, now=NOW) == claims
    assert claims.audiences == {"a", "b"} and claims.scopes == {"inference"}
    header = jws.extract_compact(token.encode()).headers()
    assert header == {"alg": "RS256", "kid": ring.ring.active.kid, "typ": "at+jwt"}
    assert as_audience(["a"]) == "a" and as_audience(["a", "b"]) == ["a", "b"]


async def test_the_same_claims_make_the_same_bytes_even_after_a_rotation(
    ring: KeyRing, db: AsyncEngine
) -> None:
    kid = ring.ring.active.kid
    first = sign(ring.ring, claims_of())
    clock = ring._clock
    assert isinstance(clock, Clock)
    clock.now += JWKS_MAX_AGE_S
    async with db.begin() as conn:
        await rotate(conn, ring.cipher, ring.now())
    await ring.reload()
    assert ring.ring.active.kid != kid
    assert sign(ring.ring, claims_of(), kid=kid) == first
    assert await read(ring, first, issuer=ISSUER, now=NOW) == claims_of()
    with pytest.raises(InvalidToken):
        sign(ring.ring, claims_of(), kid="gone")


async def test_it_expires_and_is_never_older_than_ten_minutes(ring: KeyRing) -> None:
    token = sign(ring.ring, claims_of())
    with pytest.raises(ExpiredToken):
        await read(ring, token, issuer=ISSUER, now=NOW + MAX_LIFETIME_S)
    assert await refused(ring, forged(ring, {}, {"exp": int(NOW) + 601}))
    with pytest.raises(AssertionError):
        sign(ring.ring, claims_of(exp=int(NOW) + 601))


async def test_a_clock_may_be_a_little_ahead_and_never_five_minutes(ring: KeyRing) -> None:
    for ahead, good in ((CLOCK_SKEW_S, True), (CLOCK_SKEW_S + 1, False), (300, False)):
        token = forged(ring, {}, {"iat": int(NOW) + ahead, "exp": int(NOW) + ahead + 60})
        if good:
            await read(ring, token, issuer=ISSUER, now=NOW)
        else:
            assert await refused(ring, token)


async def test_no_other_algorithm_is_taken_for_ours(ring: KeyRing) -> None:
    public = ring.ring.active.as_pem(private=False)
    kid = ring.ring.active.kid
    body = msgspec.to_builtins(claims_of())
    hmac_key = OctKey.import_key(base64.urlsafe_b64encode(public).decode())
    confused = jwt.encode(
        {"alg": "HS256", "kid": kid, "typ": "at+jwt"}, body, hmac_key, algorithms=["HS256"]
    )
    assert await refused(ring, confused) == "another algorithm"
    for name in ("none", "None", "nOnE"):
        unsigned = f"{segment({'alg': name, 'kid': kid, 'typ': 'at+jwt'})}.{segment(body)}."
        assert await refused(ring, unsigned)
    for name in ("RS384", "PS256"):
        other = {"alg": name, "kid": kid, "typ": "at+jwt"}
        ours = RSAKey.import_key(ring.ring.active.as_pem(private=True))
        token = jwt.encode(other, body, ours, algorithms=[name])
        assert await refused(ring, token) == "another algorithm"


async def test_no_other_key_is_taken_for_ours(ring: KeyRing) -> None:
    stranger = RSAKey.generate_key(2048)
    body = msgspec.to_builtins(claims_of())
    kid = ring.ring.active.kid
    for header in (
        {"kid": kid},
        {"kid": "unknown"},
        {"kid": "unknown", "jwk": stranger.as_dict(private=False)},
        {"kid": "unknown", "jku": "https://evil.example/jwks"},
        {},
    ):
        stated = {"alg": "RS256", "typ": "at+jwt", **header}
        token = jwt.encode(
            stated,
            body,
            stranger,
            registry=jws.JWSRegistry(algorithms=["RS256"], strict_check_header=False),
        )
        assert await refused(ring, token)


async def test_a_set_of_keys_never_signs(ring: KeyRing) -> None:
    """joserfc takes any key of a set; ours always names the one that signs."""
    tokens = {jws.extract_compact(sign(ring.ring, claims_of()).encode()).headers()["kid"]}
    for _ in range(20):
        tokens.add(jws.extract_compact(sign(ring.ring, claims_of()).encode()).headers()["kid"])
    assert tokens == {ring.ring.active.kid}
    assert not isinstance(ring.ring.active, KeySet)


@pytest.mark.parametrize("typ", ["JWT", "dpop+jwt", "jwt", "", None, 7])
async def test_no_other_type_is_taken_for_an_access_token(ring: KeyRing, typ: Any) -> None:
    body = msgspec.to_builtins(claims_of())
    if isinstance(typ, str) and typ:
        assert await refused(ring, encode(ring.ring.active, body, typ)) == "another type"
    header = {"alg": "RS256", "kid": ring.ring.active.kid, "typ": typ}
    signed = f"{segment(header)}.{segment(body)}.AAAA"
    assert await refused(ring, signed)


async def test_the_type_may_be_written_as_a_media_type(ring: KeyRing) -> None:
    token = encode(ring.ring.active, msgspec.to_builtins(claims_of()), "application/AT+JWT")
    assert await read(ring, token, issuer=ISSUER, now=NOW) == claims_of()


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://evil.example"},
        {"iss": ISSUER + "/"},
        {"exp": "soon"},
        {"exp": None},
        {"exp": float("inf")},
        {"iat": True},
        {"sub": 7},
        {"aud": {"a": 1}},
        {"jti": None},
        {"act": {"sub": {}}},
        {"scope": ["inference"]},
    ],
)
async def test_claims_of_another_shape_are_refused(ring: KeyRing, claims: dict[str, Any]) -> None:
    assert await refused(ring, forged(ring, {}, claims))


@pytest.mark.parametrize(
    "garbage",
    ["", ".", "..", "a.b.c", "eyJ.eyJ.x", "é.é.é", "e30.e30.", "e30.e30.AA.AA", "W10.e30.AA"],
)
async def test_garbage_is_refused(ring: KeyRing, garbage: str) -> None:
    assert await refused(ring, garbage)


async def test_oversized_tokens_are_refused_unread(ring: KeyRing) -> None:
    long = sign(ring.ring, claims_of(scope="x" * MAX_TOKEN_BYTES))
    assert await refused(ring, long) == "too long"
    assert await refused(ring, "a" * 10_000_000) == "too long"


async def test_a_payload_that_is_no_object_is_refused(ring: KeyRing) -> None:
    header = {"alg": "RS256", "kid": ring.ring.active.kid, "typ": "at+jwt"}
    for payload in ("[]", "7", "{", ""):
        token = jws.serialize_compact(header, payload, ring.ring.active, algorithms=["RS256"])
        assert await refused(ring, token)


def test_claims_that_are_absent_do_not_stand_in_the_token() -> None:
    stated = msgspec.to_builtins(claims_of())
    assert set(stated) == {
        *("iss", "sub", "aud", "client_id", "jti", "iat", "exp", "scope", "org_id", "project_id")
    }
    assert msgspec.convert(stated, AccessClaims) == claims_of()
