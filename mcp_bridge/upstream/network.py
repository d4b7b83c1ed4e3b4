"""Speaks TCP and TLS on the running loop, by httpcore's interface of a network.

httpcore's own is anyio's streams, which cost three times as much for each small message. What a
server sends is read from the socket only while less than HIGH_WATER_BYTES of it wait.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any, cast

import httpcore

HIGH_WATER_BYTES = 256 * 1024
"""Of what came and nobody read yet."""


class AsyncioNetwork(httpcore.AsyncNetworkBackend):
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises: ConnectError, ConnectTimeout."""
        assert local_address is None and socket_options is None, "nobody here needs it"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, stream = await loop.create_connection(NetworkStream, host, port)
        except TimeoutError:
            raise httpcore.ConnectTimeout(f"{host} does not answer") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(type(error).__name__) from error
        return stream


class NetworkStream(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """A stream with one reader and one writer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        """None before it is made and after it is lost."""
        self._buffer = bytearray()
        self._ended = False
        self._fault: Exception | None = None
        """It did not end, it broke."""
        self._rests = False
        self._wake: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        """None: as much as one likes can be written."""

    # httpcore.AsyncNetworkStream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Empty: it has ended. Raises: ReadError, ReadTimeout."""
        while not self._buffer and not self._ended:
            loop = asyncio.get_running_loop()
            self._wake = wake = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, expire, wake)
            try:
                await wake
            except TimeoutError:
                raise httpcore.ReadTimeout("nothing came") from None
            finally:
                self._wake = None
                if timer is not None:
                    timer.cancel()
        if not self._buffer and self._fault is not None:
            raise httpcore.ReadError(type(self._fault).__name__)
        data = bytes(self._buffer[:max_bytes])
        del self._buffer[:max_bytes]
        if self._rests and self._transport is not None and len(self._buffer) < HIGH_WATER_BYTES:
            self._rests = False
            self._transport.resume_reading()
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Raises: WriteError, WriteTimeout."""
        if self._transport is None:
            raise httpcore.WriteError("the connection is closed")
        self._transport.write(buffer)
        if self._writable is None:
            return
        loop = asyncio.get_running_loop()
        timer = None if timeout is None else loop.call_later(timeout, expire, self._writable)
        try:
            await self._writable
        except TimeoutError:
            raise httpcore.WriteTimeout("nothing is taken") from None
        except OSError as error:
            raise httpcore.WriteError(type(error).__name__) from error
        finally:
            self._writable = None
            if timer is not None:
                timer.cancel()

    async def aclose(self) -> None:
        """Close at once: what was not sent yet is not."""
        if self._transport is not None:
            self._transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises: ConnectError, ConnectTimeout."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                upgraded = await loop.start_tls(
                    self._transport, self, ssl_context, server_hostname=server_hostname
                )
        except TimeoutError:
            raise httpcore.ConnectTimeout("no TLS in time") from None
        except (OSError, ssl.CertificateError) as error:
            raise httpcore.ConnectError(type(error).__name__) from error
        if upgraded is None:
            raise httpcore.ConnectError("the connection is closed")
        self._transport = upgraded
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            return bool(self._buffer) or self._ended
        return None if self._transport is None else self._transport.get_extra_info(info)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > HIGH_WATER_BYTES and self._transport is not None:
            self._rests = True
            self._transport.pause_reading()
        self._wake_up()

    def eof_received(self) -> None:
        """Close our side too: nothing is said to who has ended."""
        self._ended = True
        self._wake_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._ended, self._fault = True, exc
        if self._writable is not None and not self._writable.done():
            self._writable.set_exception(exc or ConnectionResetError("closed"))
            self._writable.exception()
        self._wake_up()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def expire(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError())
