"""HTTP with server-sent events, the transport of 2024-11-05: one stream names the URL that messages
are posted to, and brings all answers.

Messages are posted to the origin of the stream only; a stream that names another origin is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit

from foundation import sse
from foundation.http1 import Headers, HttpClientError
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import Message, RpcError
from mcp_bridge.upstream.credentials import CredentialSet
from mcp_bridge.upstream.http import (
    Response,
    ServerPool,
    own_headers,
    refusal_of,
    timeouts,
    with_credential,
)
from mcp_bridge.upstream.transport import CredentialRefused, StreamTransport, TransportFailed
from mcp_bridge.upstream.transports.streamable_http import MAX_MESSAGE_BYTES
from mcp_bridge.upstream.upstream import ServerConfig

ENDPOINT_S = 10.0
"""How long a new stream may take to name its endpoint."""
POST_READ_S = 30.0
MAX_URL_CHARS = 4096
MAX_REPLY_BYTES = 64 * 1024
"""Bytes of the reply to a posted message, which should have none."""


class SseStreamTransport:
    legacy_only = True
    left = False

    def __init__(
        self,
        config: ServerConfig,
        pool: ServerPool,
        headers: Headers,
        response: Response,
        credential: CredentialSet,
    ) -> None:
        self._config, self._pool, self._headers = config, pool, headers
        self._credential = credential
        self._events = self._read(response)
        self._url = ""

    async def start(self) -> None:
        """Read the endpoint. Raises: TransportFailed."""
        try:
            async with asyncio.timeout(ENDPOINT_S):
                async for event in self._events:
                    if event.name == b"endpoint":
                        self._url = endpoint_of(self._config.url, event.data)
                        return
        except TimeoutError:
            pass
        raise TransportFailed("no_endpoint")

    async def send(self, message: Message) -> None:
        content = rpc.encode(message)
        try:
            async with self._pool.stream(
                "POST",
                self._url,
                headers=[
                    *self._headers,
                    (b"content-type", b"application/json"),
                    (b"content-length", b"%d" % len(content)),
                ],
                content=content,
                timeouts=timeouts(POST_READ_S),
            ) as response:
                check_credential(response, self._credential)
                if not 200 <= response.status < 300:
                    raise TransportFailed(f"status_{response.status}")
                size = 0
                async for chunk in response.aiter_stream():
                    size += len(chunk)
                    if size > MAX_REPLY_BYTES:
                        raise TransportFailed("too_long")
        except HttpClientError as error:
            raise TransportFailed(type(error).__name__) from error

    async def messages(self) -> AsyncIterator[Message]:
        async for event in self._events:
            if event.name == b"message" and event.data:
                try:
                    yield rpc.decode(event.data)
                except RpcError as error:
                    raise TransportFailed(rpc.unread_reason(error)) from None
        raise TransportFailed("upstream_ended")

    async def _read(self, response: Response) -> AsyncIterator[sse.Event]:
        decoder = sse.EventParser(MAX_MESSAGE_BYTES)
        try:
            async for chunk in response.aiter_stream():
                for event in decoder.feed(chunk):
                    yield event
        except sse.EventTooLarge:
            raise TransportFailed("too_long") from None
        except HttpClientError as error:
            raise TransportFailed(type(error).__name__) from error


def check_credential(response: Response, credential: CredentialSet) -> None:
    """Raises: CredentialRefused."""
    refused = refusal_of(response.status, response.headers, credential)
    if refused is not None:
        raise CredentialRefused(refused.status, refused.challenge)


def endpoint_of(stream_url: str, endpoint: bytes) -> str:
    """Return the URL to post to. Raises: TransportFailed, if its origin is not the stream's."""
    try:
        url = urljoin(stream_url, endpoint.decode("ascii"))
        given, wanted = urlsplit(url), urlsplit(stream_url)
        same = (given.scheme, given.netloc) == (wanted.scheme, wanted.netloc)
    except ValueError:
        raise TransportFailed("bad_endpoint") from None
    if not same or len(url) > MAX_URL_CHARS or any(c.isspace() for c in url):
        raise TransportFailed("bad_endpoint")
    return url


@asynccontextmanager
async def open_sse(
    config: ServerConfig, pool: ServerPool, credential: CredentialSet
) -> AsyncIterator[StreamTransport]:
    """Open the stream. `pool` is closed with it. Raises: TransportFailed."""
    headers = with_credential(own_headers(config), credential)
    try:
        async with pool.stream(
            "GET",
            config.url,
            headers=[*headers, (b"accept", b"text/event-stream")],
            timeouts=timeouts(None),
        ) as response:
            check_credential(response, credential)
            kinds = [value for name, value in response.headers if name == b"content-type"]
            if response.status != 200 or not kinds or not kinds[0].startswith(b"text/event-stream"):
                raise TransportFailed(f"status_{response.status}")
            transport = SseStreamTransport(config, pool, headers, response, credential)
            await transport.start()
            yield transport
    except HttpClientError as error:
        raise TransportFailed(type(error).__name__) from error
    finally:
        pool.close()
