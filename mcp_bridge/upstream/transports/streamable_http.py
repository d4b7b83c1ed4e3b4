"""Streamable HTTP to a server: the transport whose requests and answers all others imitate.

Only messages of a caller are sent, none of its headers: headers are those of the configuration and
of the server's credential. Redirects are not followed, and no content coding is accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from foundation import sse
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import Message, RpcError
from mcp_bridge.upstream.credentials import CredentialSet, Refusal, ask_with_credential
from mcp_bridge.upstream.http import (
    HttpTarget,
    Response,
    own_headers,
    refusal_of,
    timeouts,
    with_credential,
)
from mcp_bridge.upstream.transport import NotSent, ReadCount, TransportAnswer, TransportRequest
from mcp_bridge.upstream.upstream import (
    ACCEPT,
    DEFAULT_RETRY_MS,
    READ_TIMEOUT_S,
    Unreachable,
)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_EXCHANGE_BYTES = 64 * 1024 * 1024
"""Bytes of all messages of one request, over all its streams."""
MAX_EXCHANGE_MESSAGES = 10_000


class HttpTransport:
    """The transport over Streamable HTTP.

    `max_streams`: endless streams at once, so that listeners leave connections to calls.
    """

    def __init__(self, target: HttpTarget, *, max_streams: int) -> None:
        self._streams = asyncio.Semaphore(max_streams)
        self._config, self._pool = target.config, target.pool
        self._credentials = target.credentials
        self._own_headers = own_headers(target.config)

    async def close(self) -> None:
        self._pool.close()

    def ask(self, request: TransportRequest) -> AbstractAsyncContextManager[TransportAnswer]:
        return self._ask_endless(request) if request.endless else self._ask(request)

    @asynccontextmanager
    async def _ask_endless(self, request: TransportRequest) -> AsyncIterator[TransportAnswer]:
        if self._streams.locked():
            raise NotSent("too_many_streams")
        async with self._streams, self._ask(request) as answer:
            yield answer

    @asynccontextmanager
    async def _ask(self, request: TransportRequest) -> AsyncIterator[TransportAnswer]:
        method, body = request.method, request.message
        content = b"" if body is None else rpc.encode(body)
        headers = {"accept": ACCEPT, **self._own_headers, **request.headers}
        if body is not None:
            headers["content-type"] = "application/json"
        if method == "POST":
            headers["content-length"] = str(len(content))
        bounds = timeouts(None if request.endless else READ_TIMEOUT_S)
        async with AsyncExitStack() as stack:

            async def send(credential: CredentialSet) -> tuple[Response, Refusal | None]:
                await stack.aclose()  # the response that refused the credential before
                response = await stack.enter_async_context(
                    self._pool.stream(
                        method,
                        self._config.url,
                        headers=with_credential(headers, credential),
                        content=content,
                        timeouts=bounds,
                        on_sent=request.on_sent,
                    )
                )
                return response, refusal_of(response.status, response.headers, credential)

            response = await ask_with_credential(self._credentials, send)
            yield StreamableAnswer(
                self._config.name, response, endless=request.endless, on_change=request.on_change
            )


class StreamableAnswer:
    """An answer whose head is there."""

    def __init__(
        self,
        server: str,
        response: Response,
        *,
        endless: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._server, self._response, self._endless = server, response, endless
        self._on_change = on_change
        self.status = response.status
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers
        }
        self.last_id: str | None = None
        self.retry_ms = DEFAULT_RETRY_MS
        self.message_bytes: int | None = None
        self.kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Unreachable(server, "content_coding")

    @property
    def is_stream(self) -> bool:
        return self.kind == "text/event-stream"

    async def body(self) -> bytes:
        """Raises: Unreachable, for one that is too long."""
        body = bytearray()
        async for chunk in self._response.aiter_stream():
            body += chunk
            if len(body) > MAX_MESSAGE_BYTES:
                raise Unreachable(self._server, "too_long")
        return bytes(body)

    async def messages(self, spent: ReadCount | None = None) -> AsyncGenerator[Message | None]:
        """Yield one message, or those of a stream; None for an event that only has an id. Without
        `spent` an endless stream may be of any length. Raises: Unreachable."""
        if not self.is_stream:
            yield self._decode(await self.body())
            return
        decoder = sse.EventParser(MAX_MESSAGE_BYTES, with_ids=True)
        is_bounded = spent is not None or not self._endless
        spent = spent or ReadCount()
        async for chunk in self._response.aiter_stream():
            spent.bytes += len(chunk)
            if is_bounded and spent.bytes > MAX_EXCHANGE_BYTES:
                raise Unreachable(self._server, "too_much")
            try:
                events = decoder.feed(chunk)
            except sse.EventTooLarge:
                raise Unreachable(self._server, "too_long") from None
            for event in events:
                spent.messages += 1
                if is_bounded and spent.messages > MAX_EXCHANGE_MESSAGES:
                    raise Unreachable(self._server, "too_much")
                self.last_id = event.id or self.last_id
                self.retry_ms = self.retry_ms if event.retry_ms is None else event.retry_ms
                yield self._decode(event.data) if event.data else None

    def _decode(self, body: bytes) -> Message:
        self.message_bytes = len(body)
        try:
            found = rpc.decode(body)
        except RpcError as error:
            raise Unreachable(self._server, rpc.unread_reason(error)) from None
        if str(found.get("method")).endswith("/list_changed"):
            self._on_change()
        return found
