"""A browser that signs in through an external provider, and an owner who lists one: over HTTP."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import pytest
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.federation.issuers import Rules, create_issuer
from gateway.auth.oauth.clients.store import Client
from gateway.db import tenant
from tests.gateway.auth.browsing import (
    CALLBACK,
    authorize_url,
    hidden,
    new_browser,
    query_of,
)
from tests.gateway.auth.browsing import (
    ISSUER as OURS,
)
from tests.gateway.auth.conftest import ACTOR, Tenant, make_user
from tests.gateway.auth.issuing import ISSUER, NOW, FakeIssuer, FarEnd


@pytest.fixture
def issuer(app: Litestar, monkeypatch: pytest.MonkeyPatch) -> FakeIssuer:
    """The far end of the worker's egress client."""
    far_end, federation = FarEnd(), app.state.services.federation
    monkeypatch.setattr(federation.login._egress, "get", far_end.get)
    monkeypatch.setattr(federation.login._egress, "post_form", far_end.post_form)
    monkeypatch.setattr(federation.login, "_wall_clock", lambda: NOW)
    return FakeIssuer(far_end)


@pytest.fixture
async def listed(app: Litestar, tenant_db: AsyncEngine, ada: Tenant, issuer: FakeIssuer) -> str:
    return await list_issuer(app, tenant_db, ada, "ours")


async def list_issuer(app: Litestar, tenant_db: AsyncEngine, whose: Tenant, client_id: str) -> str:
    rules = Rules(
        name="Example & Sons",
        issuer=ISSUER,
        audience=f"api://{whose.org_name}",
        project_id=whose.project_id,
        default_role="reader",
        client_id=client_id,
    )
    async with tenant(tenant_db, whose.org_id) as conn:
        made = await create_issuer(
            conn,
            app.state.services.federation.secrets,
            org_id=whose.org_id,
            rules=rules,
            actor=ACTOR,
        )
    app.state.services.federation.login._directory._snapshot = None
    return made.id


def asked_of(response: httpx.Response) -> dict[str, str]:
    assert response.status_code == 303, response.text
    return dict(parse_qsl(urlsplit(response.headers["location"]).query))


def answers(issuer: FakeIssuer, asked: dict[str, str], email: str) -> dict[str, str]:
    claims = issuer.claims(
        aud=asked["client_id"], sub=email, nonce=asked["nonce"], email=email, email_verified=True
    )
    issuer.far_end.says(f"{ISSUER}/token", {"id_token": issuer.sign(claims)})
    return {"code": "c", "state": asked["state"], "iss": ISSUER}


async def test_a_user_comes_back_signed_in(
    browser: httpx.AsyncClient, listed: str, issuer: FakeIssuer, ada: Tenant
) -> None:
    asked = asked_of(await browser.get(f"/oauth/external/{listed}/start"))
    assert asked["redirect_uri"] == f"{OURS}/oauth/external/{listed}/callback"
    answer = urlencode(answers(issuer, asked, ada.email))
    done = await browser.get(f"/oauth/external/{listed}/callback?{answer}")
    assert (done.status_code, done.headers["location"]) == (303, "/console")
    shown = await browser.get("/oauth/account")
    assert shown.status_code == 200 and ada.email in shown.text
    again = await browser.get(f"/oauth/external/{listed}/callback?{answer}")
    assert again.status_code == 403, "used before"


async def test_a_clients_request_goes_on_after_it(
    browser: httpx.AsyncClient, listed: str, issuer: FakeIssuer, ada: Tenant, client: Client
) -> None:
    to_login = await browser.get(authorize_url(query_of(client.id)))
    page = await browser.get(to_login.headers["location"])
    assert "Example &amp; Sons" in page.text
    start = page.text.split('class="provider" href="')[1].split('"')[0].replace("&amp;", "&")
    asked = asked_of(await browser.get(start))
    answer = urlencode(answers(issuer, asked, ada.email))
    done = await browser.get(f"/oauth/external/{listed}/callback?{answer}")
    assert done.headers["location"].startswith("/oauth/authorize?")
    consent = await browser.get(done.headers["location"])
    assert consent.status_code == 200 and CALLBACK.partition("/cb")[0] in consent.text


