"""Passkeys at the live application, with an authenticator in software that keeps to WebAuthn."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from typing import Any

import cbor2
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from litestar import Litestar
from webauthn.helpers import bytes_to_base64url

from gateway.auth.login import passkeys
from tests.gateway.auth.browsing import ISSUER, desk_of, hidden, new_browser
from tests.gateway.auth.conftest import Clock, Tenant

USER_PRESENT_AND_VERIFIED, ATTESTED = 0x05, 0x40
TOKEN = re.compile(r'data-token="([^"]+)"')


class Authenticator:
    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.id = os.urandom(16)
        self.count = 0
        self.flags = USER_PRESENT_AND_VERIFIED

    def data(self, rp_id: str, attested: bytes = b"") -> bytes:
        self.count += 1
        flags = self.flags | (ATTESTED if attested else 0)
        digest = hashlib.sha256(rp_id.encode()).digest()
        return digest + bytes([flags]) + self.count.to_bytes(4, "big") + attested

    def client_data(self, kind: str, challenge: str, origin: str) -> bytes:
        return json.dumps({"type": kind, "challenge": challenge, "origin": origin}).encode()

    def create(self, options: dict[str, Any], origin: str = ISSUER) -> dict[str, Any]:
        numbers = self.key.public_key().public_numbers()
        cose = {1: 2, 3: -7, -1: 1, -2: numbers.x.to_bytes(32), -3: numbers.y.to_bytes(32)}
        attested = bytes(16) + len(self.id).to_bytes(2, "big") + self.id + cbor2.dumps(cose)
        data = self.data(options["rp"]["id"], attested)
        attestation = cbor2.dumps({"fmt": "none", "attStmt": {}, "authData": data})
        client = self.client_data("webauthn.create", options["challenge"], origin)
        return self.wrap(attestationObject=attestation, clientDataJSON=client)

    def get(self, options: dict[str, Any], origin: str = ISSUER) -> dict[str, Any]:
        data = self.data(options["rpId"])
        client = self.client_data("webauthn.get", options["challenge"], origin)
        signed = self.key.sign(data + hashlib.sha256(client).digest(), ec.ECDSA(SHA256()))
        return self.wrap(authenticatorData=data, clientDataJSON=client, signature=signed)

    def wrap(self, **response: bytes) -> dict[str, Any]:
        encoded = {name: bytes_to_base64url(value) for name, value in response.items()}
        name = bytes_to_base64url(self.id)
        return {"id": name, "rawId": name, "type": "public-key", "response": encoded}


async def post(browser: httpx.AsyncClient, path: str, **sent: Any) -> httpx.Response:
    return await browser.post(f"/oauth/passkeys/{path}", json=sent)


async def token_of(browser: httpx.AsyncClient, path: str) -> str:
    found = TOKEN.search((await browser.get(path)).text)
    assert found is not None
    return found[1]


async def register(browser: httpx.AsyncClient, authenticator: Authenticator) -> httpx.Response:
    token = await token_of(browser, "/oauth/account")
    options = (await post(browser, "register/options", form_token=token)).json()
    made = authenticator.create(options)
    return await post(browser, "register", form_token=token, name="Laptop", credential=made)


async def sign_in(browser: httpx.AsyncClient, authenticator: Authenticator) -> httpx.Response:
    token = await token_of(browser, "/oauth/login")
    options = (await post(browser, "sign-in/options", form_token=token)).json()
    made = authenticator.get(options)
    return await post(browser, "sign-in", form_token=token, credential=made)


async def test_a_passkey_is_added_signs_in_and_is_removed(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant
) -> None:
    authenticator = Authenticator()
    assert (await register(signed_in, authenticator)).json() == {"location": "/oauth/account"}
    twice = await register(signed_in, authenticator)
    assert twice.status_code == 400, "it is registered"
    account = await signed_in.get("/oauth/account")
    assert "Laptop, since" in account.text
    async with new_browser(app) as elsewhere:
        done = await sign_in(elsewhere, authenticator)
        assert done.json() == {"location": "/console"}
        assert ada.email in (await elsewhere.get("/oauth/account")).text
    unknown = Authenticator()
    unknown.id = b"another"
    async with new_browser(app) as stranger:
        assert (await sign_in(stranger, unknown)).status_code == 403
        unknown.id = authenticator.id
        assert (await sign_in(stranger, unknown)).status_code == 403, "another key"
    removed = await signed_in.post("/oauth/passkeys/remove", data=hidden(account.text))
    assert removed.headers["location"] == "/oauth/account"
    assert (await signed_in.post("/oauth/passkeys/remove", data=hidden(account.text))).is_error
    async with new_browser(app) as elsewhere:
        assert (await sign_in(elsewhere, authenticator)).status_code == 403


async def test_an_answer_counts_once_here_soon_and_with_its_user_verified(
    app: Litestar, signed_in: httpx.AsyncClient, clock: Clock
) -> None:
    authenticator = Authenticator()
    await register(signed_in, authenticator)
    async with new_browser(app) as browser:
        token = await token_of(browser, "/oauth/login")

        async def options() -> dict[str, Any]:
            answer = await post(browser, "sign-in/options", form_token=token)
            found: dict[str, Any] = answer.json()
            return found

        async def status(credential: Any) -> int:
            done = await post(browser, "sign-in", form_token=token, credential=credential)
            assert done.is_success or done.json() == {"error": "access_denied"}
            return done.status_code

        assert await status(authenticator.get(await options(), "https://evil.example")) == 403
        old = authenticator.get(await options())
        clock.pass_s(301)
        assert await status(old) == 403
        authenticator.flags = 0x01
        assert await status(authenticator.get(await options())) == 403, "nobody was verified"
        authenticator.flags = USER_PRESENT_AND_VERIFIED
        for challenge in (b"1.x.y", b"x" * 257, b"\xff"):
            made_up = {**(await options()), "challenge": bytes_to_base64url(challenge)}
            assert await status(authenticator.get(made_up)) == 403
        nested = bytes_to_base64url(b'{"challenge":' + b"[" * 5000)
        deep = {"response": {"clientDataJSON": nested}}
        for broken in (None, {}, {"id": "x"}, {"response": {"clientDataJSON": "e30"}}, deep):
            assert await status(broken) == 403
        assert await status({**authenticator.get(await options()), "id": "\0"}) == 403
        used = await options()
        replayed = authenticator.get(used)
        authenticator.count = 0
        assert await status(authenticator.get(await options())) == 403, "a copy of the key"
        before = httpx.Cookies(browser.cookies)
        assert await status(replayed) == 200
        browser.cookies = before  # whoever replays has those of the first time
        authenticator.count = 100
        assert await status(authenticator.get(used)) == 403, "a challenge is answered once"
        for path in ("sign-in/options", "sign-in", "register/options", "register"):
            assert (await post(browser, path, form_token="x")).status_code == 403
            for content in (b"{", b'{"request":' + b"[" * 5000):
                headers = {"content-type": "application/json"}
                plain = await browser.post(
                    f"/oauth/passkeys/{path}", content=content, headers=headers
                )
                assert plain.status_code == 403


async def test_of_two_answers_with_the_same_count_one_signs_in(
    app: Litestar, signed_in: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of a key at once: both are verified before either is counted."""
    authenticator, both = Authenticator(), asyncio.Barrier(2)
    await register(signed_in, authenticator)
    count, use = authenticator.count, desk_of(app).passkeys._use

    async def meeting(challenge: bytes) -> None:
        await use(challenge)
        await both.wait()

    monkeypatch.setattr(desk_of(app).passkeys, "_use", meeting)

    async def copy() -> int:
        async with new_browser(app) as browser:
            token = await token_of(browser, "/oauth/login")
            options = (await post(browser, "sign-in/options", form_token=token)).json()
            authenticator.count = count
            made = authenticator.get(options)
            return (await post(browser, "sign-in", form_token=token, credential=made)).status_code

    assert sorted(await asyncio.gather(copy(), copy())) == [200, 403]


async def test_a_passkey_of_another_origin_or_one_too_many_is_not_registered(
    signed_in: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passkeys, "MAX_PASSKEYS", 1)
    token = await token_of(signed_in, "/oauth/account")
    elsewhere = Authenticator()
    options = (await post(signed_in, "register/options", form_token=token)).json()
    made = elsewhere.create(options, "https://evil.example")
    refused = await post(signed_in, "register", form_token=token, name="x", credential=made)
    assert refused.status_code == 400 and refused.json() == {"error": "invalid_request"}
    for name, content in (("clientDataJSON", b"[" * 5000), ("attestationObject", b"\x81" * 5000)):
        options = (await post(signed_in, "register/options", form_token=token)).json()
        made = elsewhere.create(options)
        made["response"][name] = bytes_to_base64url(content)
        refused = await post(signed_in, "register", form_token=token, name="x", credential=made)
        assert refused.status_code == 400 and refused.json() == {"error": "invalid_request"}
    assert (await register(signed_in, Authenticator())).status_code == 200
    assert (await register(signed_in, Authenticator())).status_code == 400
    assert (await signed_in.get("/oauth/account")).text.count("Laptop, since") == 1
