"""The pages of the authorization server in a real browser."""

from __future__ import annotations

from urllib.parse import urlencode

from authlib.oauth2.rfc7636 import create_s256_code_challenge

from tests.conformance.world import BROWSED, EMAIL, KITTED, PASSWORD, World, run_script

pytestmark = [*KITTED, BROWSED]


def test_the_pages_hold_in_a_browser(world: World) -> None:
    asked = {
        "response_type": "code",
        "client_id": world.client_id,
        "redirect_uri": world.redirect_uri,
        "scope": "openid mcp:call",
        "resource": world.resource,
        "state": "of-the-client",
        "code_challenge": create_s256_code_challenge("v" * 64),
        "code_challenge_method": "S256",
    }
    found = run_script(
        "consent.mjs",
        url=f"{world.issuer}/oauth/authorize?{urlencode(asked)}",
        issuer=world.issuer,
        callbackPort=world.callback_port,
        email=EMAIL,
        password=PASSWORD,
    )
    consent = found["consent"]
    assert consent["heading"] == "Allow access?"
    for said in ("Kit", EMAIL, world.resource, "mcp:call", f"127.0.0.1:{world.callback_port}"):
        assert said in consent["text"]
    assert (consent["scripts"], consent["handlers"]) == (0, 0)
    assert found["injected"] is False and found["forbidden"] > 0
    assert found["rings"] == [True] * 4, "the focus can be seen"
    shared = {"state": "of-the-client", "iss": world.issuer}
    assert found["denied"].items() >= {"error": "access_denied", **shared}.items()
    assert found["allowed"].items() >= shared.items() and found["allowed"]["code"]
    assert found["framed"] == 0
    assert found["forged"] == {"heading": "This request was refused", "came": 0}
    passkey = found["passkey"]
    assert (passkey["rpId"], passkey["resident"]) == ("localhost", True)
    assert passkey["signedOut"] == passkey["unverified"] == passkey["removed"] == "Sign in"
    assert passkey["allowed"].items() >= shared.items() and passkey["allowed"]["code"]
    assert found["withoutScripts"] == "Allow access?"
    assert found["violations"] == []
