"""A server of 2024-11-05, on the official SDK, behind two workers; and streams that are none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.requests import Request
from starlette.responses import Response

from mcp_bridge.server.bridge import Bridge
from mcp_bridge.upstream.credentials import Credentials, CredentialSet, Refusal, UpstreamOwner
from mcp_bridge.upstream.transport import NotSent, TransportFailed
from mcp_bridge.upstream.transports.factory import Transports
from mcp_bridge.upstream.transports.legacy_sse import endpoint_of
from mcp_bridge.upstream.upstream import ServerConfig
from tests.mcp_bridge.test_hostile import KEYS
from tests.mcp_bridge.upstream.transports.test_channel_owners import Worker

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class TenantsOwn:
    async def of(
        self, owner: UpstreamOwner, server: str, refused: Refusal | None = None
    ) -> CredentialSet:
        return CredentialSet(owner.org_id, {"Authorization": f"Bearer of-{owner.org_id}"})


class Renewing:
    """A source of credentials: what is shown first has run out; what comes then is good, or sends
    for a person."""

    def __init__(self, *, good: bool) -> None:
        self.good, self.shown = good, "old"
        self.refused: list[tuple[str, int, str, bool]] = []

    async def of(
        self, owner: UpstreamOwner, server: str, refused: Refusal | None = None
    ) -> CredentialSet:
        if refused is None:
            return CredentialSet(self.shown, {"Authorization": f"Bearer {self.shown}"})
        name = refused.credential.name
        self.refused.append((name, refused.status, refused.challenge, refused.is_last))
        if refused.is_last:
            raise NotSent("consent_needed", "https://us.example/sign-in")
        name = "new" if self.good else "other"
        self.shown = name if self.good else self.shown
        return CredentialSet(name, {"Authorization": f"Bearer {name}"})


CHALLENGE = 'Bearer error="invalid_token"'


@asynccontextmanager
async def sse_server(seen: list[str], *, takes: str = "") -> AsyncIterator[str]:
    """`takes`: nothing but this token."""
    server = MCPServer("old")

    @server.tool()
    def greet(whom: str) -> str:
        return f"hello {whom}"

    app = server.sse_app()

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            shown = Request(scope).headers.get("authorization")
            seen.append(f"{scope['method']} {shown}")
            if takes and shown != f"Bearer {takes}":
                refusal = Response(status_code=401, headers={"www-authenticate": CHALLENGE})
                await refusal(scope, receive, send)
                return
        await app(scope, receive, send)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        config = uvicorn.Config(
            asgi, log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve([bound]))
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/sse"
        finally:
            running.should_exit = True
            await task


@asynccontextmanager
async def worker(
    url: str, store: redis.asyncio.Redis, credentials: Credentials | None = None
) -> AsyncIterator[Worker]:
    config = ServerConfig(
        name="s", namespace="identity", url=url, transport="sse", credential="tenant"
    )
    transports = Transports(credentials=credentials or TenantsOwn())
    info = {"name": "t", "version": "1"}
    bridge = Bridge([config], store, KEYS, info=info, transports=transports)
    await bridge.start()
    try:
        async with Worker(bridge) as client:
            yield client
    finally:
        await bridge.close()


async def test_one_stream_for_a_tenant_serves_all_workers(redis: redis.asyncio.Redis) -> None:
    seen: list[str] = []
    async with sse_server(seen) as url:
        async with worker(url, redis) as first, worker(url, redis) as second:
            asked = [
                each.tool("greet", caller, whom=caller)
                for each in (first, second)
                for caller in ("alice", "bob", "carol@alice")
                for _ in range(3)
            ]
            found = await asyncio.gather(*asked)
            said = {each["result"]["content"][0]["text"] for each in found}
            assert said == {"hello alice", "hello bob", "hello carol@alice"}
    streams = sorted(each for each in seen if each.startswith("GET"))
    assert streams == ["GET Bearer of-org_alice", "GET Bearer of-org_bob"]
    assert {each.partition(" ")[2] for each in seen} == {
        "Bearer of-org_alice",
        "Bearer of-org_bob",
    }


async def test_a_credential_that_ran_out_is_renewed_at_any_worker(
    redis: redis.asyncio.Redis,
) -> None:
    """Also where another one has the stream that was refused."""
    seen: list[str] = []
    both = Renewing(good=True), Renewing(good=True)
    async with sse_server(seen, takes="new") as url:
        async with worker(url, redis, both[0]) as first, worker(url, redis, both[1]) as second:
            for each, credentials in zip((first, second), both, strict=True):
                found = await each.tool("greet", "alice", whom="alice")
                assert found["result"]["content"][0]["text"] == "hello alice", found
                ((name, status, _, is_last),) = credentials.refused
                assert (name, status, is_last) == ("old", 401, False)
        assert both[0].refused[0][2] == CHALLENGE
    assert [each for each in seen if each == "GET Bearer new"] == ["GET Bearer new"]


async def test_who_is_refused_for_good_is_told_where_to_sign_in(
    redis: redis.asyncio.Redis,
) -> None:
    seen: list[str] = []
    credentials = Renewing(good=False)
    async with sse_server(seen, takes="new") as url, worker(url, redis, credentials) as only:
        for _ in range(5):  # it is no failure of the server, which is asked each time
            found = await only.tool("greet", "alice", whom="alice")
            assert found["error"]["data"]["reason"] == "consent_needed", found
            assert found["error"]["data"]["url"] == "https://us.example/sign-in"
    assert ("other", 401, CHALLENGE, True) in credentials.refused
    assert set(seen) == {"GET Bearer old", "GET Bearer other"}


@pytest.mark.parametrize(
    "said",
    [
        b"http://169.254.169.254/messages",
        b"//evil.example.com/messages",
        b"https://h.example/messages",
        b"http://h.example:81/messages",
        b"http://u@h.example/messages",
        b"/a b",
        b"\xff",
        b"/" + b"x" * 5000,
    ],
)
def test_messages_are_posted_where_the_stream_is_from(said: bytes) -> None:
    with pytest.raises(TransportFailed, match="bad_endpoint"):
        endpoint_of("http://h.example/sse", said)
    assert endpoint_of("http://h.example/sse", b"/m?s=1") == "http://h.example/m?s=1"