async def test_where_one_organization_alone_has_a_provider_nobody_names_it(
    browser: httpx.AsyncClient, listed: str, issuer: FakeIssuer, ada: Tenant, other: Tenant
) -> None:
    """And who came from a page of the console is back there."""
    asked = await browser.get("/console/keys?state=active")
    page = await browser.get(asked.headers["location"])
    start = page.text.split('class="provider" href="')[1].split('"')[0].replace("&amp;", "&")
    answer = urlencode(answers(issuer, asked_of(await browser.get(start)), ada.email))
    done = await browser.get(f"/oauth/external/{listed}/callback?{answer}")
    assert done.headers["location"] == "/console/keys?state=active"


def links(shown: httpx.Response) -> list[str]:
    assert shown.status_code in (200, 403), shown.text
    parts = shown.text.split('class="provider" href="')[1:]
    return [each.split('"')[0].replace("&amp;", "&") for each in parts]


class Providers:
    """Two organizations with addresses of one domain, and one provider."""

    def __init__(self, browser: httpx.AsyncClient, issuer: FakeIssuer) -> None:
        self.browser, self.issuer = browser, issuer

    async def find(self, email: str) -> str:
        """Return the one address that the login page has for an e-mail address."""
        shown = await self.browser.get("/oauth/login?next=%2Fconsole%2Fkeys")
        form = {**hidden(shown.text), "email": email, "provider": "find"}
        shown = await self.browser.post("/oauth/login", data=form)
        assert "example.com" in shown.text and "Example &amp; Sons" not in shown.text
        [start] = links(shown)
        return start

    async def come_back(self, start: str, email: str) -> httpx.Response:
        asked = asked_of(await self.browser.get(start))
        answer = urlencode(answers(self.issuer, asked, email))
        place = urlsplit(asked["redirect_uri"]).path
        return await self.browser.get(f"{place}?{answer}")


async def test_the_address_that_the_provider_verified_tells_the_organization(
    app: Litestar,
    browser: httpx.AsyncClient,
    listed: str,
    issuer: FakeIssuer,
    ada: Tenant,
    other: Tenant,
    db: AsyncEngine,
    tenant_db: AsyncEngine,
) -> None:
    """Several know its domain. Each lets in who comes through its own client alone."""
    domain = ada.email.partition("@")[2]
    theirs = await list_issuer(app, tenant_db, other, "theirs")
    await make_user(db, other.org_id, f"bo@{domain}", role="reader")
    own = {org: f"/oauth/external/{org}/start?next=%2Fconsole%2Fkeys" for org in (listed, theirs)}
    providers = Providers(browser, issuer)
    start = await providers.find(f"anybody@{domain}")
    for email, org in ((ada.email, listed), (f"bo@{domain}", theirs)):
        done = await providers.come_back(start, email)
        if org not in start:
            assert (done.status_code, done.headers["location"]) == (303, own[org])
            assert (await browser.get("/oauth/account")).status_code == 303, "not signed in"
            done = await providers.come_back(own[org], email)
        assert (done.status_code, done.headers["location"]) == (303, "/console/keys")
        assert email in (await browser.get("/oauth/account")).text
        browser.cookies.clear()
    await make_user(db, ada.org_id, f"bo@{domain}", role="reader")
    several = await providers.come_back(start, f"bo@{domain}")
    assert {ada.org_name, other.org_name} <= set(re.findall(">([^<>]+)</a>", several.text))
    assert set(links(several)) == set(own.values())
    nobody = await providers.come_back(start, f"eve@{domain}")
    assert nobody.status_code == 403 and "Name the organization" in nobody.text
    assert "/oauth/external/" not in nobody.text


async def test_another_browser_cannot_bring_the_answer(
    app: Litestar, browser: httpx.AsyncClient, listed: str, issuer: FakeIssuer, ada: Tenant
) -> None:
    asked = asked_of(await browser.get(f"/oauth/external/{listed}/start"))
    answer = urlencode(answers(issuer, asked, ada.email))
    async with new_browser(app) as other:
        refused = await other.get(f"/oauth/external/{listed}/callback?{answer}")
    assert refused.status_code == 403 and "set-cookie" not in refused.headers


@pytest.mark.parametrize(
    "path",
    ["issuer_unknown/start", "issuer_unknown/callback", "x/start?a%20b c", "x/callback?a=%ff"],
)
async def test_what_makes_no_sense_is_a_page(browser: httpx.AsyncClient, path: str) -> None:
    refused = await browser.get(f"/oauth/external/{path}")
    assert refused.status_code == 403
    assert "frame-ancestors 'none'" in refused.headers["content-security-policy"]


async def test_too_many_parameters_are_a_page(browser: httpx.AsyncClient) -> None:
    refused = await browser.get("/oauth/external/x/callback?" + "&".join(["a=1"] * 100))
    assert refused.status_code == 403
