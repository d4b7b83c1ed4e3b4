"""For clients that have no token: passes everything on, with one.
`python -m tests.mcp_bridge.token_proxy --to URL`; the token is read from TOKEN."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from typing import Any

import httpcore
import uvicorn

HOPS = {b"connection", b"keep-alive", b"transfer-encoding"}


def application(to: str, token: str) -> Any:
    """`Host` and `Origin` stay as they were: they are the gateway's to judge."""
    pool = httpcore.AsyncConnectionPool(max_connections=64)

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            event = await receive()
            body += event.get("body", b"")
            more = event.get("more_body", False)
        headers = [pair for pair in scope["headers"] if pair[0] not in HOPS]
        headers.append((b"authorization", b"Bearer " + token.encode()))
        passing = asyncio.create_task(pass_on(scope["method"], headers, body, send))
        leaving = asyncio.create_task(left(receive))
        await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (passing, leaving):
            task.cancel()
        await asyncio.gather(passing, leaving, return_exceptions=True)

    async def pass_on(method: str, headers: Any, body: bytes, send: Any) -> None:
        async with pool.stream(method, to, headers=headers, content=body) as answer:
            kept = [pair for pair in answer.headers if pair[0].lower() not in HOPS]
            start = {"type": "http.response.start", "status": answer.status, "headers": kept}
            await send(start)
            async for chunk in answer.aiter_stream():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return asgi


async def left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", required=True)
    given = parser.parse_args()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        print(f"listening on {bound.getsockname()[1]}", flush=True)
        app = application(given.to, os.environ["TOKEN"])
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        asyncio.run(uvicorn.Server(config).serve([bound]))


if __name__ == "__main__":
    main()
