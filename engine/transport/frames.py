"""How protocol messages travel: addresses, and frames of length + msgpack on asyncio streams.

A frame is a 4-byte big-endian length followed by that many bytes of msgpack. The length is checked
before the body is read, so a peer cannot make this process allocate more than `MAX_FRAME_BYTES`.
Does not know what the messages mean, nor who is at the other end: the socket carries no
authentication, so it belongs on a Unix socket, the loopback or a private network.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from engine.errors import ConfigError, ProtocolError
from engine.protocol import MAX_FRAME_BYTES

MAX_UNIX_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) on Linux, less the closing NUL."""

READ_AHEAD_BYTES = 1024 * 1024
"""The bytes that a stream buffers before it stops reading from its socket (asyncio: twice this)."""

KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
"""A TCP peer whose machine vanished is lost after idle + interval * probes = 25 s."""

_PORT = re.compile("[0-9]{1,5}")
_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()

Message = TypeVar("Message")


class UnixAddress(msgspec.Struct, frozen=True):
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


class TcpAddress(msgspec.Struct, frozen=True):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


def parse_address(address: str) -> UnixAddress | TcpAddress:
    """`unix:/path` or `tcp:host:port` (IPv6 in brackets); else a `ConfigError`."""
    scheme, _, rest = address.partition(":")
    if not rest.isprintable():  # a NUL, a lone surrogate: the system's calls would raise for them
        raise ConfigError(f"address {address!r}: it holds characters that no address has")
    if scheme == "unix" and rest:
        if len(rest.encode()) > MAX_UNIX_PATH_BYTES:
            raise ConfigError(
                f"address {address!r}: a unix socket path has at most {MAX_UNIX_PATH_BYTES} bytes"
            )
        return UnixAddress(rest)
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if host and _PORT.fullmatch(port) and int(port) <= 65535:
            return TcpAddress(_host(address, host), int(port))
    raise ConfigError(f"address {address!r}: expected unix:/path or tcp:host:port")


def _host(address: str, host: str) -> str:
    """Without its brackets; `ConfigError` for one that cannot even be looked up."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        bare.encode("idna")
    except UnicodeError as error:  # an empty label, or one of more than 63 characters
        raise ConfigError(f"address {address!r}: {host!r} is no host name: {error}") from error
    return bare


async def open_connection(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to `address`. Raises `OSError` when nobody listens there."""
    parsed = parse_address(address)
    if isinstance(parsed, UnixAddress):
        return await asyncio.open_unix_connection(parsed.path, limit=READ_AHEAD_BYTES)
    reader, writer = await asyncio.open_connection(parsed.host, parsed.port, limit=READ_AHEAD_BYTES)
    keep_alive(writer)
    return reader, writer


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Make the loss of a TCP peer's machine an event (a Unix peer's loss always is one)."""
    sock = writer.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message as wire bytes. Raises `ProtocolError` when it is over `MAX_FRAME_BYTES`."""
    frame = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, frame, _LENGTH.size)
    body_bytes = len(frame) - _LENGTH.size
    if body_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {body_bytes} bytes exceeds {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(frame, 0, body_bytes)
    return bytes(frame)


class FrameReader(Generic[Message]):
    """Reads messages of one union type from a stream. `max_bytes`: None: `MAX_FRAME_BYTES`."""

    def __init__(
        self, reader: asyncio.StreamReader, message_type: Any, *, max_bytes: int | None = None
    ) -> None:
        self._reader, self._max_bytes = reader, max_bytes
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)

    async def read(self) -> Message | None:
        """The next message; None when the peer closed between two frames.

        Raises `ProtocolError` for a frame that is too large, truncated or undecodable, and
        `OSError` when the connection broke.
        """
        try:
            header = await self._reader.readexactly(_LENGTH.size)
        except asyncio.IncompleteReadError as end:
            if not end.partial:
                return None
            raise ProtocolError("the peer left inside a frame's length") from end
        (body_bytes,) = _LENGTH.unpack(header)
        most = self._max_bytes or MAX_FRAME_BYTES
        if body_bytes > most:
            raise ProtocolError(f"a frame of {body_bytes} bytes exceeds {most}")
        try:
            return self._decoder.decode(await self._reader.readexactly(body_bytes))
        except asyncio.IncompleteReadError as end:
            raise ProtocolError(
                f"the peer left after {len(end.partial)} of a frame's {body_bytes} bytes"
            ) from end
        except (ValueError, RecursionError) as error:
            # MsgspecError (which names the field) and UnicodeDecodeError are ValueErrors; a frame
            # of nested arrays runs out of stack.
            raise ProtocolError(f"an undecodable frame: {error}") from error
