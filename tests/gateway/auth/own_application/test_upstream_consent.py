"""A person lets us in at an MCP server, in the browser that they are signed in with here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import pytest
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.mcp.service.service import configured
from mcp_bridge.upstream.credentials import UpstreamOwner
from tests.gateway.auth.browsing import live_app, new_browser, sign_in
from tests.gateway.auth.conftest import Clock, Tenant
from tests.gateway.vault.token_server import TokenServer, running

CONFIG = """
[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"

[[mcp.servers]]
name = "github"
url = "http://127.0.0.1:1/mcp"
credential = "user"

[mcp.servers.oauth]
authorization_endpoint = "SERVER/authorize"
token_endpoint = "SERVER/token"
client_id = "us"
issuer = "SERVER"

[[mcp.servers]]
name = "static"
url = "http://127.0.0.1:1/mcp"
credential = "tenant"
"""
START = "/oauth/upstream/github/start"
CALLBACK = "/oauth/upstream/callback"


@pytest.fixture
async def server() -> AsyncIterator[TokenServer]:
    async with running() as found:
        yield found


@pytest.fixture
async def app(
    server: TokenServer,
    tmp_path: Path,
    postgres_url: str,
    redis_url: str,
    db: AsyncEngine,
    clock: Clock,
    patient: None,
) -> AsyncIterator[Litestar]:
    config = tmp_path / "servers.toml"
    config.write_text(CONFIG.replace("SERVER", server.url))
    flags = {"config": config, "egress_to_loopback": True}
    async with live_app(tmp_path, postgres_url, redis_url, clock, **flags) as made:  # type: ignore[arg-type]
        yield made


async def consented(signed_in: httpx.AsyncClient, server: TokenServer) -> dict[str, str]:
    """Consent, and return what a browser brings back."""
    sent = await signed_in.get(START)
    assert sent.status_code == 303, sent.text
    return server.consent(sent.headers["location"])


async def shown(app: Litestar, ada: Tenant, user_id: str) -> dict[str, str]:
    vault = configured(app.state.services.mcp).vault
    return dict((await vault.shown.of(UpstreamOwner(ada.org_id, user_id), "github")).values)


async def test_a_person_lets_us_in_and_a_server_is_shown_it(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, server: TokenServer
) -> None:
    brought = await consented(signed_in, server)
    done = await signed_in.get(f"{CALLBACK}?{urlencode({**brought, 'iss': server.url})}")
    assert done.headers["location"] == "/oauth/account"
    kept = await shown(app, ada, ada.user_id)
    assert set(kept) == {"authorization"} and kept["authorization"].startswith("Bearer ")
    assert await shown(app, ada, "user_another") == {}
    again = await signed_in.get(f"{CALLBACK}?{urlencode(brought)}")
    assert again.status_code == 403, "a code is good once"


async def test_what_another_browser_or_issuer_brings_is_not_taken(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, server: TokenServer
) -> None:
    brought = await consented(signed_in, server)
    query = urlencode(brought)
    async with new_browser(app) as stranger:
        asked = await stranger.get(START)
        assert asked.headers["location"] == "/oauth/login?upstream=github", "who are they?"
        assert (await stranger.get(f"{CALLBACK}?{query}")).status_code == 401
        await sign_in(stranger, "/oauth/login", org="acme", email=ada.email)
        assert (await stranger.get(f"{CALLBACK}?{query}")).status_code == 403, "another browser"
    for wrong in (
        f"{query}&iss=https://evil.example",
        f"{query}&state=twice",
        urlencode({**brought, "state": "none.of-ours"}),
        urlencode({"state": brought["state"], "error": "access_denied"}),
        "",
    ):
        assert (await signed_in.get(f"{CALLBACK}?{wrong}")).status_code == 403, wrong
    assert server.asked == [], "no code went anywhere"
    static = await signed_in.get("/oauth/upstream/static/start")
    assert static.status_code == 502, "nobody is there to say who gives tokens"
    assert (await signed_in.get("/oauth/upstream/nothing/start")).status_code == 404


async def test_where_the_browser_is_sent(signed_in: httpx.AsyncClient, server: TokenServer) -> None:
    location = urlsplit((await signed_in.get(START)).headers["location"])
    asked = dict(parse_qsl(location.query))
    assert f"{location.scheme}://{location.netloc}" == server.url
    assert asked["redirect_uri"].endswith(CALLBACK) and asked["code_challenge_method"] == "S256"
