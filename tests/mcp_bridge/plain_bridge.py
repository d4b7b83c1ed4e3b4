"""The bridge alone, as a process: `python -m tests.mcp_bridge.plain_bridge --redis R --server URL`.
It takes everybody for the same caller, or whom `x-caller` names."""

from __future__ import annotations

import argparse
import asyncio
import socket
from typing import Any

import uvicorn
from redis.asyncio import Redis

from mcp_bridge.caller import Caller
from mcp_bridge.server.allowed_origins import AllowedOrigins
from mcp_bridge.server.bridge import Bridge
from mcp_bridge.server.http import HttpEndpoint
from mcp_bridge.upstream.upstream import ServerConfig

KEYS = [b"k" * 32]
INFO = {"name": "tollgate", "version": "0"}


def application(redis_url: str, servers: list[str]) -> Any:
    configs = [
        ServerConfig(
            name=f"server-{number}", url=url, namespace="identity" if len(servers) == 1 else None
        )
        for number, url in enumerate(servers, 1)
    ]
    found: dict[str, Any] = {}
    allowed = AllowedOrigins(public_url="http://localhost")

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            redis = Redis.from_url(redis_url)
            found["bridge"] = Bridge(configs, redis, KEYS, info=INFO)
            await found["bridge"].start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await found["bridge"].close()
            await redis.aclose()
            await send({"type": "lifespan.shutdown.complete"})
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        who = headers.get("x-caller", "alice")
        caller = Caller(org_id="org_" + who, project_id="proj_1", subject=who, client="c")
        endpoint = HttpEndpoint(found["bridge"])
        await endpoint.serve(caller, None, allowed, (), scope, receive, send)

    return asgi


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--server", action="append", required=True)
    given = parser.parse_args()
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # asyncio's own loop does not ask for it, as uvloop does: each answer's body waited 40 ms.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(("127.0.0.1", given.port))
        bound.listen()
        print(f"listening on {bound.getsockname()[1]}", flush=True)
        app = application(given.redis, given.server)
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        asyncio.run(uvicorn.Server(config).serve([bound]))


if __name__ == "__main__":
    main()
