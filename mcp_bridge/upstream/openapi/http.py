"""Sends the HTTP requests of tool calls: an `HttpClient` on a bounded pool.

Redirects are not followed, no content coding is accepted, and answers are bounded in size and time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from foundation.http1 import HttpClientError
from mcp_bridge.upstream.http import Response, ServerPool, timeouts
from mcp_bridge.upstream.openapi.calls import HttpAnswer, HttpRequest
from mcp_bridge.upstream.openapi.errors import HttpFailed
from mcp_bridge.upstream.redaction import without

READ_TIMEOUT_S = 120.0
"""Bounds the wait between two pieces of an answer."""
ANSWER_TIMEOUT_S = 300.0
"""Bounds the time from the request to the end of its answer."""
WITHOUT_BODY = frozenset(("GET", "HEAD", "OPTIONS", "DELETE"))
"""Methods whose empty body has no `content-length` (RFC 9110, 8.6)."""


class PoolClient:
    """A client for one request; `status` and `headers` are those of its answer.

    `hidden`: removed from the answer's body. `on_sent`: called when the request is about to be
    written. `trace`: headers of the trace that it is a part of.
    """

    def __init__(
        self,
        pool: ServerPool,
        hidden: Sequence[bytes] = (),
        on_sent: Callable[[], None] = lambda: None,
        trace: Mapping[str, str] = {},
    ) -> None:
        self._trace = trace
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
        except HttpClientError as error:
            raise HttpFailed(type(error).__name__) from error

    async def _send(self, request: HttpRequest, max_body_bytes: int) -> HttpAnswer:
        headers = {
            "host": urlsplit(request.url).netloc,
            "user-agent": "tollgate",
            **dict(request.headers),
            "accept-encoding": "identity",
            **self._trace,
        }
        if request.body or request.method not in WITHOUT_BODY:
            headers["content-length"] = str(len(request.body))
        async with self._pool.stream(
            request.method,
            request.url,
            headers=[(name.encode(), value.encode()) for name, value in headers.items()],
            content=request.body,
            timeouts=timeouts(READ_TIMEOUT_S),
            on_sent=self._on_sent,
        ) as response:
            self.status, self.headers = response.status, response.headers
            answered = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers
            }
            if answered.get("content-encoding", "identity").strip().lower() != "identity":
                raise HttpFailed("content_coding")
            # RFC 9110, 9.3.2: the length is that of a body which does not come.
            body = b"" if request.method == "HEAD" else await read(response, max_body_bytes)
        body = without(body, self._hidden)
        return HttpAnswer(status=response.status, headers=answered, body=body)


async def read(response: Response, max_body_bytes: int) -> bytes:
    """Raises: HttpFailed, for a longer body."""
    body = bytearray()
    async for chunk in response.aiter_stream():
        body += chunk
        if len(body) > max_body_bytes:
            raise HttpFailed("too_long")
    return bytes(body)
