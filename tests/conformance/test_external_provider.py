"""oidc-provider, which nobody here wrote, as an external issuer: its access tokens, and logins
through its pages in a real browser."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from authlib.oauth2.rfc7636 import create_s256_code_challenge

from bench.tools.ports import free_port
from gateway.audit.log import COMMAND_LINE
from gateway.auth.federation.issuers import CIPHER_PURPOSE, Rules, create_issuer
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.secret import Cipher, Secret
from gateway.tenancy.members.users import create_user
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from tests.conformance.world import (
    BROWSED,
    EMAIL,
    KITTED,
    NODE,
    PASSWORD,
    World,
    kit_script,
    run_script,
)

pytestmark = KITTED
AUDIENCE = "https://tollgate.example/api"
NEW_EMAIL = "carl@example.com"
FIELDS = re.compile(r'<input type="hidden" name="(\w+)"[^>]* value="([^"]*)"')
ACCOUNTS = {
    "ann": {"email": EMAIL, "email_verified": True, "name": "Ann"},
    "bob": {"email": EMAIL, "email_verified": False, "name": "Bob"},
    "carl": {"email": NEW_EMAIL, "email_verified": True, "name": "Carl"},
}


@contextmanager
def provider(port: int, **given: Any) -> Iterator[None]:
    said = {"port": port, "audience": AUDIENCE, "clientId": "kit", "clientSecret": "kit-secret"}
    command = [NODE, kit_script("oidc_provider.mjs"), json.dumps(said | given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert any(line.strip() == "ready" for line in process.stdout)
            yield
        finally:
            process.kill()


@contextmanager
def listed(world: World, issuer: str, **more: Any) -> Iterator[dict[str, Any]]:
    """By the org, for as long as this lasts."""
    rows = asyncio.run(world.stack.sql("SELECT id FROM projects"))
    body = {"name": "oidc-provider", "issuer": issuer, "audience": AUDIENCE}
    body |= {"project_id": rows[0].id, "default_role": "developer"}
    made = world.administer("POST", "/v1/admin/issuers", json=body | more)
    assert made.status_code == 201, made.text
    yield made.json()
    assert world.administer("DELETE", made.headers["location"]).status_code == 200


def test_its_tokens_are_let_in_while_it_is_listed(world: World) -> None:
    port = free_port()
    issuer = f"http://127.0.0.1:{port}"
    with provider(port):
        form = {"grant_type": "client_credentials", "scope": "call"}
        answered = httpx.post(f"{issuer}/token", data=form, auth=("kit", "kit-secret"))
        token = answered.json()["access_token"]
        payload = token.split(".")[1]
        said = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        assert said["iss"] == issuer
        assert world.call(token).status_code == 401
        with listed(world, issuer):
            assert world.call(token).json()["error"]["code"] == -32601
        world.stack.wait("withdrawn", lambda: world.call(token).status_code == 401, timeout_s=30)


def test_an_address_finds_it_among_the_providers_of_several_organizations(world: World) -> None:
    """Nobody names an organization, from the login page to the console; forms are sent as a browser
    without scripts sends them."""
    port = free_port()
    issuer = f"http://127.0.0.1:{port}"
    asyncio.run(list_for_another(world))
    login = {"client_id": "kit-login", "client_secret": "kit-secret"}
    with (
        listed(world, issuer, **login) as made,
        provider(port, redirectUri=made["redirect_uri"], accounts=ACCOUNTS),
        httpx.Client(base_url=world.issuer, follow_redirects=True) as browser,
    ):
        shown = wait_for_button(world, browser)
        assert "/oauth/external/" not in shown
        asked = {**fields(shown), "email": EMAIL, "provider": "find"}
        found = browser.post("/oauth/login", data=asked).text
        [start] = re.findall(r'href="(/oauth/external/[^"]+)"', found)
        assert made["id"] in start
        at_provider = browser.get(html.unescape(start))
        while at_provider.url.port == port:
            action = re.search(r'action="([^"]+)"', at_provider.text)
            assert action is not None, (at_provider.url, at_provider.text)
            sent = fields(at_provider.text) | {"login": "ann", "password": "anything"}
            at_provider = browser.post(action[1], data=sent)
        assert at_provider.url.path.startswith("/console"), at_provider.text
        assert EMAIL in browser.get("/oauth/account").text


def fields(text: str) -> dict[str, str]:
    return {name: html.unescape(value) for name, value in FIELDS.findall(text)}


def wait_for_button(world: World, browser: httpx.Client) -> str:
    """Return the login page once its worker knows of the other organization's provider."""
    found: list[str] = []

    def has_button() -> bool:
        found.append(browser.get("/oauth/login").text)
        return 'name="provider"' in found[-1]

    world.stack.wait("the other provider", has_button, timeout_s=60)
    return found[-1]


