"""Reads blocks of another engine: asks where they are, and copies or receives them.

Blocks the thread that it is used in. What it returns is checked: by generations where it copies, by
a checksum where it receives.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from engine.errors import ProtocolError
from engine.transfer.messages import (
    MAX_HOLD_BLOCKS,
    Answer,
    Blocks,
    BlocksHeld,
    Channel,
    Hello,
    HoldBlocks,
    NoBlocks,
    ReadBlocks,
    Refusal,
    ReleaseBlocks,
    Welcome,
    connect,
)
from engine.transfer.peer_tls import PeerTls
from engine.transfer.shared_pool import MappedPool, PoolShape, map_pool
from engine.transport.frames import TcpAddress, parse_address


class PeerConnection:
    """A connection to another engine. Every call raises OSError or ProtocolError when it can be
    used no more; whoever made it closes it."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        layout: bytes,
        block_bytes: int,
        timeout_s: float,
        tls: PeerTls | None = None,
    ) -> None:
        """token, layout: as in `Hello`. block_bytes: of this engine's own blocks. timeout_s: for
        each call. tls: for an address over TCP."""
        there = parse_address(address)
        sock = connect(there, timeout_s)
        if tls is not None and isinstance(there, TcpAddress):
            try:
                sock = tls.connect(sock)
            except BaseException:
                sock.close()
                raise
        self._channel: Channel[Answer] = Channel(sock, Answer)
        self._pool: MappedPool | None = None
        try:
            self._welcome = self._greet(Hello(token=token, layout=layout), block_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def engine_id(self) -> str:
        return self._welcome.engine_id

    @property
    def via(self) -> Literal["memory", "socket"]:
        """Return how blocks come."""
        return "socket" if self._pool is None else "memory"

    def close(self) -> None:
        """End it, also under a call in another thread."""
        self._channel.close()

    def hold(self, digests: Sequence[bytes], first: int, duration_s: float) -> BlocksHeld | None:
        """Ask for the blocks with these digests, of a prompt's front, from number `first` on, to be
        kept. None: there are none."""
        text = b"".join(digests[:MAX_HOLD_BLOCKS])
        self._channel.send(HoldBlocks(digests=text, first=first, duration_s=duration_s))
        answer = self._answer()
        if isinstance(answer, NoBlocks):
            return None
        if not isinstance(answer, BlocksHeld):
            raise ProtocolError("another engine answers what was not asked")
        num_blocks = self._welcome.num_blocks
        if len(answer.blocks) != len(answer.generations) or len(answer.blocks) > len(digests):
            raise ProtocolError("another engine has more than it was asked for")
        if not all(0 <= block < num_blocks for block in answer.blocks):
            raise ProtocolError("another engine names blocks that it does not have")
        return answer

    def read(self, held: BlocksHeld, first: int, rows: NDArray[np.uint8]) -> int:
        """Fill `rows` [blocks, block_bytes], C-contiguous, with what is held, from its number
        `first` on. Return how many of the first ones are whole and the ones that were wanted."""
        end = first + len(rows)
        if self._pool is not None:
            return self._pool.read(held.blocks[first:end], held.generations[first:end], rows)
        if not held.hold_id:
            return 0
        self._channel.send(ReadBlocks(hold_id=held.hold_id, first=first, count=len(rows)))
        answer = self._answer()
        if isinstance(answer, NoBlocks):
            return 0
        if not isinstance(answer, Blocks) or not 1 <= answer.count <= len(rows):
            raise ProtocolError("another engine answers what was not asked")
        read = rows[: answer.count].data.cast("B")
        self._channel.fill(read)
        if crc32(read) != answer.crc:
            raise ProtocolError("the checksum of blocks is wrong")
        return answer.count

    def release(self, held: BlocksHeld) -> None:
        if held.hold_id:
            self._channel.send(ReleaseBlocks(hold_id=held.hold_id))

    def _answer(self) -> Answer:
        answer = self._channel.receive()
        if answer is None:
            raise ProtocolError("the other engine left")
        return answer

    def _greet(self, hello: Hello, block_bytes: int) -> Welcome:
        self._channel.send(hello)
        answer, fd = self._channel.receive_with_file()
        try:
            if isinstance(answer, Refusal):
                raise ProtocolError(f"another engine refuses: {answer.why}")
            if not isinstance(answer, Welcome):
                raise ProtocolError("the other engine does not say who it is")
            if answer.block_bytes != block_bytes:
                raise ProtocolError("the blocks of another engine have another size")
            if answer.part_bytes and fd is not None:
                shape = PoolShape(answer.num_blocks, answer.part_bytes)
                if shape.block_bytes != block_bytes:
                    raise ProtocolError("the parts of another engine's blocks are no whole block")
                self._pool = map_pool(fd, shape)
        finally:
            if fd is not None:
                os.close(fd)
        return answer
