"""From a server's 401 to its answer: its authorization server is discovered, knows us by
registration, and a person lets us in, of the caller's own token nothing arrives there."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
import sqlalchemy as sa
from litestar import Litestar
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitRequestParams, ElicitRequestURLParams, ElicitResult
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.tenancy.member_tables import users
from tests.gateway.auth.browsing import ISSUER, live_app, new_browser, sign_in
from tests.gateway.auth.conftest import Clock, Tenant
from tests.gateway.mcp.calling import caller_of, text_of
from tests.gateway.mcp.signing_server import SCOPE, Signing, signing
from tests.mcp_bridge.processes import LegacyClient

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
"""
START = "/oauth/upstream/up/start"
URLS: dict[str, Any] = {"elicitation": {"url": {}}}
SIGN_IN = "tollgate/sign_in"
FIELD = "inputResponses"


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Signing]:
    with signing(getattr(request, "param", "http")) as found:
        yield found


@pytest.fixture
async def app(
    request: pytest.FixtureRequest,
    server: Signing,
    tmp_path: Path,
    postgres_url: str,
    redis_url: str,
    db: AsyncEngine,
    clock: Clock,
    patient: None,
) -> AsyncIterator[Litestar]:
    config = tmp_path / "servers.toml"
    transport = f'transport = "{server.transport}"\n'
    config.write_text(CONFIG.replace("URL", server.mcp_url) + transport)
    near = getattr(request, "param", None)
    """The server's `issuer_hosts`; None: this machine is asked whatever it says."""
    if near is not None:
        config.write_text(f"{config.read_text()}issuer_hosts = {near}\n")
    flags = {"config": config, "egress_to_loopback": near is None}
    async with live_app(tmp_path, postgres_url, redis_url, clock, **flags) as made:  # type: ignore[arg-type]
        yield made


async def let_in(browser: httpx.AsyncClient, location: str) -> httpx.Response:
    """Do what a person's browser does from the issuer's page on."""
    async with httpx.AsyncClient() as outside:
        said = await outside.get(location)
    assert said.status_code == 302, said.text
    assert said.headers["location"].startswith(f"{ISSUER}/oauth/upstream/callback?")
    return await browser.get(said.headers["location"])


async def signed_in_at(browser: httpx.AsyncClient, url: str) -> None:
    sent = await browser.get(url)
    assert sent.status_code == 303, sent.text
    done = await let_in(browser, sent.headers["location"])
    assert done.headers["location"] == "/oauth/account", done.text


