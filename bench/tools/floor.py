"""Measure what an answer costs at the least here: a passthrough without keys, limits, spool or
metering.

`python -m bench.tools.floor PORT MODEL=UPSTREAM_URL... [--litestar]`: each POST goes to its model's
upstream as it came, and the answer comes back as it is read. On the gateway's own server, event
loop and HTTP client, as bare ASGI or as the one route of a bare Litestar application. What the
gateway costs beyond that is its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import uvicorn
from litestar import Litestar, Request, post
from litestar.types import ASGIApp, Receive, Scope, Send

from foundation.http1 import Pool
from gateway.app.connection import ClientConnection
from gateway.fleet.upstream.replica import (
    CHAT_PATH,
    IDLE_S,
    MAX_CONNECTIONS,
    MAX_IDLE_CONNECTIONS,
    begun_head,
    request_headers,
    url_of,
)

TIMEOUT_S = 60.0
PATH = "/v1/chat/completions"
PASSED_ON = (b"content-type", b"content-length")


Pools = Mapping[bytes, tuple[Pool, bytes]]
"""By the model's name, in quotes: the connections, and what each request begins with."""


def of_model(pools: Pools, body: bytes) -> tuple[Pool, bytes]:
    """As cheaply as can be: this is a floor, not a parser. Of no model: the first."""
    named = (pool for name, pool in pools.items() if name in body)
    return next(named, next(iter(pools.values())))


class Passthrough:
    """An ASGI application for one answer."""

    def __init__(self, pools: Pools, body: bytes) -> None:
        (self._pool, self._head), self._body = of_model(pools, body), body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = self._pool.take_idle() or await self._pool.connect()
        try:
            length = len(self._body)
            connection.send(b"%b%d\r\n\r\n%b" % (self._head, length, self._body))
            status, headers = await connection.head(TIMEOUT_S)
            passed_on = [each for each in headers if each[0] in PASSED_ON]
            await send({"type": "http.response.start", "status": status, "headers": passed_on})
            while data := await connection.read(TIMEOUT_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._pool.release(connection)


def bare(pools: Pools) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message: Any = await receive()
            body += message["body"]
            more = message["more_body"]
        await Passthrough(pools, body)(scope, receive, send)

    return app


def on_litestar(pools: Pools) -> ASGIApp:
    @post(PATH, status_code=200)
    async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
        return Passthrough(pools, await request.body())

    return Litestar([chat_completions], openapi_config=None, logging_config=None)


def asked(url: str) -> tuple[Pool, bytes]:
    pool = Pool(url, max_connections=MAX_CONNECTIONS, max_idle=MAX_IDLE_CONNECTIONS, idle_s=IDLE_S)
    return pool, begun_head(url_of(url, CHAT_PATH), request_headers(url, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("port", type=int)
    parser.add_argument("upstreams", nargs="+", help="MODEL=URL, /v1 included")
    parser.add_argument("--litestar", action="store_true", help="as a route, not as bare ASGI")
    options = parser.parse_args()
    pools = {
        f'"{model}"'.encode(): asked(url)
        for model, _, url in (each.partition("=") for each in options.upstreams)
    }
    uvicorn.run(
        on_litestar(pools) if options.litestar else bare(pools),
        host="127.0.0.1",
        port=options.port,
        loop="uvloop",
        http=ClientConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )


if __name__ == "__main__":
    main()
