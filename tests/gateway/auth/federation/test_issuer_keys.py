"""The keys of an external issuer: which are believed, how often they are asked for, how long they
are kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.auth.federation.issuer_keys import (
    MAX_AGE_S,
    MAX_KEYS,
    MIN_REFETCH_S,
    REFRESH_S,
    IssuerKeys,
    LoginIssuerUnavailable,
    to_key,
)
from tests.gateway.auth.issuing import ISSUER, Clock, FakeIssuer, FarEnd, ec_key, okp_key, rsa_key


@pytest.fixture
def far_end() -> FarEnd:
    return FarEnd()


@pytest.fixture
def issuer(far_end: FarEnd) -> FakeIssuer:
    return FakeIssuer(far_end)


@pytest.fixture
def clock() -> Clock:
    return Clock(5000.0)


@pytest.fixture
def keys(far_end: FarEnd, clock: Clock) -> IssuerKeys:
    return IssuerKeys(far_end, clock=clock)  # type: ignore[arg-type]


async def test_discovery_and_keys_are_asked_for_once(
    keys: IssuerKeys, issuer: FakeIssuer, far_end: FarEnd
) -> None:
    assert await keys.find(ISSUER, "k1", "RS256") is not None
    assert await keys.find(ISSUER, "k1", "RS256") is not None
    assert (await keys.discover(ISSUER)).token_endpoint == f"{ISSUER}/token"
    assert far_end.asked == [issuer.discovery_url, issuer.jwks_url]


async def test_an_unknown_kid_is_asked_for_at_a_bounded_rate(
    keys: IssuerKeys, issuer: FakeIssuer, far_end: FarEnd, clock: Clock
) -> None:
    assert await keys.find(ISSUER, "k1", "RS256") is not None
    for number in range(100):
        assert await keys.find(ISSUER, f"unknown{number}", "RS256") is None
    assert len(far_end.asked) == 2
    issuer.keys.append(rsa_key("k2"))
    issuer.publish()
    clock.now += MIN_REFETCH_S
    assert await keys.find(ISSUER, "k2", "RS256") is not None
    assert len(far_end.asked) == 4


async def test_keys_that_were_withdrawn_are_forgotten(
    keys: IssuerKeys, issuer: FakeIssuer, clock: Clock
) -> None:
    assert await keys.find(ISSUER, "k1", "RS256") is not None
    issuer.keys = [rsa_key("k2")]
    issuer.publish()
    clock.now += REFRESH_S + 1
    assert await keys.find(ISSUER, "k1", "RS256") is None


async def test_an_issuer_that_is_away_is_believed_for_a_bounded_time(
    keys: IssuerKeys, issuer: FakeIssuer, far_end: FarEnd, clock: Clock
) -> None:
    assert await keys.find(ISSUER, "k1", "RS256") is not None
    far_end.fails(issuer.jwks_url)
    clock.now += MAX_AGE_S - 1
    assert await keys.find(ISSUER, "k1", "RS256") is not None
    clock.now += 2
    with pytest.raises(LoginIssuerUnavailable):
        await keys.find(ISSUER, "k1", "RS256")


async def test_an_issuer_that_never_answered_is_not_asked_again_at_once(
    keys: IssuerKeys, far_end: FarEnd, clock: Clock
) -> None:
    for _ in range(5):
        with pytest.raises(LoginIssuerUnavailable):
            await keys.discover(ISSUER)
    assert len(far_end.asked) == 1
    clock.now += MIN_REFETCH_S
    with pytest.raises(LoginIssuerUnavailable):
        await keys.discover(ISSUER)
    assert len(far_end.asked) == 2


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://other.example.com", "jwks_uri": f"{ISSUER}/jwks"},
        {"issuer": ISSUER + "/", "jwks_uri": f"{ISSUER}/jwks"},
        {"issuer": ISSUER},
        {"issuer": ISSUER, "jwks_uri": "http://169.254.169.254/"},
        {"issuer": ISSUER, "jwks_uri": 5},
    ],
)
async def test_a_document_that_is_not_the_issuers_own_is_not_believed(
    keys: IssuerKeys, issuer: FakeIssuer, far_end: FarEnd, document: dict[str, Any]
) -> None:
    far_end.says(issuer.discovery_url, document)
    with pytest.raises(LoginIssuerUnavailable):
        await keys.discover(ISSUER)


@pytest.mark.parametrize("content", [{}, {"keys": 5}, {"keys": [{}] * (MAX_KEYS + 1)}])
async def test_a_key_set_that_is_none_is_not_believed(
    keys: IssuerKeys, issuer: FakeIssuer, far_end: FarEnd, content: dict[str, Any]
) -> None:
    far_end.says(issuer.jwks_url, content)
    with pytest.raises(LoginIssuerUnavailable):
        await keys.discover(ISSUER)


async def test_an_error_for_an_answer_is_none(
    keys: IssuerKeys, issuer: FakeIssuer, far_end: FarEnd
) -> None:
    far_end.says(issuer.discovery_url, {}, status=404)
    with pytest.raises(LoginIssuerUnavailable):
        await keys.discover(ISSUER)


async def test_a_key_fits_one_algorithm(keys: IssuerKeys, issuer: FakeIssuer) -> None:
    issuer.keys = [rsa_key("r"), ec_key("e"), okp_key("o"), rsa_key("p", alg="PS256")]
    issuer.publish()
    assert await keys.find(ISSUER, "r", "RS256") is not None
    assert await keys.find(ISSUER, "r", "ES256") is None
    assert await keys.find(ISSUER, "e", "ES256") is not None
    assert await keys.find(ISSUER, "e", "ES384") is None
    assert await keys.find(ISSUER, "o", "EdDSA") is not None
    assert await keys.find(ISSUER, "p", "PS256") is not None
    assert await keys.find(ISSUER, "p", "RS256") is None, "its own alg is another one"


async def test_without_a_kid_the_only_key_that_fits_is_meant(
    keys: IssuerKeys, issuer: FakeIssuer, clock: Clock
) -> None:
    issuer.keys = [rsa_key("r"), ec_key("e")]
    issuer.publish()
    assert await keys.find(ISSUER, None, "RS256") is not None
    issuer.keys.append(rsa_key("r2"))
    issuer.publish()
    clock.now += REFRESH_S + 1
    assert await keys.find(ISSUER, None, "RS256") is None


@pytest.mark.parametrize(
    "written",
    [
        "text",
        {},
        {"kty": "oct", "k": "c2VjcmV0"},
        {"kty": "unknown"},
        {"kty": "RSA", "n": "AQAB", "e": "AQAB"},
        {"kty": "RSA", "n": 5, "e": "AQAB"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
        {**rsa_key("k").as_dict(private=False), "n": "vw" + "A" * 168 + "Q"},  # 1024 bits
        rsa_key("enc", use="enc").as_dict(private=False),
        rsa_key("alg", alg="RSA-OAEP").as_dict(private=False),
        {**rsa_key("k").as_dict(private=False), "alg": ["RS256"]},
        {**rsa_key("k").as_dict(private=False), "kid": 5},
        ec_key("curve", "secp256k1").as_dict(private=False),
    ],
)
def test_what_is_no_strong_public_key_for_signatures_is_left_out(written: Any) -> None:
    assert to_key(written) is None


async def test_a_useless_key_does_not_spoil_the_others(
    keys: IssuerKeys, issuer: FakeIssuer
) -> None:
    issuer.publish_keys([{"kty": "oct", "k": "AA"}, issuer.keys[0].as_dict(private=False)])
    assert await keys.find(ISSUER, "k1", "RS256") is not None


async def test_many_at_once_cause_one_fetch_and_closing_ends_it(
    keys: IssuerKeys, issuer: FakeIssuer, far_end: FarEnd
) -> None:
    gate = asyncio.Event()
    answered = far_end.get

    async def slow(url: str, **options: Any) -> Any:
        await gate.wait()
        return await answered(url, **options)

    far_end.get = slow  # type: ignore[method-assign]
    asking = [asyncio.create_task(keys.find(ISSUER, "k1", "RS256")) for _ in range(10)]
    await asyncio.sleep(0)
    gate.set()
    assert None not in await asyncio.gather(*asking)
    assert len(far_end.asked) == 2
    await keys.close()

    gate.clear()
    waiting = asyncio.create_task(keys.discover("https://other.example.com"))
    await asyncio.sleep(0)
    await keys.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
