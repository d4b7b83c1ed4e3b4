"""The authorization server and its resources before clients, and an issuer, that nobody here wrote.

`make auth-conformance` installs them (npm) and runs this; without them there is nothing to run.
"""

from __future__ import annotations

import asyncio
import base64
import html
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import httpx2
import pytest
from authlib.integrations.httpx_client import OAuth2Client
from mcp.client.auth import OAuthClientProvider
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthToken,
)

from bench.ports import free_port
from gateway import embedded
from gateway.audit.log import COMMAND_LINE
from gateway.auth.client_metadata import from_document
from gateway.auth.clients import SECRET_PEPPER_PURPOSE, create_client
from gateway.auth.passwords import Passwords
from gateway.auth.peppers import Peppers
from gateway.db import create_engine, tenant
from gateway.home import Home
from gateway.secret import Secret
from gateway.tenancy.orgs import find_org
from gateway.tenancy.users import create_user
from tests.stack import ROOT, Stack, running

KIT = ROOT / ".conformance" / "node_modules"
NODE = next(KIT.glob("node-*/bin/node"), KIT / "node")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NODE.exists(), reason="make auth-conformance installs what this needs"),
]
EMAIL, PASSWORD = "ann@example.com", "correct horse battery staple"
HIDDEN = re.compile(r'<input type="hidden" name="(\w+)"[^>]* value="([^"]*)">')
CONFIG = '[[model]]\nname = "b"\nupstream = "http://127.0.0.1:1/v1"\n'
AUDIENCE = "https://tollgate.example/api"


class World:
    """A stack with one user who can sign in, and one public client."""

    def __init__(self, stack: Stack, org_id: str, client_id: str, redirect_uri: str) -> None:
        self.stack = stack
        self.org_id = org_id
        self.client_id = client_id
        self.redirect_uri = redirect_uri

    @property
    def issuer(self) -> str:
        return self.stack.base_url

    @property
    def resource(self) -> str:
        return f"{self.issuer}/mcp/{self.org_id}"

    def allow(self, url: str) -> str:
        """Sign in and consent at `url`; where the browser is sent with the answer."""
        with httpx.Client(base_url=self.issuer) as browser:
            shown = browser.get(url)
            for _ in range(4):
                if shown.is_redirect:
                    location = shown.headers["location"]
                    if not location.startswith(("/", self.issuer)):
                        return location
                    shown = browser.get(location)
                    continue
                form = {name: html.unescape(v) for name, v in HIDDEN.findall(shown.text)}
                if 'name="password"' in shown.text:
                    form |= {"email": EMAIL, "password": PASSWORD}
                    shown = browser.post("/oauth/login", data=form)
                else:
                    shown = browser.post("/oauth/authorize", data=form | {"decision": "allow"})
            if shown.is_redirect:
                return str(shown.headers["location"])
        raise AssertionError(shown.text)

    def call(self, token: str) -> httpx.Response:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        headers = {"authorization": f"Bearer {token}"}
        return httpx.post(self.resource, json=message, headers=headers)


async def populate(stack: Stack, redirect_uri: str) -> World:
    home = Home(stack.home)
    db = create_engine(embedded.postgres_url(home))
    passwords = Passwords()
    try:
        async with db.connect() as conn:
            org = await find_org(conn, name="default")
        hashed = await passwords.hash(PASSWORD)
        async with tenant(db, org.id) as conn:
            await create_user(
                conn,
                org_id=org.id,
                email=EMAIL,
                name="Ann",
                role="owner",
                actor=COMMAND_LINE,
                password_hash=hashed,
            )
            made = await create_client(
                conn,
                Peppers(Secret.load(home.secret), SECRET_PEPPER_PURPOSE),
                metadata=from_document(
                    {
                        "client_name": "Kit",
                        "redirect_uris": [redirect_uri],
                        "grant_types": ["authorization_code", "refresh_token"],
                        "token_endpoint_auth_method": "none",
                    }
                ),
                scopes=["mcp:call", "inference", "offline_access", "openid"],
                actor=COMMAND_LINE,
                org_id=org.id,
            )
        return World(stack, org.id, made.client.id, redirect_uri)
    finally:
        passwords.close()
        await db.dispose()


@pytest.fixture(scope="module")
def callback_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def world(callback_port: int) -> Iterator[World]:
    env = {"TOLLGATE_EGRESS_TO_LOOPBACK": "true"}
    with running(config=CONFIG, env=env) as stack:
        redirect_uri = f"http://127.0.0.1:{callback_port}/callback"
        yield asyncio.run(populate(stack, redirect_uri))


def test_the_conformance_suite_passes(world: World, callback_port: int) -> None:
    suite = KIT / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    command = [NODE, suite, "authorization", "--url", world.issuer, "--client-id", world.client_id]
    command += ["-p", str(callback_port), "--resource", world.resource, "--verbose"]
    output: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if line.startswith(f"{world.issuer}/oauth/authorize?"):
                httpx.get(world.allow(line.strip()))
    said = "".join(output)
    assert run.returncode == 0, said
    assert re.search(r"Total: [1-9][0-9]* passed, 0 failed", said), said


