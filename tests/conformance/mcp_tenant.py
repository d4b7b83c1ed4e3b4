"""A tenant with a vault before one server, and a person of it who signs in there.

The tenant's person has a browser that follows where it is sent, once.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import msgspec
import uvicorn
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.db import ROLE_TENANT, create_engine, tenant
from gateway.mcp.credentials import Challenges, VaultCredentials
from gateway.net.egress import Egress
from gateway.secret import Cipher
from gateway.vault.credentials import open_credential
from gateway.vault.discovery import Discovery
from gateway.vault.envelope import Vault
from gateway.vault.issuer_egress import IssuerEgress
from gateway.vault.oauth import STATE_PURPOSE, Consents, UpstreamTokens
from gateway.vault.registration import KnownClient, OwnMetadata, Registration
from gateway.vault.sign_in import SignIn
from gateway.vault.token_endpoint import TokenEndpoint, UpstreamClient
from mcp_bridge.caller import Caller
from mcp_bridge.server.allowed_origins import AllowedOrigins
from mcp_bridge.server.bridge import Bridge
from mcp_bridge.server.http import HttpEndpoint
from mcp_bridge.upstream.credentials import UpstreamOwner
from mcp_bridge.upstream.transports.factory import Transports
from mcp_bridge.upstream.upstream import ServerConfig
from tests.gateway.a_secret import a_secret

INFO = {"name": "tollgate", "version": "0"}
DOCUMENT_URL = "https://conformance-test.local/client-metadata.json"
"""The suite expects the metadata document of its clients at this URL."""
REDIRECT_URI = "https://gateway.example/callback"
BROWSER = "cookie"
NUMBERS = itertools.count(1)


class Lent(msgspec.Struct, frozen=True, kw_only=True):
    redis_url: str
    postgres_url: str
    org_id: str
    user_id: str


class Tenant:
    """`url`: of the bridge. `known`: what an operator registered at the server's issuer."""

    def __init__(
        self, lent: Lent, config: ServerConfig, db: AsyncEngine, redis: Redis, egress: Egress
    ) -> None:
        self.url = ""
        self.known: KnownClient | None = None
        self._lent, self._config, self._db = lent, config, db
        self._whose = UpstreamOwner(lent.org_id)
        self._vault = Vault(a_secret("one"))
        self._challenges = Challenges(redis)
        endpoint = TokenEndpoint(IssuerEgress(egress))
        self.tokens = UpstreamTokens(db=db, vault=self._vault, endpoint=endpoint)
        self.credentials = VaultCredentials(
            db=db, vault=self._vault, tokens=self.tokens, challenges=self._challenges
        )
        states = Cipher(a_secret("one"), STATE_PURPOSE)
        self._consents = Consents(
            db=db,
            vault=self._vault,
            endpoint=endpoint,
            states=states,
            redirect_uri=REDIRECT_URI,
        )
        ourselves = OwnMetadata(redirect_uri=REDIRECT_URI, document_url=DOCUMENT_URL)
        discovery = Discovery(IssuerEgress(egress))
        self._sign_in = SignIn(
            discovery, Registration(IssuerEgress(egress), ourselves), self._consents
        )

    async def sign_in(self) -> None:
        lent, name = self._lent, self._config.name
        url = await self._sign_in.start(
            upstream=name,
            url=self._config.url,
            challenge=await self._challenges.get(self._whose, name),
            org_id=lent.org_id,
            user_id=None,
            began=lent.user_id,
            browser=BROWSER,
            known=self.known,
            before=await self._before(),
        )
        async with httpx.AsyncClient() as browser:
            sent_back = (await browser.get(url)).headers["location"]
        answer = dict(parse_qsl(urlsplit(sent_back).query))
        consent = self._consents.read(
            answer["state"], org_id=lent.org_id, began=lent.user_id, browser=BROWSER
        )
        await self._consents.finish(consent, None, answer, COMMAND_LINE)

    async def _before(self) -> UpstreamClient | None:
        async with tenant(self._db, self._lent.org_id) as conn:
            found = await open_credential(
                conn,
                self._vault,
                org_id=self._lent.org_id,
                upstream=self._config.name,
                user_id=None,
            )
        return None if found is None else UpstreamClient.from_values(found.values)


@asynccontextmanager
async def tenant_of(lent: Lent, server: str, context: dict[str, Any]) -> AsyncIterator[Tenant]:
    config = ServerConfig(
        name=f"s{next(NUMBERS)}", url=server, namespace="identity", trust="all", credential="tenant"
    )
    async with AsyncExitStack() as stack:
        db = create_engine(lent.postgres_url, role=ROLE_TENANT)
        stack.push_async_callback(db.dispose)
        redis = Redis.from_url(lent.redis_url)
        stack.push_async_callback(redis.aclose)
        egress = Egress(allow_loopback=True)
        stack.callback(egress.close)
        made = Tenant(lent, config, db, redis, egress)
        stack.push_async_callback(made.tokens.close)
        if "client_id" in context:
            made.known = msgspec.convert(context, KnownClient)
        transports = Transports(credentials=made.credentials)
        bridge = Bridge([config], redis, [b"k" * 32], info=INFO, transports=transports)
        await bridge.start()
        stack.push_async_callback(bridge.close)
        made.url = await stack.enter_async_context(door(bridge, lent))
        yield made


@asynccontextmanager
async def door(bridge: Bridge, lent: Lent) -> AsyncIterator[str]:
    allowed = AllowedOrigins(public_url="http://localhost")
    opened = HttpEndpoint(bridge)

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        who = Caller(org_id=lent.org_id, project_id="p", subject=lent.user_id, client="c")
        await opened.serve(who, None, allowed, (), scope, receive, send)

    with socket.socket() as bound:
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        config = uvicorn.Config(asgi, log_level="warning", access_log=False, lifespan="off")
        serving = uvicorn.Server(config)
        task = asyncio.create_task(serving.serve([bound]))
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/mcp"
        finally:
            serving.should_exit = True
            await task
