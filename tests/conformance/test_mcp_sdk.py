"""The MCP SDK's OAuth client in front of /mcp/{org}: from a 401 to an answer, by both ways in which
a client that nobody registered by hand becomes known; refresh; step-up."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import httpx2
import pytest
from authlib.common.security import generate_token
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from mcp import Client, MCPError
from mcp.client.auth import OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthToken,
)

from tests.conformance.world import KITTED, World
from tests.stack import ROOT

pytestmark = KITTED
METHOD_NOT_FOUND = -32601


class Storage:
    """The memory of the SDK's client."""

    def __init__(self, client: OAuthClientInformationFull | None = None) -> None:
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


class Agent:
    """The SDK's client with a user who allows what it asks for. `asked`: the requests."""

    def __init__(self, world: World, storage: Storage, **options: Any) -> None:
        self.world = world
        self.storage = storage
        self.asked: list[dict[str, list[str]]] = []
        self._answer = ""
        metadata = {"redirect_uris": [world.redirect_uri], "client_name": "Agent"}
        self.provider = OAuthClientProvider(
            server_url=world.resource,
            client_metadata=OAuthClientMetadata.model_validate(metadata),
            storage=storage,
            redirect_handler=self._redirect,
            callback_handler=self._callback,
            **options,
        )

    async def _redirect(self, url: str) -> None:
        self.asked.append(parse_qs(urlsplit(url).query))
        self._answer = await asyncio.to_thread(self.world.allow, url)

    async def _callback(self) -> AuthorizationCodeResult:
        found = {name: each[0] for name, each in parse_qs(urlsplit(self._answer).query).items()}
        assert found["iss"] == self.world.issuer
        return AuthorizationCodeResult(
            code=found["code"], state=found.get("state"), iss=found.get("iss")
        )

    async def post(self) -> int:
        """The code of the JSON-RPC error with which a message is answered."""
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        async with httpx2.AsyncClient(auth=self.provider) as client:
            answered = await client.post(self.world.resource, json=message)
        code: int = answered.json()["error"]["code"]
        return code


async def test_a_client_that_registers_itself_gets_through(world: World) -> None:
    agent = Agent(world, Storage())
    assert await agent.post() == METHOD_NOT_FOUND
    known = agent.storage.client
    assert known is not None and known.client_id not in (world.client_id, world.secret_id)
    assert agent.asked[0]["resource"] == [world.resource]
    assert "mcp:call" in agent.asked[0]["scope"][0].split()
    assert agent.storage.tokens is not None and agent.storage.tokens.refresh_token is not None


async def test_a_client_that_describes_itself_at_a_url_gets_through(world: World) -> None:
    agent = Agent(world, Storage(), client_metadata_url=world.document_url)
    assert await agent.post() == METHOD_NOT_FOUND
    known = agent.storage.client
    assert known is not None and known.client_id == world.document_url
    assert agent.asked[0]["client_id"] == [world.document_url]
    assert agent.storage.tokens is not None and agent.storage.tokens.refresh_token is not None


async def test_the_whole_client_connects_up_to_the_answer(world: World) -> None:
    agent = Agent(world, Storage())
    async with httpx2.AsyncClient(auth=agent.provider, follow_redirects=True) as http:
        transport = streamable_http_client(world.resource, http_client=http)
        with pytest.RaisesGroup(pytest.RaisesExc(MCPError), flatten_subgroups=True):
            async with Client(transport) as client:
                await client.list_tools()
    assert len(agent.asked) == 1, "one consent for all its requests"


async def test_an_expired_token_is_refreshed_without_the_user(world: World) -> None:
    agent = Agent(world, Storage())
    assert await agent.post() == METHOD_NOT_FOUND
    first = agent.storage.tokens
    agent.provider.context.token_expiry_time = time.time() - 1
    assert await agent.post() == METHOD_NOT_FOUND
    second = agent.storage.tokens
    assert first is not None and second is not None and len(agent.asked) == 1
    assert second.access_token != first.access_token
    assert second.refresh_token != first.refresh_token


async def test_a_scope_that_is_missing_is_asked_for(world: World) -> None:
    """The step-up of RFC 6750's `insufficient_scope`: what was granted is asked for again too."""
    known = {"client_id": world.client_id, "redirect_uris": [world.redirect_uri]}
    known |= {"token_endpoint_auth_method": "none"}
    storage = Storage(OAuthClientInformationFull.model_validate(known))
    storage.tokens = await asyncio.to_thread(narrow_token, world)
    refused = await asyncio.to_thread(world.call, storage.tokens.access_token)
    assert refused.status_code == 403
    assert 'error="insufficient_scope"' in refused.headers["www-authenticate"]
    agent = Agent(world, storage)
    assert await agent.post() == METHOD_NOT_FOUND
    assert {"inference", "mcp:call"} <= set(agent.asked[0]["scope"][0].split())


def narrow_token(world: World) -> OAuthToken:
    """For the right resource, without the scope that it wants."""
    verifier = generate_token(64)
    asked = {
        "response_type": "code",
        "client_id": world.client_id,
        "redirect_uri": world.redirect_uri,
        "scope": "inference",
        "resource": world.resource,
        "code_challenge": create_s256_code_challenge(verifier),
        "code_challenge_method": "S256",
    }
    url = httpx.URL(f"{world.issuer}/oauth/authorize", params=asked)
    code = parse_qs(urlsplit(world.allow(str(url))).query)["code"][0]
    form = {
        "grant_type": "authorization_code",
        "client_id": world.client_id,
        "code": code,
        "redirect_uri": world.redirect_uri,
        "code_verifier": verifier,
    }
    return OAuthToken.model_validate(httpx.post(f"{world.issuer}/oauth/token", data=form).json())


async def test_the_documented_agent_gets_to_the_answer(world: World, tmp_path: Path) -> None:
    """docs/oauth.md, as it stands there; its browser is ours."""
    text = (ROOT / "docs" / "oauth.md").read_text()
    (tmp_path / "agent.py").write_text(text.split("```python\n")[1].split("```")[0])
    run = await asyncio.create_subprocess_exec(
        sys.executable,
        tmp_path / "agent.py",
        world.resource,
        env={**os.environ, "BROWSER": "true %s", "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert run.stdout is not None
    said = ""
    async with asyncio.timeout(30):
        while not (line := (await run.stdout.readline()).decode()).startswith("Sign in at "):
            assert line, said
            said += line
        answer = await asyncio.to_thread(world.allow, line.split()[-1])
        async with httpx.AsyncClient() as browser:
            assert "close this page" in (await browser.get(answer)).text
        rest = (await run.stdout.read()).decode()
        assert await run.wait() == 0, rest
    assert "Method not found" in rest and "Traceback" not in rest, rest
