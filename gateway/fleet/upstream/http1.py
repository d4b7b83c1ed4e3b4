"""Speaks HTTP/1.1 to one upstream: a bounded pool of kept connections, POST alone, bodies as they
come.

Knows no JSON, no events and no models. Why not a general client: this is on the path of every
token, and httpx took 15 times the processor time for a small request, 5 times for a stream. There
is no timeout here; the caller bounds its waits.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

MAX_HEAD_BYTES = 64 * 1024
"""Of a response: its status line and headers."""
HIGH_WATER_BYTES = 256 * 1024
"""Of a body that nobody has read yet; beyond it the peer is not read from."""
MAX_CONNECTIONS = 1024
MAX_IDLE = 256
IDLE_S = 4.0
"""After that a kept connection is not trusted any more: uvicorn, which most upstreams run on,
closes its side after 5 s, and a request that crosses that on the way is lost.
"""


class HttpProtocolError(Exception):
    """The connection or what came over it is of no use. Nothing of it is for a client's eyes."""


class ConnectFailed(HttpProtocolError):
    """Says that no connection was made; nothing was sent."""


class PoolFull(HttpProtocolError):
    """Says that MAX_CONNECTIONS are in use; nothing was sent."""


class BrokenResponse(HttpProtocolError):
    """Says that a response ended too early, or is no HTTP."""


class Pool:
    """Connections to the host of `url`, each used for one request at a time. `trust`: for https;
    what the system trusts by default."""

    def __init__(
        self, url: str, headers: Mapping[str, str], trust: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        assert parts.scheme in ("http", "https") and parts.hostname
        self._host = parts.hostname
        is_https = parts.scheme == "https"
        self._ssl = (trust or ssl.create_default_context()) if is_https else None
        self._port = parts.port or (443 if is_https else 80)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        netloc = parts.netloc.rpartition("@")[2]
        lines = [f"host: {netloc}", *(f"{name}: {value}" for name, value in headers.items())]
        self._headers = "\r\n".join(lines)
        self._head = self.head_of(target)
        self._idle: deque[Connection] = deque()
        """Used longest ago first."""
        self._open: set[Connection] = set()
        self._num_connecting = 0

    def take_idle(self) -> Connection | None:
        """Take a connection that is open, to be given back with `release`, whatever comes."""
        oldest = time.monotonic() - IDLE_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().abort()
        return self._idle.pop() if self._idle else None

    def head_of(self, target: str) -> bytes:
        """Return what `post` begins with that asks for something else than `url` does there."""
        return f"POST {target} HTTP/1.1\r\n{self._headers}\r\ncontent-length: ".encode()

    def post(self, connection: Connection, body: bytes, head: bytes | None = None) -> None:
        """Ask, without waiting for anything."""
        connection.send(b"%b%d\r\n\r\n%b" % (head or self._head, len(body), body))

    def release(self, connection: Connection) -> None:
        """Keep the connection if its answer was read to the end, and close it if not."""
        if connection.reusable and len(self._idle) < MAX_IDLE:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        for connection in tuple(self._open):
            connection.abort()

    async def connect(self) -> Connection:
        """A new one, to be given back alike. Raises ConnectFailed, PoolFull."""
        if len(self._open) + self._num_connecting >= MAX_CONNECTIONS:
            raise PoolFull(f"{MAX_CONNECTIONS} connections are in use")
        self._num_connecting += 1
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._open, self._lost), self._host, self._port, ssl=self._ssl
            )
        except (OSError, ssl.CertificateError) as error:
            raise ConnectFailed(type(error).__name__) from error
        finally:
            self._num_connecting -= 1
        return connection

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class Connection(asyncio.Protocol):
    """A connection with one request and its response at a time. `head` first, then `read` until it
    is empty."""

    def __init__(self, opened: set[Connection], lost: Callable[[Connection], None]) -> None:
        self._opened, self._lost = opened, lost
        self._transport: asyncio.Transport | None = None
        """None before it is made and after it is lost."""
        self.idle_since = 0.0
        self._busy = False
        self._wake: asyncio.Future[None] | None = None
        self._expires = 0.0
        """When the wait under way has lasted too long, by the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """One for all waits of this connection: a timeout around each costs more than most waits.
        It looks when the first would have expired, and again when the current one would."""
        self._start()

    def _start(self) -> None:
        """A new exchange: nothing of it has come yet."""
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._status: int | None = None
        self._headers: dict[str, str] = {}
        self._chunks: list[bytes] = []
        self._num_buffered = 0
        self._paused = False
        self._complete = False
        self._keep = False
        self._fault: BrokenResponse | None = None
        self._interruption: Exception | None = None

    @property
    def sent(self) -> bool:
        """The peer's system, at least, has the whole request."""
        return self._transport is None or self._transport.get_write_buffer_size() == 0

    @property
    def reusable(self) -> bool:
        return self._transport is not None and self._keep and not self._chunks

    def send(self, request: bytes) -> None:
        self._start()
        self._busy = True
        if self._transport is not None:
            self._transport.write(request)

    async def head(self, timeout_s: float) -> tuple[int, Mapping[str, str]]:
        """Read status and headers, their names in lower case. Raises BrokenResponse, TimeoutError,
        and what it is interrupted with."""
        while self._status is None:
            await self._wait(timeout_s)
        return self._status, self._headers

    async def read(self, timeout_s: float) -> bytes:
        """Read all of the body that has come since; empty at its end. `timeout_s`: for what comes
        next. Raises as `head` does."""
        if self._interruption is not None:
            raise self._interruption
        while not self._chunks:
            if self._complete:
                return b""
            await self._wait(timeout_s)
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._num_buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def interrupt(self, error: Exception) -> None:
        """Fail whatever waits for this answer, now or from now on, with `error`."""
        self._interruption = error
        if self._wake is not None and not self._wake.done():
            self._wake.set_exception(error)

    async def _wait(self, timeout_s: float) -> None:
        if self._interruption is not None:
            raise self._interruption
        if self._fault is not None:
            raise self._fault
        loop = asyncio.get_running_loop()
        self._expires = loop.time() + timeout_s
        if self._timer is None or self._timer.when() > self._expires:
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
        if self._wake is None or self._wake.done():
            return
        if asyncio.get_running_loop().time() < self._expires:
            self._look_at(self._expires)
        else:
            self._wake.set_exception(TimeoutError("nothing came"))

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _fail(self, reason: str) -> None:
        self._fault = self._fault or BrokenResponse(reason)
        self.abort()
        self._wake_up()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            self.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(type(error).__name__)
            return
        if self._status is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail("the head is too long")
        if self._num_buffered > HIGH_WATER_BYTES and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._status is not None and self._ends_with_connection and exc is None:
            self._complete = True
        elif not self._complete:
            self._fault = self._fault or BrokenResponse("the connection was closed")
        self._wake_up()
        self._lost(self)

    @property
    def _ends_with_connection(self) -> bool:
        """Tell whether neither length nor chunks delimit this body (RFC 9112, 6.3)."""
        headers = self._headers
        return "content-length" not in headers and "transfer-encoding" not in headers

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise BrokenResponse("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._num_buffered += len(body)

    def on_message_complete(self) -> None:
        if self._status is None:
            self._headers = {}  # of an interim response (RFC 9110, 15.2): the answer is to come
            return
        self._complete = True
        self._busy = False
        self._keep = self._parser.should_keep_alive()
