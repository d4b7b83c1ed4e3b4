"""An HTTP/1.1 client: a bounded pool of kept connections to one host, bodies as they come.

Why not a general client: this is on the path of every token and of every tool call, and httpx took
15 times the processor time for a small request, httpcore's pool four tenths of a tool call. It
knows no JSON, no events, no redirects and no content codings; each request is sent once. Framing
that can be read in two ways is refused by the parser (llhttp), and trailers are dropped.

    HttpClientError              nothing of its text is for a client's eyes
    ├── LocalProtocolError       a request that could be read as more than one
    ├── PoolFull                 too many connections are in use; nothing was sent
    ├── PoolTimeout              the same, after a wait
    ├── ConnectError             no connection was made; nothing was sent
    ├── ConnectTimeout           nobody answered in time; nothing was sent
    ├── WriteError               the connection was lost before the request was taken
    ├── WriteTimeout             the peer does not take the request
    ├── ReadError                the connection broke
    ├── ReadTimeout              nothing came in time
    └── RemoteProtocolError      the response ended too early, or is no HTTP
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import inf
from typing import cast
from urllib.parse import urlsplit

import httptools

MAX_HEAD_BYTES = 64 * 1024
"""Bounds all that comes without a byte of the body: the status line, headers, interim responses,
trailers and chunk extensions."""
HIGH_WATER_BYTES = 256 * 1024
"""While more than this of a body waits to be read, the peer is not read from."""
TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The characters of a header's name (RFC 9110, 5.6.2)."""
UNFIT = re.compile(rb"[\0\r\n]")
TARGET = re.compile(r"[!-~]+")

Headers = Sequence[tuple[bytes, bytes]]
"""The headers of a response have their names in lower case."""
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host and port that may be dialled, the best first. Raises:
HttpClientError."""


class HttpClientError(Exception):
    """The connection or what came over it is of no use."""


class LocalProtocolError(HttpClientError):
    """A request could be read as more than one."""


class PoolFull(HttpClientError):
    """All connections are in use; nothing was sent."""


class PoolTimeout(HttpClientError):
    """All connections stay in use; nothing was sent."""


class ConnectError(HttpClientError):
    """No connection was made; nothing was sent."""


class ConnectTimeout(HttpClientError):
    """Nobody answered in time; nothing was sent."""


class WriteError(HttpClientError):
    """The connection was lost before the request was taken."""


class WriteTimeout(HttpClientError):
    """The peer does not take the request."""


class ReadError(HttpClientError):
    """The connection broke."""


class ReadTimeout(HttpClientError):
    """Nothing came in time."""


class RemoteProtocolError(HttpClientError):
    """A response ended too early, or is no HTTP."""


def request_head(method: str, target: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return what a request begins with. Raises: LocalProtocolError, for what could be read as more
    than one request."""
    if TARGET.fullmatch(target) is None:
        raise LocalProtocolError("the URL has characters that none may have")
    lines = [f"{method} {target} HTTP/1.1".encode()]
    for name, value in headers:
        if TOKEN.fullmatch(name) is None or UNFIT.search(value) is not None:
            raise LocalProtocolError("a header has characters that none may have")
        lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])


def expiry(timeout_s: float | None) -> float:
    """Return when a wait that begins now has lasted too long, by the loop's clock."""
    return inf if timeout_s is None else asyncio.get_running_loop().time() + timeout_s


