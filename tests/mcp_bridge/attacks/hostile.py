"""A bridge in this process before servers that attack it, for callers of several tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import redis.asyncio

from mcp_bridge.caller import Caller
from mcp_bridge.server.allowed_origins import AllowedOrigins
from mcp_bridge.server.bridge import Bridge
from mcp_bridge.server.http import HttpEndpoint
from mcp_bridge.upstream.upstream import ServerConfig
from tests.mcp_bridge.test_hostile import KEYS, OK, SSE, Server, whole

PUBLIC_URL = "http://localhost"


class Attacker(Server):
    """Keeps what it is asked, heads and messages. `answer`: of a message, the result; or, as in
    `Server`, the bytes."""

    def __init__(self, answer: Any = None, *, modern: bool = True) -> None:
        super().__init__(answer or self.by_result, modern=modern)
        self.capabilities = {"tools": {}, "resources": {"subscribe": True}, "prompts": {}}
        self.result: Any = {"content": [{"type": "text", "text": "done"}]}
        self.heard: list[tuple[str, Any]] = []

    def by_result(self, server: Server, writer: Any, message: Any) -> bytes:
        return whole({"jsonrpc": "2.0", "id": message.get("id"), "result": self.result})

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        self.heard.append((head, message))
        await super().reply(writer, message, head)


class Client(httpx.AsyncClient):
    def __init__(self, bridge: Bridge, transport: httpx.ASGITransport) -> None:
        super().__init__(transport=transport, base_url=PUBLIC_URL)
        self.bridge = bridge


def caller_of(who: str) -> Caller:
    """`bob`, of `org_bob`; `bob@alice`, of `org_alice`; `bob+app`, through another application;
    `bob#proj_2`, in another project."""
    who, _, project = who.partition("#")
    subject, _, org = who.partition("@")
    subject, _, client = subject.partition("+")
    return Caller(
        org_id="org_" + (org or subject),
        project_id=project or "proj_1",
        subject=subject,
        client=client or "c",
    )


@asynccontextmanager
async def attacked(
    store: redis.asyncio.Redis,
    *servers: Server,
    resolve: Any = None,
    url: str | None = None,
    sampler: Any = None,
    guard: Any = None,
    **fields: Any,
) -> AsyncIterator[Client]:
    """A client of it. `url`: with PORT where the server's stands. One server alone
    keeps its names; several are `s0`, `s1`. `fields`: of their configuration."""
    async with AsyncExitStack() as stack:
        configs = []
        for number, server in enumerate(servers):
            listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
            stack.push_async_callback(listening.wait_closed)
            stack.callback(listening.close)
            port = listening.sockets[0].getsockname()[1]
            configs.append(
                ServerConfig(
                    name=f"s{number}",
                    url=(url or "http://127.0.0.1:PORT/mcp").replace("PORT", str(port)),
                    namespace="identity" if len(servers) == 1 else None,
                    headers={"authorization": "Bearer servers-own"},
                    **fields,
                )
            )
        info = {"name": "t", "version": "1"}
        bridge = Bridge(
            configs, store, KEYS, info=info, resolve=resolve, sampler=sampler, guard=guard
        )
        await bridge.start()
        stack.push_async_callback(bridge.close)
        endpoint, allowed = HttpEndpoint(bridge), AllowedOrigins(public_url=PUBLIC_URL)

        async def asgi(scope: Any, receive: Any, send: Any) -> None:
            headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
            who = caller_of(headers.get("x-caller", b"alice").decode())
            await endpoint.serve(who, None, allowed, (), scope, receive, send)

        transport = httpx.ASGITransport(app=asgi)
        yield await stack.enter_async_context(Client(bridge, transport))


def events(*messages: Any) -> bytes:
    """An answer that is a stream of them, with an end."""
    body = b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in messages)
    return OK + SSE + b"content-length: %d\r\n\r\n" % len(body) + body


def note(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params}


def answer(id: Any, result: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": result or {"content": []}}
