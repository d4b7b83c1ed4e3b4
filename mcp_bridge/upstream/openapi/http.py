"""Sends the requests that are made of calls: an HttpClient on a bounded pool.

Redirects are not followed, no content coding is asked for or taken, and an answer has a size and a
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpcore

from mcp_bridge.upstream.http1 import Pool, Response
from mcp_bridge.upstream.openapi.calls import HttpAnswer, HttpRequest
from mcp_bridge.upstream.openapi.errors import HttpFailed
from mcp_bridge.upstream.redaction import without
from mcp_bridge.upstream.upstream import CONNECT_TIMEOUT_S, PLACE_TIMEOUT_S, WRITE_TIMEOUT_S

READ_TIMEOUT_S = 120.0
"""Between two pieces of an answer."""
ANSWER_TIMEOUT_S = 300.0
"""From the request to the end of its answer."""
FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.UnsupportedProtocol,
)
WITHOUT_BODY = frozenset(("GET", "HEAD", "OPTIONS", "DELETE"))
"""Of those a length is said only where there is something (RFC 9110, 8.6)."""


class PoolClient:
    """A client for one request.

    `status` and `headers` are those of its answer, as they came; what is `hidden` is no part of its
    body. `on_sent`: it is about to be written.
    """

    def __init__(
        self, pool: Pool, hidden: Sequence[bytes] = (), on_sent: Callable[[], None] = lambda: None
    ) -> None:
        self._pool, self._hidden, self._on_sent = pool, hidden, on_sent
        self.status = 0
        self.headers: Sequence[tuple[bytes, bytes]] = ()

    async def send(self, request: HttpRequest, *, max_body_bytes: int) -> HttpAnswer:
        """Raises: HttpFailed."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._send(request, max_body_bytes)
        except TimeoutError:
            raise HttpFailed("timeout") from None
        except FAILURES as error:
            raise HttpFailed(type(error).__name__) from error

    async def _send(self, request: HttpRequest, max_body_bytes: int) -> HttpAnswer:
        headers = {
            "host": urlsplit(request.url).netloc,
            "user-agent": "tollgate",
            **dict(request.headers),
            "accept-encoding": "identity",
        }
        if request.body or request.method not in WITHOUT_BODY:
            headers["content-length"] = str(len(request.body))
        limits = {"connect": CONNECT_TIMEOUT_S, "read": READ_TIMEOUT_S, "write": WRITE_TIMEOUT_S}
        async with self._pool.stream(
            request.method,
            request.url,
            headers=[(name.encode(), value.encode()) for name, value in headers.items()],
            content=request.body,
            extensions={
                "timeout": {**limits, "pool": PLACE_TIMEOUT_S},
                "on_sent": self._on_sent,
            },
        ) as response:
            self.status, self.headers = response.status, response.headers
            said = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in response.headers
            }
            if said.get("content-encoding", "identity").strip().lower() != "identity":
                raise HttpFailed("content_coding")
            # RFC 9110, 9.3.2: its length is that of a body which does not come.
            body = b"" if request.method == "HEAD" else await read(response, max_body_bytes)
        body = without(body, self._hidden)
        return HttpAnswer(status=response.status, headers=said, body=body)


async def read(response: Response, max_body_bytes: int) -> bytes:
    """Raises: HttpFailed, for what is longer."""
    body = bytearray()
    async for chunk in response.aiter_stream():
        body += chunk
        if len(body) > max_body_bytes:
            raise HttpFailed("too_long")
    return bytes(body)