def test_oauth4webapi_gets_tokens_and_new_ones(world: World) -> None:
    # Beside the packages, where Node looks for them.
    script = KIT.parent / "oauth4webapi_client.mjs"
    script.write_text((Path(__file__).parent / script.name).read_text())
    command = [NODE, script, world.issuer, world.client_id, world.redirect_uri, world.resource]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None and run.stdout is not None and run.stderr is not None
        url = run.stdout.readline().strip()
        assert url, run.stderr.read()
        run.stdin.write(world.allow(url) + "\n")
        run.stdin.flush()
        found = run.stdout.read()
        assert run.wait(30) == 0, run.stderr.read()
    got = json.loads(found)
    assert got["rotated"]
    for token in (got["first"], got["second"]):
        assert world.call(token).json()["error"]["code"] == -32601


def test_authlibs_client_gets_tokens_and_new_ones(world: World) -> None:
    metadata = httpx.get(f"{world.issuer}/.well-known/oauth-authorization-server").json()
    verifier = "v" * 64
    client = OAuth2Client(
        world.client_id,
        redirect_uri=world.redirect_uri,
        scope="mcp:call offline_access",
        code_challenge_method="S256",
        token_endpoint_auth_method="none",
    )
    with client:
        url, state = client.create_authorization_url(
            metadata["authorization_endpoint"], code_verifier=verifier, resource=world.resource
        )
        answer = world.allow(url)
        token = client.fetch_token(
            metadata["token_endpoint"],
            authorization_response=answer,
            state=state,
            code_verifier=verifier,
        )
        assert world.call(token["access_token"]).json()["error"]["code"] == -32601
        newer = client.refresh_token(metadata["token_endpoint"], token["refresh_token"])
        assert newer["refresh_token"] != token["refresh_token"]


class Storage:
    """What the SDK's client remembers."""

    def __init__(self, client: OAuthClientInformationFull) -> None:
        self.client = client
        self.tokens: OAuthToken | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


async def test_the_mcp_sdks_client_finds_its_way_from_a_401(world: World) -> None:
    answers: list[str] = []

    async def redirect(url: str) -> None:
        answers.append(await asyncio.to_thread(world.allow, url))

    async def callback() -> AuthorizationCodeResult:
        query = parse_qs(urlsplit(answers[-1]).query)
        found = {name: values[0] for name, values in query.items()}
        return AuthorizationCodeResult(
            code=found["code"], state=found.get("state"), iss=found.get("iss")
        )

    metadata = {"redirect_uris": [world.redirect_uri], "token_endpoint_auth_method": "none"}
    known = OAuthClientInformationFull.model_validate({**metadata, "client_id": world.client_id})
    storage = Storage(known)
    provider = OAuthClientProvider(
        server_url=world.resource,
        client_metadata=OAuthClientMetadata.model_validate(metadata),
        storage=storage,
        redirect_handler=redirect,
        callback_handler=callback,
    )
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    async with httpx2.AsyncClient(auth=provider) as client:
        answered = await client.post(world.resource, json=message)
    assert answered.json()["error"]["code"] == -32601
    assert storage.tokens is not None and len(answers) == 1


@pytest.fixture
async def external(world: World) -> AsyncIterator[str]:
    """oidc-provider, listed by the org; an access token of its."""
    port = free_port()
    script = KIT.parent / "oidc_provider.mjs"
    script.write_text((Path(__file__).parent / script.name).read_text())
    command = [NODE, script, str(port), AUDIENCE, "kit", "kit-secret"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as provider:
        assert provider.stdout is not None
        try:
            for line in provider.stdout:
                if line.strip() == "ready":
                    break
            issuer = f"http://127.0.0.1:{port}"
            form = {"grant_type": "client_credentials", "scope": "call"}
            answered = httpx.post(f"{issuer}/token", data=form, auth=("kit", "kit-secret"))
            yield answered.json()["access_token"]
        finally:
            provider.kill()


async def test_an_independent_provider_is_an_external_issuer(world: World, external: str) -> None:
    assert world.call(external).status_code == 401
    rows = await world.stack.sql("SELECT id FROM projects")
    payload = external.split(".")[1]
    issuer = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["iss"]
    body = {
        "name": "oidc-provider",
        "issuer": issuer,
        "audience": AUDIENCE,
        "project_id": rows[0].id,
        "default_role": "developer",
    }
    headers = {"authorization": f"Bearer {world.stack.credentials['admin_key']}"}
    made = httpx.post(f"{world.issuer}/v1/admin/issuers", json=body, headers=headers)
    assert made.status_code == 201, made.text
    assert world.call(external).json()["error"]["code"] == -32601
    gone = httpx.delete(f"{world.issuer}{made.headers['location']}", headers=headers)
    assert gone.status_code == 200
    await asyncio.sleep(1.0)
    assert world.call(external).status_code == 401