async def list_for_another(world: World) -> None:
    """Another organization with a user and a provider of its own."""
    db = create_engine(embedded.postgres_url(Home(world.stack.home)))
    async with db.begin() as conn:
        org = await create_org(conn, name="another", actor=COMMAND_LINE)
        project = await create_project(conn, org_id=org.id, name="p", actor=COMMAND_LINE)
        await create_user(
            conn, org_id=org.id, email="bo@another.example", name="Bo", role="owner",
            actor=COMMAND_LINE,
        )  # fmt: skip
        rules = Rules(
            name="theirs", issuer="https://login.another.example", audience="api://x",
            project_id=project.id, client_id="x", default_role="reader",
        )  # fmt: skip
        cipher = Cipher(Secret.load(Home(world.stack.home).secret), CIPHER_PURPOSE)
        await create_issuer(conn, cipher, org_id=org.id, rules=rules, actor=COMMAND_LINE)
    await db.dispose()


@BROWSED
def test_people_sign_in_through_it(world: World) -> None:
    port = free_port()
    issuer = f"http://127.0.0.1:{port}"
    login = {"client_id": "kit-login", "client_secret": "kit-secret", "provisions_users": True}
    verifier = "v" * 64
    asked = {
        "response_type": "code",
        "client_id": world.client_id,
        "redirect_uri": world.redirect_uri,
        "scope": "openid mcp:call",
        "resource": world.resource,
        "state": "of-the-client",
        "code_challenge": create_s256_code_challenge(verifier),
        "code_challenge_method": "S256",
    }
    with (
        listed(world, issuer, **login) as made,
        provider(port, redirectUri=made["redirect_uri"], accounts=ACCOUNTS),
    ):
        found = run_script(
            "provider_login.mjs",
            url=str(httpx.URL(f"{world.issuer}/oauth/authorize", params=asked)),
            issuer=world.issuer,
            provider=issuer,
            callbackPort=world.callback_port,
            email=EMAIL,
            password=PASSWORD,
        )
    assert found["asked"]["redirect_uri"] == made["redirect_uri"]
    assert found["asked"]["code_challenge_method"] == "S256" and found["asked"]["nonce"]
    assert found["consentOf"].startswith(EMAIL) and found["violations"] == []
    assert (found["answer"]["state"], found["answer"]["iss"]) == ("of-the-client", world.issuer)
    refused = "This request was refused"
    assert found["seen"] == {
        "account": "Your account",
        "signedOut": "Signed out",
        "afterwards": "Sign in",
        "byPassword": "Allow access?",
        "carl": "Allow access?",
        **dict.fromkeys(["replayed", "replayedElsewhere", "injected", "bob"], refused),
        **dict.fromkeys(["mixedUp", "withoutIss", "otherCode"], refused),
    }
    form = {
        "grant_type": "authorization_code",
        "client_id": world.client_id,
        "code": found["answer"]["code"],
        "redirect_uri": world.redirect_uri,
        "code_verifier": verifier,
    }
    tokens = httpx.post(f"{world.issuer}/oauth/token", data=form).json()
    assert world.call(tokens["access_token"]).json()["error"]["code"] == -32601
    told = httpx.get(
        f"{world.issuer}/oauth/userinfo",
        headers={"authorization": f"Bearer {tokens['access_token']}"},
    )
    assert told.json()["sub"] == world.user_id, "linked to who was there"
    users = asyncio.run(world.stack.sql("SELECT email, role FROM users"))
    assert {(each.email, each.role) for each in users} >= {(NEW_EMAIL, "developer")}