class Connection(asyncio.Protocol):
    """A connection with one request and its response at a time: `send`, then `head`, then `read`
    until it is empty."""

    def __init__(self, lost: Callable[[Connection], None]) -> None:
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        """None before it is made and after it is lost."""
        self.idle_since = 0.0
        self._busy = False
        self._wake: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        """None: the peer takes what is written."""
        self._expires = 0.0
        """When the wait under way has lasted too long, by the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """One for all waits of this connection: a timeout around each costs more than most waits.
        It looks when the first would have expired, and again when the current one would."""
        self._keep = False
        self._start()

    def _start(self) -> None:
        """Begin an exchange: nothing of it has come yet."""
        if not self._keep:  # it was not read to its end, so its parser may be anywhere
            self._parser = httptools.HttpResponseParser(self)
        self._bodiless_bytes = 0
        """Bytes that came since the last one of the body."""
        self._status: int | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._num_buffered = 0
        self._paused = False
        self._complete = False
        self._keep = False
        self.fault: HttpClientError | None = None
        """The first thing that went wrong, also behind the end of the response."""
        self._interruption: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def sent(self) -> bool:
        """The peer's system, at least, has the whole request."""
        return self._transport is None or self._transport.get_write_buffer_size() == 0

    @property
    def reusable(self) -> bool:
        """Tell whether the response was read to its end and another request may follow."""
        return self._keep and not self._chunks and self.is_open

    def send(self, request: bytes) -> None:
        """Send a request, without waiting for anything."""
        self._start()
        self._busy = True
        if self._transport is None:
            self.fault = WriteError("the connection is closed")
        else:
            self._transport.write(request)

    async def drain(self, timeout_s: float) -> None:
        """Wait until the peer takes what is sent. Raises: WriteError, WriteTimeout."""
        if self._writable is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._writable
        except TimeoutError:
            raise WriteTimeout("nothing is taken") from None

    async def head(self, timeout_s: float | None) -> tuple[int, Headers]:
        """Read the status and the headers. `timeout_s`: for all of them, interim responses
        included; None: for ever. Raises: HttpClientError, and what it is interrupted with."""
        expires = expiry(timeout_s)
        while self._status is None:
            await self._wait(expires)
        return self._status, self._headers

    async def read(self, timeout_s: float | None) -> bytes:
        """Read all of the body that has come since; empty at its end. `timeout_s`: for its next
        byte. Raises as `head` does."""
        if self._interruption is not None:
            raise self._interruption
        expires = None
        while not self._chunks:
            if self._complete:
                return b""
            expires = expires or expiry(timeout_s)
            await self._wait(expires)
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._num_buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def is_read(self) -> bool:
        """Tell whether nothing of the body is left, or to come."""
        return self._complete and not self._chunks

    def abort(self) -> None:
        """Close at once: what was not sent yet is not."""
        if self._transport is not None:
            self._transport.abort()

    def interrupt(self, error: Exception) -> None:
        """Fail whatever waits for this response, now or from now on, with `error`."""
        self._interruption = error
        if self._wake is not None and not self._wake.done():
            self._wake.set_exception(error)

    async def _wait(self, expires: float) -> None:
        """Wait for anything to come. `expires`: until when, by the loop's clock."""
        if self._interruption is not None:
            raise self._interruption
        if self.fault is not None:
            raise self.fault
        loop = asyncio.get_running_loop()
        self._expires = expires
        if self._expires != inf and (self._timer is None or self._timer.when() > self._expires):
            self._look_at(self._expires)
        self._wake = loop.create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _look_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(moment, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._wake is None or self._wake.done() or self._expires == inf:
            return
        if asyncio.get_running_loop().time() < self._expires:
            self._look_at(self._expires)
        else:
            self._wake.set_exception(ReadTimeout("nothing came"))

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _fail(self, error: HttpClientError) -> None:
        self.fault = self.fault or error
        self.abort()
        self._wake_up()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            self.abort()  # nothing was asked
            return
        self._bodiless_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(RemoteProtocolError(type(error).__name__))
            return
        if self._bodiless_bytes > MAX_HEAD_BYTES:
            self._fail(RemoteProtocolError("the head is too long"))
        if self._num_buffered > HIGH_WATER_BYTES and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake_up()

    def eof_received(self) -> None:
        """Close our side too: nothing more is said to a peer that has ended."""
        if not self.sent:
            self.abort()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writable is not None and not self._writable.done():
            self._writable.set_exception(WriteError(type(exc).__name__ if exc else "closed"))
            self._writable.exception()  # nobody may wait for it
        if self._status is not None and self._ends_with_connection and exc is None:
            self._complete = True
        elif not self._complete:
            broken = RemoteProtocolError("the connection ended before the response")
            self.fault = self.fault or (broken if exc is None else ReadError(type(exc).__name__))
        self._wake_up()
        self._lost(self)

    @property
    def _ends_with_connection(self) -> bool:
        """Tell whether neither length nor chunks delimit this body (RFC 9112, 6.3)."""
        names = {name for name, _ in self._headers}
        return names.isdisjoint((b"content-length", b"transfer-encoding"))

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise RemoteProtocolError("a response that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._num_buffered += len(body)
        self._bodiless_bytes = 0

    def on_message_complete(self) -> None:
        if self._status is None:
            self._headers = []  # of an interim response (RFC 9110, 15.2): the response is to come
            return
        self._complete = True
        self._busy = False
        self._keep = self._parser.should_keep_alive()


class Pool:
    """Connections to the host of a URL, each used for one request at a time.

    `max_idle`, `idle_s`: how many are kept, and how long. `resolve`: finds the addresses that are
    dialled, instead of the system. `trust`: for https; what the system trusts by default.
    """

    def __init__(
        self,
        url: str,
        *,
        max_connections: int,
        max_idle: int,
        idle_s: float,
        resolve: Resolver | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if is_https else 80)
        self._resolve = resolve
        self._context = (trust or ssl.create_default_context()) if is_https else None
        self._max_connections, self._max_idle, self._idle_s = max_connections, max_idle, idle_s
        self._idle: deque[Connection] = deque()
        """The one used longest ago comes first."""
        self._open: set[Connection] = set()
        self._num_connecting = 0

    def take_idle(self) -> Connection | None:
        """Take a connection that is open, to be given back with `release`, whatever comes."""
        oldest = time.monotonic() - self._idle_s
        while self._idle and self._idle[0].idle_since < oldest:
            self._drop(self._idle.popleft())
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._drop(connection)
        return None

    async def connect(self) -> Connection:
        """Make a connection, to be given back alike. Raises: ConnectError, PoolFull, and what
        `resolve` raises."""
        if len(self._open) + self._num_connecting >= self._max_connections:
            raise PoolFull(f"{self._max_connections} connections are in use")
        self._num_connecting += 1
        try:
            connection = await self._dial()
        finally:
            self._num_connecting -= 1
        self._open.add(connection)
        if not connection.is_open:  # it was lost before anybody had it
            self._lost(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Keep the connection if its response was read to the end, and close it if not."""
        is_known = connection in self._open
        if is_known and connection.reusable and len(self._idle) < self._max_idle:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            self._drop(connection)

    def close(self) -> None:
        """Close all connections; who still reads is cut off."""
        self._idle.clear()
        for connection in tuple(self._open):
            self._drop(connection)

    async def _dial(self) -> Connection:
        loop = asyncio.get_running_loop()
        hosts = [self._host]
        if self._resolve is not None:
            hosts = list(await self._resolve(self._host, self._port))
        failure = ConnectError("no address")
        for host in hosts:
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self._lost),
                    host,
                    self._port,
                    ssl=self._context,
                    server_hostname=None if self._context is None else self._host,
                )
            except (OSError, UnicodeError) as error:
                failure = ConnectError(type(error).__name__)
                failure.__cause__ = error
                if isinstance(error, ssl.SSLError):
                    break  # who answers there is not the host
            else:
                return connection
        raise failure

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.abort()

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
