"""A server whose issuer takes our word for who calls: from a call with an API key to a token for
its user, at a live token endpoint that verifies what we sign by our JWKS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import KeySet
from litestar import Litestar
from mcp.server.auth.provider import AccessToken
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.settings.file import SettingsError
from gateway.settings.load import load
from tests.gateway.auth.browsing import ISSUER, live_app, new_browser
from tests.gateway.auth.conftest import Clock, Tenant, acme, clock
from tests.gateway.mcp.calling import caller_of, text_of
from tests.gateway.mcp.signing_server import SCOPE, Signing, signing
from tests.gateway.vault.token_server import TokenServer, running

__all__ = ["acme", "clock"]

AUDIENCE = "https://as.example"
GRANT = "urn:ietf:params:oauth:grant-type:token-exchange"
CONFIG = """
[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"

[[mcp.servers]]
name = "up"
url = "URL"
network = "loopback"
credential = "user"
trust = "all"

[mcp.servers.oauth]
grant = "token_exchange"
client_id = "us"
token_endpoint = "TOKENS/token"
issuer = "https://as.example"
scope = "use"
resource = "URL"
"""


class Exchanging(TokenServer):
    """Gives a token that `server` takes for a JWT that `keys` verify."""

    def __init__(self, server: Signing) -> None:
        super().__init__()
        self.server, self.keys = server, KeySet([])
        self.claims: list[dict[str, Any]] = []

    def say(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        assert form["grant_type"] == GRANT and form["client_id"] == "us"
        assert (form["resource"], form["scope"]) == (self.server.mcp_url, SCOPE)
        claims = jwt.decode(form["subject_token"], self.keys, algorithms=["RS256"]).claims
        self.claims.append(claims)
        status, said = super().say(form)
        token = said["access_token"]
        self.server.provider.alive[token] = AccessToken(
            token=token, client_id="us", scopes=[SCOPE], resource=form["resource"]
        )
        return status, said


@pytest.fixture
def server() -> Iterator[Signing]:
    with signing() as found:
        yield found


@pytest.fixture
async def issuer(server: Signing) -> AsyncIterator[Exchanging]:
    made = Exchanging(server)
    async with running(made):
        yield made


@pytest.fixture
async def app(
    server: Signing,
    issuer: Exchanging,
    tmp_path: Path,
    postgres_url: str,
    redis_url: str,
    db: AsyncEngine,
    clock: Clock,
    patient: None,
) -> AsyncIterator[Litestar]:
    config = tmp_path / "servers.toml"
    config.write_text(CONFIG.replace("URL", server.mcp_url).replace("TOKENS", issuer.url))
    flags = {"config": config, "egress_to_loopback": True}
    async with live_app(tmp_path, postgres_url, redis_url, clock, **flags) as made:  # type: ignore[arg-type]
        async with new_browser(made) as anybody:
            issuer.keys = KeySet.import_key_set((await anybody.get("/oauth/jwks.json")).json())
        yield made


async def test_our_word_for_who_calls_is_a_token_there(
    app: Litestar, acme: Tenant, server: Signing, issuer: Exchanging
) -> None:
    caller = await caller_of(app, acme, acme.user_id)
    found = {text_of(each) for each in await asyncio.gather(*(caller.call() for _ in range(4)))}
    assert found == set(server.provider.alive) and len(issuer.claims) == 1, "one for all who call"
    (claims,) = issuer.claims
    assert (claims["iss"], claims["aud"]) == (ISSUER, AUDIENCE)
    assert (claims["sub"], claims["email"]) == (acme.user_id, acme.email)
    assert claims["org_id"] == acme.org_id and 0 < claims["exp"] - time.time() <= 60

    # The server wants another one: one more is asked for, and the call is made after all.
    server.provider.alive.clear()
    assert text_of(await caller.call()) in server.provider.alive
    assert len(issuer.claims) == 2 and issuer.claims[0]["jti"] != issuer.claims[1]["jti"]
    key = caller.key.encode()
    assert key not in server.arrived and all(key not in each.raw for each in issuer.asked)
    assertions = [each.form["subject_token"].encode() for each in issuer.asked]
    assert all(each not in server.arrived for each in assertions), "what we sign is its issuer's"

    # It takes our word no more: nobody is sent anywhere, for nobody signs in there.
    server.provider.alive.clear()
    issuer.answer = 400, {"error": "invalid_grant"}
    refused = (await caller.call())["error"]
    assert refused["data"] == {"server": "up", "reason": "consent_needed"}
    await caller.http.aclose()


async def test_who_is_no_user_is_vouched_for_to_nobody(
    app: Litestar, acme: Tenant, server: Signing, issuer: Exchanging
) -> None:
    machine = await caller_of(app, acme, None)
    refused = (await machine.call())["error"]
    assert refused["data"] == {"server": "up", "reason": "consent_needed"}
    assert issuer.asked == [] and server.called == []
    await machine.http.aclose()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('credential = "user"', 'credential = "tenant"', "oauth.grant: is for credential"),
        ('token_endpoint = "TOKENS/token"', "", "oauth.token_endpoint: where tokens"),
        ("TOKENS", "http://as.example", "oauth.token_endpoint: "),
        ('scope = "use"', 'authorization_endpoint = "https://a.example"', "nobody is sent there"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    path = tmp_path / "tollgate.toml"
    text = CONFIG.replace("URL", "https://up.example/mcp").replace(before, after)
    path.write_text(text.replace("TOKENS", "https://as.example"))
    with pytest.raises(SettingsError, match=said):
        load({"home": tmp_path, "config": path}, {})
