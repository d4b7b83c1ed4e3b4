"""The closed list of what engines say to each other, and how it travels.

Frames are as those of `engine.transport.frames`: a 4-byte big-endian length, then one msgpack map.
The bytes of `Blocks` follow behind its frame; the file of `Welcome` comes with it (SCM_RIGHTS).

    Hello            -> Welcome | Refusal       once
    HoldBlocks       -> BlocksHeld | NoBlocks
    ReadBlocks       -> Blocks | NoBlocks
    ReleaseBlocks       is not answered
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from typing import Any, Generic, TypeVar

import msgspec

from engine.errors import ProtocolError
from engine.transport.frames import TcpAddress, UnixAddress

MAX_MESSAGE_BYTES = 1 << 20
MAX_HOLD_BLOCKS = 16_384
"""Blocks of one hold: their digests fit a message."""
DIGEST_BYTES = 32

_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()

Message = TypeVar("Message")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="hello"):
    """The first message of whoever connects. `layout`: names all that makes its KV blocks what they
    are (`engine.core.kv_layout`)."""

    token: str
    layout: bytes


class HoldBlocks(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="hold"):
    """The sender will read the blocks with these digests, from number `first` on. `digests`: of a
    prompt's front from its first block on, 32 bytes each."""

    digests: bytes
    first: int
    duration_s: float


class ReadBlocks(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="read"):
    """The sender wants the bytes of some blocks of a hold, counted from its first one."""

    hold_id: int
    first: int
    count: int


class ReleaseBlocks(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="release"):
    hold_id: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="welcome"):
    """The answer to a `Hello` whose token and layout are this engine's own."""

    engine_id: str
    block_bytes: int
    num_blocks: int
    part_bytes: list[int] = []
    """The bytes of each part of a block in the file that comes with this message
    (`shared_pool.PoolShape`). Empty: no file comes, the blocks are sent."""


class Refusal(msgspec.Struct, frozen=True, tag_field="t", tag="refused"):
    """The connection ends."""

    why: str


class BlocksHeld(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="held"):
    """The answer that says what there is of a `HoldBlocks`, from its first block on."""

    hold_id: int
    """0: nothing is kept."""
    blocks: list[int]
    generations: list[int]


class Blocks(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="blocks"):
    """The answer that the bytes of `count` blocks follow. Each had the generation that its hold
    told, before and after it was copied."""

    count: int
    crc: int
    """zlib's CRC-32 of these bytes."""


class NoBlocks(msgspec.Struct, frozen=True, tag_field="t", tag="no_blocks"):
    """The answer where nothing is there, or not any more."""


Question = Hello | HoldBlocks | ReadBlocks | ReleaseBlocks
Answer = Welcome | Refusal | BlocksHeld | Blocks | NoBlocks


class Channel(Generic[Message]):
    """One end of a connection between engines; blocks its thread. Every call raises OSError when
    the connection broke or the socket's time is up, and ProtocolError for what is no message."""

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        """message_type: of what comes in."""
        self.sock = sock
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)

    def send(self, message: msgspec.Struct, *, fd: int | None = None) -> None:
        """fd: a file that comes with the message, over a Unix socket."""
        body = _ENCODER.encode(message)
        frame = _LENGTH.pack(len(body)) + body
        if fd is None:
            self.sock.sendall(frame)
            return
        sent = socket.send_fds(self.sock, [frame], [fd])
        self.sock.sendall(frame[sent:])

    def receive(self) -> Message | None:
        """Return the next message; None when the other side left between two of them."""
        header = bytearray(_LENGTH.size)
        if not self._fill(memoryview(header), may_end=True):
            return None
        return self._body(header)

    def receive_with_file(self) -> tuple[Message | None, int | None]:
        """As `receive`, with the file that came with it; the caller closes that."""
        if isinstance(self.sock, ssl.SSLSocket):
            return self.receive(), None
        first, fds, _, _ = socket.recv_fds(self.sock, _LENGTH.size, 1)
        fd = fds[0] if fds else None
        try:
            if not first:
                return None, fd
            header = bytearray(first.ljust(_LENGTH.size, b"\0"))
            self._fill(memoryview(header)[len(first) :])
            return self._body(header), fd
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise

    def fill(self, rows: memoryview) -> None:
        """Receive bytes that follow a message."""
        self._fill(rows)

    def close(self) -> None:
        """End the connection, also under whoever waits for it in another thread."""
        with contextlib.suppress(OSError):  # it is gone already
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _body(self, header: bytearray) -> Message:
        (num_bytes,) = _LENGTH.unpack(header)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {num_bytes} bytes exceeds {MAX_MESSAGE_BYTES}")
        body = bytearray(num_bytes)
        self._fill(memoryview(body))
        try:
            return self._decoder.decode(body)
        except (ValueError, RecursionError) as error:  # MsgspecError is a ValueError
            raise ProtocolError(f"an undecodable message: {error}") from error

    def _fill(self, into: memoryview, *, may_end: bool = False) -> bool:
        """False: the other side left before the first byte."""
        done = 0
        while done < len(into):
            received = self.sock.recv_into(into[done:])
            if not received:
                if may_end and not done:
                    return False
                raise ProtocolError("the other engine left inside a message")
            done += received
        return True


def connect(address: UnixAddress | TcpAddress, timeout_s: float) -> socket.socket:
    """Return a connected socket whose calls take so long at most. Raises OSError."""
    if isinstance(address, TcpAddress):
        sock = socket.create_connection((address.host, address.port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(address.path)
    except OSError:
        sock.close()
        raise
    return sock
