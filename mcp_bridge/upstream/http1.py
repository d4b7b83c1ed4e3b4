"""HTTP/1.1 to one server: a bounded pool of kept connections.

Why not httpcore's own pool: it looks at every connection's socket for every request, and reads in
pure Python; that was four tenths of a tool call. A request is sent once. `network` is ours, in
`asyncio_network`, unless it is given.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpcore
import httptools
import msgspec

from mcp_bridge.upstream.network import AsyncioNetwork

READ_BYTES = 64 * 1024
"""At most what a server sends ahead of who reads it, beside what the system holds."""
MAX_HEAD_BYTES = 64 * 1024
"""Of an answer: its status lines and headers, interim answers among them."""
TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, 5.6.2: what a header's name is made of."""
UNFIT = re.compile(rb"[\0\r\n]")
TARGET = re.compile(r"[!-~]+")

Headers = Sequence[tuple[bytes, bytes]]


class Timeouts(msgspec.Struct, frozen=True):
    """The timeouts of a request, in seconds.

    `pool`: for a free connection. `read`: for the next bytes; None: for ever.
    """

    connect: float
    read: float | None
    write: float
    pool: float


class Response:
    """An answer whose head is there. Raises, whoever reads it: httpcore's errors."""

    def __init__(self, connection: Connection, read_s: float | None) -> None:
        self._connection, self._read_s = connection, read_s
        self.status = connection.status
        self.headers = connection.headers

    async def aiter_stream(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        connection = self._connection
        while True:
            data = connection.take()
            if data:
                yield data
            elif connection.is_complete:
                return
            else:
                await connection.feed(self._read_s)


class Connection:
    """A connection, for one request and its answer at a time."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self.idle_since = 0.0
        self._start()

    def _start(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False
        self._chunks: list[bytes] = []
        self._head_bytes = 0
        self._keeps = False

    @property
    def is_reusable(self) -> bool:
        return self.is_complete and self._keeps and not self._chunks

    @property
    def is_quiet(self) -> bool:
        """True if nothing has come that nobody asked for, its end neither."""
        return not self._stream.get_extra_info("is_readable")

    async def send(self, request: bytes, timeouts: Timeouts) -> None:
        """Send a request, and read until the head of the answer is there."""
        self._start()
        await self._stream.write(request, timeouts.write)
        while not self.status:
            await self.feed(timeouts.read)

    async def feed(self, read_s: float | None) -> None:
        data = await self._stream.read(READ_BYTES, read_s)
        if not data:
            if self.status and self._ends_with_connection:
                self.is_complete = True
                return
            raise httpcore.RemoteProtocolError("the connection ended before the answer")
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise httpcore.RemoteProtocolError(type(error).__name__) from None
        if not self.status and self._head_bytes > MAX_HEAD_BYTES:
            raise httpcore.RemoteProtocolError("the head is too long")

    def take(self) -> bytes:
        data = b"".join(self._chunks)
        self._chunks.clear()
        return data

    async def close(self) -> None:
        await self._stream.aclose()

    @property
    def _ends_with_connection(self) -> bool:
        """True if neither length nor chunks delimit this body (RFC 9112, 6.3)."""
        names = {name.lower() for name, _ in self.headers}
        return names.isdisjoint((b"content-length", b"transfer-encoding"))

    # httptools

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise httpcore.RemoteProtocolError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        if not self.status:
            self.headers = []  # of an interim answer (RFC 9110, 15.2): the answer is to come
            return
        self.is_complete = True
        self._keeps = self._parser.should_keep_alive()


class Pool:
    """Connections to the host of `url`. `trust`: for https; what the system trusts by default.
    `max_idle`, `idle_s`: how many are kept, and how long."""

    def __init__(
        self,
        url: str,
        *,
        max_connections: int,
        max_idle: int,
        idle_s: float,
        network: httpcore.AsyncNetworkBackend | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        self._host, self._is_https = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._is_https else 80)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._network = network or AsyncioNetwork()
        self._trust = trust
        self._places = asyncio.Semaphore(max_connections)
        self._max_idle, self._idle_s = max_idle, idle_s
        self._idle: deque[Connection] = deque()
        """Used longest ago first."""
        self._open: set[Connection] = set()

    async def aclose(self) -> None:
        """Close all connections; who still reads is cut off."""
        self._idle.clear()
        for connection in tuple(self._open):
            self._open.discard(connection)
            await connection.close()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Headers,
        content: bytes,
        extensions: Mapping[str, Any],
    ) -> AsyncIterator[Response]:
        """Send a request and yield its answer, as httpcore's pool does.

        `url`: of the same host. `headers`: all of them, framing too. `on_sent` of the extensions is
        called when the request is about to be written. Raises: httpcore's NetworkError,
        ProtocolError and TimeoutException.
        """
        timeouts = Timeouts(**extensions["timeout"])
        request = written(method, self._target(url), headers) + content
        await self._take_place(timeouts.pool)
        connection: Connection | None = None
        try:
            connection = await self._connection(timeouts.connect)
            extensions.get("on_sent", nothing)()
            await connection.send(request, timeouts)
            yield Response(connection, timeouts.read)
        finally:
            self._places.release()
            if connection is not None:
                await self._give_back(connection)

    def _target(self, url: str) -> str:
        origin, rest = url[: len(self._origin)], url[len(self._origin) :]
        if origin != self._origin or rest[:1] not in ("", "/", "?", "#"):
            raise httpcore.LocalProtocolError("the URL is another host's")
        rest = rest.partition("#")[0]
        return rest if rest.startswith("/") else f"/{rest}"

    async def _take_place(self, timeout_s: float) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise httpcore.PoolTimeout("all connections are in use") from None

    async def _connection(self, timeout_s: float) -> Connection:
        oldest = time.monotonic() - self._idle_s
        while self._idle and self._idle[0].idle_since < oldest:
            await self._drop(self._idle.popleft())
        while self._idle:
            found = self._idle.pop()
            if found.is_quiet:
                return found
            await self._drop(found)
        stream = await self._network.connect_tcp(self._host, self._port, timeout_s)
        if self._is_https:
            trust = self._trust or ssl.create_default_context()
            try:
                stream = await stream.start_tls(trust, self._host, timeout_s)
            except BaseException:
                await stream.aclose()
                raise
        connection = Connection(stream)
        self._open.add(connection)
        return connection

    async def _give_back(self, connection: Connection) -> None:
        is_open = connection in self._open
        if is_open and connection.is_reusable and len(self._idle) < self._max_idle:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            await self._drop(connection)

    async def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        await connection.close()


def nothing() -> None:
    """Do nothing: nobody wants to know."""


def written(method: str, target: str, headers: Headers) -> bytes:
    """Raises: LocalProtocolError, for what could be read as more than one request."""
    if TARGET.fullmatch(target) is None:
        raise httpcore.LocalProtocolError("the URL has characters that none may have")
    lines = [f"{method} {target} HTTP/1.1".encode()]
    for name, value in headers:
        if TOKEN.fullmatch(name) is None or UNFIT.search(value) is not None:
            raise httpcore.LocalProtocolError("a header has characters that none may have")
        lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])