def link_on(text: str) -> str:
    """Return where the page leads on to."""
    (found,) = re.findall(r'<a href="(http[^"]*)">', text)
    return html.unescape(found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("server", ["http", "sse"], indirect=True)
async def test_from_a_refusal_to_an_answer(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, server: Signing
) -> None:
    caller = await caller_of(app, ada, ada.user_id)
    refused = (await caller.call())["error"]
    assert refused["data"] == {
        "server": "up",
        "reason": "consent_needed",
        "url": f"{ISSUER}{START}",
    }
    assert refused["data"]["url"] in refused["message"]
    await signed_in_at(signed_in, refused["data"]["url"])
    (client,) = server.provider.clients.values()
    assert client.client_name == "Tollgate" and client.scope == SCOPE
    assert server.provider.resources == {server.mcp_url}
    first = text_of(await caller.call())
    assert server.called == [first] and first in server.provider.alive

    # It refuses that token: one refresh for all who call, and nobody has to do anything.
    server.provider.alive.clear()
    found = {text_of(each) for each in await asyncio.gather(*(caller.call() for _ in range(8)))}
    assert server.provider.refreshed == 1 and found == set(server.provider.alive)
    assert caller.key.encode() not in server.arrived
    await caller.http.aclose()


@pytest.mark.parametrize("app", [["login.internal.example"]], indirect=True)
async def test_what_gives_tokens_lies_where_the_operator_says(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, server: Signing
) -> None:
    """Beside the server that it is for: of that one its own host, which names it."""
    caller = await caller_of(app, ada, ada.user_id)
    refused = (await caller.call())["error"]
    await signed_in_at(signed_in, refused["data"]["url"])
    first = text_of(await caller.call())
    server.provider.alive.clear()
    assert text_of(await caller.call()) != first and server.provider.refreshed == 1
    await caller.http.aclose()


@pytest.mark.parametrize("app", [[]], indirect=True)
async def test_what_gives_tokens_does_not_lie_near_because_its_server_does(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, server: Signing
) -> None:
    caller = await caller_of(app, ada, ada.user_id)
    assert (await caller.call())["error"]["data"]["reason"] == "consent_needed"
    sent = await signed_in.get(START)
    assert sent.status_code == 502 and not server.provider.clients
    await caller.http.aclose()


async def test_clients_that_open_urls_are_asked_to(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, server: Signing
) -> None:
    """A client of either era is asked; and once, lest one goes round and round."""
    caller = await caller_of(app, ada, ada.user_id)
    assert "tools" in (await caller.ask("server/discover"))["result"]["capabilities"]
    asked = (await caller.call(URLS))["result"]
    request = asked["inputRequests"][SIGN_IN]
    assert asked["resultType"] == "input_required" and "requestState" not in asked
    assert request["method"] == "elicitation/create"
    assert request["params"]["mode"] == "url" and request["params"]["url"] == ISSUER + START
    answers = {FIELD: {SIGN_IN: {"action": "accept"}}}
    again = (await caller.call(URLS, **answers))["error"]
    assert again["data"]["reason"] == "consent_needed", "saying so is not signing in"
    await signed_in_at(signed_in, request["params"]["url"])
    assert text_of(await caller.call(URLS, **answers)) in server.provider.alive
    assert SIGN_IN.encode() not in server.arrived, "what we asked is nothing to the server"
    await caller.http.aclose()


async def test_the_official_client_opens_the_url_and_has_its_answer(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, server: Signing
) -> None:
    """One call of it: refused there, asked to sign in, called again."""
    caller = await caller_of(app, ada, ada.user_id)
    opened: list[str] = []

    async def elicit(_context: Any, params: ElicitRequestParams) -> ElicitResult:
        assert isinstance(params, ElicitRequestURLParams)
        opened.append(params.url)
        await signed_in_at(signed_in, params.url)
        return ElicitResult(action="accept")

    transport = httpx2.ASGITransport(app=app)  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {caller.key}"}
    async with httpx2.AsyncClient(transport=transport, headers=headers, timeout=60) as http:
        channel = streamable_http_client(ISSUER + caller.url, http_client=http)
        async with Client(channel, elicitation_callback=elicit) as client:
            found = await client.call_tool("up__whoami", {})
    assert opened == [ISSUER + START] and not found.is_error
    assert [found.content[0].text] == server.called  # type: ignore[union-attr]
    await caller.http.aclose()


async def test_a_client_of_the_older_era_gets_an_error_of_its_own(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, server: Signing
) -> None:
    """It is let in, though the only server that there is wants somebody to sign in first."""
    caller = await caller_of(app, ada, ada.user_id)
    legacy = await LegacyClient.open(caller.http, caller.url, capabilities=URLS)
    asked = {"name": "up__whoami", "arguments": {}}
    refused = (await legacy.ask(caller.url, "tools/call", asked))["error"]
    (wanted,) = refused["data"]["elicitations"]
    assert refused["code"] == -32042 and wanted["url"] == ISSUER + START
    assert wanted["mode"] == "url" and wanted["elicitationId"]
    plain = await LegacyClient.open(caller.http, caller.url, capabilities={})
    refused = (await plain.ask(caller.url, "tools/call", asked))["error"]
    assert refused["code"] != -32042 and refused["data"]["url"] == ISSUER + START
    await signed_in_at(signed_in, wanted["url"])
    assert text_of(await legacy.ask(caller.url, "tools/call", asked, id=2)) in server.called
    await caller.http.aclose()


async def test_for_a_whole_tenant_signs_in_who_administers_it(
    app: Litestar, db: AsyncEngine, signed_in: httpx.AsyncClient, ada: Tenant, server: Signing
) -> None:
    machine = await caller_of(app, ada, None)
    url = (await machine.call())["error"]["data"]["url"]
    assert url == f"{ISSUER}{START}?for=tenant"
    shown = await signed_in.get(url)
    assert shown.status_code == 200 and "for all of acme" in shown.text, "asked before it leaves"
    location = link_on(shown.text)
    is_ada = sa.update(users).where(users.c.id == ada.user_id)

    async def be(role: str) -> None:
        async with db.begin() as conn:
            await conn.execute(is_ada.values(role=role))

    await be("reader")
    assert (await signed_in.get(url)).status_code == 403
    assert (await let_in(signed_in, location)).status_code == 403, "nor is it finished"
    await be("owner")
    location = link_on((await signed_in.get(url)).text)
    assert (await let_in(signed_in, location)).headers["location"] == "/oauth/account"
    assert text_of(await machine.call()) in server.provider.alive
    assert len(server.provider.clients) == 1, "who begins often registers one client"
    await machine.http.aclose()


async def test_who_is_not_signed_in_here_does_so_first_and_goes_on(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant, server: Signing
) -> None:
    for query in ("", "?for=tenant"):
        asked = await browser.get(START + query)
        assert asked.status_code == 303, asked.text
        done = await sign_in(browser, asked.headers["location"], org="acme", email=ada.email)
        assert done.headers["location"] == START + query
        browser.cookies.clear()
    for elsewhere in ("/oauth/login?upstream=//evil.example", "/oauth/login?upstream=up&for=all"):
        assert (await browser.get(elsewhere)).status_code == 400, "what is no request of ours"
    assert (await browser.get("/oauth/upstream/A%3Fb/start")).status_code == 401


async def test_what_we_are_to_issuers_that_read_documents(app: Litestar) -> None:
    async with new_browser(app) as anybody:
        found = await anybody.get("/oauth/upstream/client")
    said = found.json()
    assert said["client_id"] == f"{ISSUER}/oauth/upstream/client"
    assert said["redirect_uris"] == [f"{ISSUER}/oauth/upstream/callback"]
    assert said["token_endpoint_auth_method"] == "none"
