"""The parts that every transport over HTTP shares: a server with its pool, headers, responses."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from foundation.http1 import (
    Connection,
    ConnectTimeout,
    Headers,
    LocalProtocolError,
    Pool,
    PoolTimeout,
    Resolver,
    request_head,
)
from mcp_bridge.upstream.credentials import CredentialSet, CredentialSource, Refusal
from mcp_bridge.upstream.upstream import (
    CONNECT_TIMEOUT_S,
    POOL_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    ServerConfig,
)

FRAMING = frozenset(
    ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding")
)
"""Headers that frame a message, which no credential may set."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The timeouts of a request, in seconds.

    `pool`: for a free connection. `read`: for the next bytes; None: for ever.
    """

    connect: float
    read: float | None
    write: float
    pool: float


class Response:
    """A response whose head is there."""

    def __init__(
        self, connection: Connection, status: int, headers: Headers, read_s: float | None
    ) -> None:
        self._connection, self._read_s = connection, read_s
        self.status, self.headers = status, headers

    async def aiter_stream(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises: HttpClientError, also for what comes behind it."""
        while data := await self._connection.read(self._read_s):
            yield data
        if self._connection.fault is not None:
            raise self._connection.fault


class ServerPool:
    """Connections to the host of `url`, at most `max_connections` in use at once: who comes then
    waits for one. The others are as for a `Pool`."""

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
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._places = asyncio.Semaphore(max_connections)
        self._pool = Pool(
            url,
            max_connections=max_connections,
            max_idle=max_idle,
            idle_s=idle_s,
            resolve=resolve,
            trust=trust,
        )

    def close(self) -> None:
        self._pool.close()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Headers,
        timeouts: Timeouts,
        content: bytes = b"",
        on_sent: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Response]:
        """Send a request once and yield its response.

        `url`: of the same host. `headers`: all of them, framing too. `on_sent` is called when the
        request is about to be written. Raises: HttpClientError.
        """
        request = request_head(method, self._target(url), headers) + content
        await self._take_place(timeouts.pool)
        connection: Connection | None = None
        try:
            connection = self._pool.take_idle() or await self._connect(timeouts.connect)
            on_sent()
            connection.send(request)
            await connection.drain(timeouts.write)
            status, found = await connection.head(timeouts.read)
            yield Response(connection, status, found, timeouts.read)
        finally:
            if connection is not None:
                self._pool.release(connection)
            self._places.release()

    def _target(self, url: str) -> str:
        origin, rest = url[: len(self._origin)], url[len(self._origin) :]
        if origin != self._origin or rest[:1] not in ("", "/", "?", "#"):
            raise LocalProtocolError("the URL is another host's")
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
            raise PoolTimeout("all connections are in use") from None

    async def _connect(self, timeout_s: float) -> Connection:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._pool.connect()
        except TimeoutError:
            raise ConnectTimeout("the server does not answer") from None


class HttpTarget(msgspec.Struct, frozen=True):
    """A server that is reached over HTTP. `pool`: for one transport, which closes it."""

    config: ServerConfig
    pool: ServerPool
    credentials: CredentialSource


def own_headers(config: ServerConfig) -> dict[str, str]:
    """Return the headers of every request to a server, its configured ones among them."""
    return {
        "host": urlsplit(config.url).netloc.rpartition("@")[2],
        "accept-encoding": "identity",
        "user-agent": "tollgate",
        **config.headers,
    }


def with_credential(
    headers: Mapping[str, str], credential: CredentialSet
) -> list[tuple[bytes, bytes]]:
    """Return encoded headers with those of a credential, which replace others but framing."""
    own = {name.lower(): value for name, value in credential.values.items()}
    merged = {**headers, **{name: own[name] for name in own if name not in FRAMING}}
    return [(name.encode(), value.encode()) for name, value in merged.items()]


def timeouts(read_s: float | None) -> Timeouts:
    """Return the timeouts of a request. `read_s`: between two pieces of its answer."""
    return Timeouts(
        connect=CONNECT_TIMEOUT_S, read=read_s, write=WRITE_TIMEOUT_S, pool=POOL_TIMEOUT_S
    )


def refusal_of(status: int, headers: Headers, credential: CredentialSet) -> Refusal | None:
    """Return the refusal of a credential; None: another credential would change nothing."""
    if status not in (401, 403):
        return None
    challenge = ", ".join(
        value.decode("latin-1") for name, value in headers if name == b"www-authenticate"
    )
    if status == 401 or "insufficient_scope" in challenge:
        return Refusal(credential, status, challenge)
    return None
