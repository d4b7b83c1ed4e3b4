"""Speaks Streamable HTTP to a server: the transport whose words all transports speak.

Nothing of a caller's travels but what a message holds: the headers are the server's own, and those
of the credential that is its. Redirects are not followed, and no content coding is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from foundation import sse
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import Message, RpcError
from mcp_bridge.upstream.credentials import CredentialSet
from mcp_bridge.upstream.http import FRAMING, HttpTarget, refusal_of
from mcp_bridge.upstream.http1 import Response
from mcp_bridge.upstream.transport import NotSent, ReadCount, TransportAnswer, TransportRequest
from mcp_bridge.upstream.upstream import (
    ACCEPT,
    CONNECT_TIMEOUT_S,
    DEFAULT_RETRY_MS,
    PLACE_TIMEOUT_S,
    READ_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    Unreachable,
)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_EXCHANGE_BYTES = 64 * 1024 * 1024
"""Of all messages of one request, over however many streams they come."""
MAX_EXCHANGE_MESSAGES = 10_000


class HttpTransport:
    """The transport over Streamable HTTP.

    `max_streams`: without an end, of its connections: whoever listens takes none from who calls.
    """

    def __init__(self, dialled: HttpTarget, *, max_streams: int) -> None:
        self._streams = asyncio.Semaphore(max_streams)
        self._config, self._pool, self._shown = dialled.config, dialled.pool, dialled.shown
        self._url = urlsplit(dialled.config.url)

    async def close(self) -> None:
        await self._pool.aclose()

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
        fixed = {
            "host": self._url.netloc.rpartition("@")[2],
            "accept": ACCEPT,
            "accept-encoding": "identity",
            "user-agent": "tollgate",
            **self._config.headers,
            **request.headers,
        }
        if body is not None:
            fixed["content-type"] = "application/json"
        if method == "POST":
            fixed["content-length"] = str(len(content))
        read_s = None if request.endless else READ_TIMEOUT_S
        limits = {"connect": CONNECT_TIMEOUT_S, "read": read_s, "write": WRITE_TIMEOUT_S}
        extensions = {"timeout": {**limits, "pool": PLACE_TIMEOUT_S}, "on_sent": request.on_sent}
        credential = await self._shown(None)
        async with self._once(method, fixed, credential, content, extensions) as response:
            refused = refusal_of(response.status, response.headers, credential)
            again = credential if refused is None else await self._shown(refused)
            if again is credential:
                yield self._answer(response, request)
                return
        # Refused before anything was done: a newer token may be taken.
        async with self._once(method, fixed, again, content, extensions) as response:
            refused = refusal_of(response.status, response.headers, again)
            if refused is not None:
                await self._shown(msgspec.structs.replace(refused, is_last=True))
            yield self._answer(response, request)

    def _answer(self, response: Response, request: TransportRequest) -> StreamableAnswer:
        return StreamableAnswer(
            self._config.name, response, endless=request.endless, on_change=request.on_change
        )

    @asynccontextmanager
    async def _once(
        self,
        method: str,
        fixed: Mapping[str, str],
        credential: CredentialSet,
        content: bytes,
        extensions: Mapping[str, Any],
    ) -> AsyncIterator[Response]:
        """Send a request once; what frames a message is never a credential's to say."""
        own = {name.lower(): value for name, value in credential.values.items()}
        sent = {**fixed, **{name: own[name] for name in own if name not in FRAMING}}
        async with self._pool.stream(
            method,
            self._config.url,
            headers=[(name.encode(), value.encode()) for name, value in sent.items()],
            content=content,
            extensions=extensions,
        ) as response:
            yield response


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
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in response.headers
        }
        self.last_id: str | None = None
        self.retry_ms = DEFAULT_RETRY_MS
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
        """Yield one message, or those of a stream; None where a stream only tells from where to
        read on. Without `spent` one without an end may be of any length. Raises: Unreachable."""
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
        try:
            found = rpc.decode(body)
        except RpcError:
            raise Unreachable(self._server, "no_json_rpc") from None
        if str(found.get("method")).endswith("/list_changed"):
            self._on_change()
        return found
