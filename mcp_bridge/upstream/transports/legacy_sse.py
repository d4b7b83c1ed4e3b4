"""HTTP with server-sent events, the transport of 2024-11-05, as a Line: one stream that says where
messages are posted, and brings all answers.

Messages are posted where the stream came from and nowhere else: a stream that names another origin
is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit

import httpcore

from foundation import sse
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import Message, RpcError
from mcp_bridge.upstream.credentials import CredentialSet
from mcp_bridge.upstream.http import FRAMING, refusal_of
from mcp_bridge.upstream.transport import CredentialRefused, StreamTransport, TransportFailed
from mcp_bridge.upstream.transports.streamable_http import MAX_MESSAGE_BYTES
from mcp_bridge.upstream.upstream import (
    CONNECT_TIMEOUT_S,
    READ_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    ServerConfig,
)

ENDPOINT_S = 10.0
"""Until a stream has said where to post."""
POST_READ_S = 30.0
MAX_URL_CHARS = 4096
MAX_REPLY_BYTES = 64 * 1024
"""Of what is said to a message that was posted: nothing is meant to be."""


class SseStreamTransport:
    legacy_only = True
    left = False

    def __init__(
        self,
        config: ServerConfig,
        pool: httpcore.AsyncConnectionPool,
        headers: list[tuple[bytes, bytes]],
        response: httpcore.Response,
        credential: CredentialSet,
    ) -> None:
        self._config, self._pool, self._headers = config, pool, headers
        self._credential = credential
        self._events = self._read(response)
        self._url = ""

    async def begin(self) -> None:
        """Raises: TransportFailed."""
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
        sent = [
            *self._headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
        ]
        limits = {"connect": CONNECT_TIMEOUT_S, "read": POST_READ_S, "write": WRITE_TIMEOUT_S}
        timeouts = {**limits, "pool": CONNECT_TIMEOUT_S}
        try:
            async with self._pool.stream(
                "POST", self._url, headers=sent, content=content, extensions={"timeout": timeouts}
            ) as response:
                check_taken(response, self._credential)
                if not 200 <= response.status < 300:
                    raise TransportFailed(f"status_{response.status}")
                size = 0
                async for chunk in response.aiter_stream():
                    size += len(chunk)
                    if size > MAX_REPLY_BYTES:
                        raise TransportFailed("too_long")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise TransportFailed(type(error).__name__) from error

    async def messages(self) -> AsyncIterator[Message]:
        async for event in self._events:
            if event.name == b"message" and event.data:
                try:
                    yield rpc.decode(event.data)
                except RpcError:
                    raise TransportFailed("no_json_rpc") from None
        raise TransportFailed("upstream_ended")

    async def _read(self, response: httpcore.Response) -> AsyncIterator[sse.Event]:
        decoder = sse.EventParser(MAX_MESSAGE_BYTES)
        try:
            async for chunk in response.aiter_stream():
                for event in decoder.feed(chunk):
                    yield event
        except sse.EventTooLarge:
            raise TransportFailed("too_long") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise TransportFailed(type(error).__name__) from error


def check_taken(response: httpcore.Response, credential: CredentialSet) -> None:
    """Raises: CredentialRefused."""
    refused = refusal_of(response.status, response.headers, credential)
    if refused is not None:
        raise CredentialRefused(refused.status, refused.challenge)


def endpoint_of(stream_url: str, said: bytes) -> str:
    """Return where to post. Raises: TransportFailed, for another origin than the stream's."""
    try:
        url = urljoin(stream_url, said.decode("ascii"))
        given, wanted = urlsplit(url), urlsplit(stream_url)
        same = (given.scheme, given.netloc) == (wanted.scheme, wanted.netloc)
    except ValueError:
        raise TransportFailed("bad_endpoint") from None
    if not same or len(url) > MAX_URL_CHARS or any(c.isspace() for c in url):
        raise TransportFailed("bad_endpoint")
    return url


@asynccontextmanager
async def open_sse(
    config: ServerConfig, pool: httpcore.AsyncConnectionPool, credential: CredentialSet
) -> AsyncIterator[StreamTransport]:
    """Open the stream, with `pool`, which is closed with it. Raises: TransportFailed."""
    own = {name.lower(): value for name, value in credential.values.items()}
    named = {
        "host": urlsplit(config.url).netloc.rpartition("@")[2],
        "accept-encoding": "identity",
        "user-agent": "tollgate",
        **config.headers,
        **{name: value for name, value in own.items() if name not in FRAMING},
    }
    headers = [(name.encode(), value.encode()) for name, value in named.items()]
    limits = {"connect": CONNECT_TIMEOUT_S, "read": None, "write": WRITE_TIMEOUT_S}
    timeouts = {**limits, "pool": READ_TIMEOUT_S}
    try:
        async with (
            pool,
            pool.stream(
                "GET",
                config.url,
                headers=[*headers, (b"accept", b"text/event-stream")],
                extensions={"timeout": timeouts},
            ) as response,
        ):
            check_taken(response, credential)
            kinds = [value for name, value in response.headers if name.lower() == b"content-type"]
            if response.status != 200 or not kinds or not kinds[0].startswith(b"text/event-stream"):
                raise TransportFailed(f"status_{response.status}")
            line = SseStreamTransport(config, pool, headers, response, credential)
            await line.begin()
            yield line
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
        raise TransportFailed(type(error).__name__) from error
