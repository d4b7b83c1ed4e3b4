"""Lets other engines read blocks of this one's prefix cache: a thread for each of them.

No step waits for them and they wait for no step: where blocks are, the threads look up themselves,
and whether a copy is whole its generations say (`engine.kv_cache.block_holds`).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, ProtocolError
from engine.kv_cache.block_holds import BlockHolds, BlockRange
from engine.transfer.messages import (
    DIGEST_BYTES,
    Answer,
    Blocks,
    BlocksHeld,
    Channel,
    Hello,
    HoldBlocks,
    NoBlocks,
    Question,
    ReadBlocks,
    Refusal,
    ReleaseBlocks,
    Welcome,
)
from engine.transfer.peer_tls import PeerTls
from engine.transfer.shared_pool import BlockReader, SharedPool
from engine.transport.entrance import bind_unix, socket_file
from engine.transport.frames import TcpAddress, UnixAddress, parse_address

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_READ_BYTES = 8 << 20
"""The bytes of one `Blocks` at most, but for a block that alone has more."""
HELLO_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 10.0
"""Drop an engine that takes none of what it asked for in this time."""
IDLE_TIMEOUT_S = 600.0
"""Drop an engine that asks for nothing in this time: it closes connections sooner, and one whose
machine is gone would keep its place for ever."""
ACCEPT_PAUSE_S = 1.0
"""Accept nobody for this time after that failed, as it does while no file can be opened."""


class BlockServer:
    """Serves the blocks of one engine on one address. `address`: as it can be reached."""

    def __init__(
        self,
        address: str,
        holds: BlockHolds,
        reader: BlockReader,
        *,
        engine_id: str,
        layout: bytes,
        block_bytes: int,
        num_blocks: int,
        token: str = "",
        pool: SharedPool | None = None,
        offers_memory: bool = True,
        tls: PeerTls | None = None,
    ) -> None:
        """Raises ConfigError when the address cannot be bound. reader: of the pool. layout: as in
        `Hello`. token: to be shown by all who connect. pool: None: it cannot be mapped.
        offers_memory: False: it is not to be, though it can. tls: of who comes over TCP."""
        self._holds, self._reader = holds, reader
        self._engine_id, self._layout, self._token = engine_id, layout, token
        self._block_bytes, self._num_blocks = block_bytes, num_blocks
        self._max_read = max(1, MAX_READ_BYTES // block_bytes)
        self._asked = parse_address(address)
        self._tls = tls if isinstance(self._asked, TcpAddress) else None
        self._pool = pool if isinstance(self._asked, UnixAddress) and offers_memory else None
        self._listener = self._bind(address)
        self.address = self._bound_address()
        self._channels: set[Channel[Question]] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kv-serving", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and give the address free."""
        with self._lock:
            self._closed.set()
            channels = list(self._channels)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in channels:
            channel.close()
        self._thread.join()
        if isinstance(self._asked, UnixAddress):
            path = Path(self._asked.path)
            if socket_file(path) == self._file:  # else a successor has taken the place
                path.unlink(missing_ok=True)

    def _bind(self, address: str) -> socket.socket:
        asked = self._asked
        try:
            if isinstance(asked, UnixAddress):
                listener = bind_unix(asked)
                self._file = socket_file(Path(asked.path))
            else:
                listener = socket.create_server((asked.host, asked.port))
            listener.listen(MAX_CONNECTIONS)
        except OSError as error:
            raise ConfigError(f"peer_listen {address}: {error.strerror}") from error
        return listener

    def _bound_address(self) -> str:
        if isinstance(self._asked, UnixAddress):
            return str(self._asked)
        return str(TcpAddress(self._asked.host, self._listener.getsockname()[1]))

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                log.exception("cannot accept another engine")
                self._closed.wait(ACCEPT_PAUSE_S)
                continue
            channel: Channel[Question] = Channel(sock, Question)
            with self._lock:
                is_refused = self._closed.is_set() or len(self._channels) >= MAX_CONNECTIONS
                if not is_refused:
                    self._channels.add(channel)
            if is_refused:
                sock.close()
                continue
            threading.Thread(
                target=self._serve, args=(channel,), name="kv-serving", daemon=True
            ).start()

    def _serve(self, channel: Channel[Question]) -> None:
        borrower = _Borrower()
        try:
            channel.sock.settimeout(HELLO_TIMEOUT_S)
            if self._tls is not None:
                channel.sock = self._tls.accept(channel.sock)
            if self._greet(channel):
                channel.sock.settimeout(IDLE_TIMEOUT_S)
                while (question := channel.receive()) is not None:
                    channel.sock.settimeout(SEND_TIMEOUT_S)
                    self._answer(channel, borrower, question)
                    channel.sock.settimeout(IDLE_TIMEOUT_S)
        except (OSError, ProtocolError) as error:
            if not self._closed.is_set():
                log.info("an engine that read blocks is gone: %s", error)
        finally:
            for hold_id in borrower.fronts:
                self._holds.release(hold_id)
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _greet(self, channel: Channel[Question]) -> bool:
        hello = channel.receive()
        if not isinstance(hello, Hello):
            raise ProtocolError("it says nothing of itself")
        refusal = ""
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            refusal = "the token is another one"
        elif hello.layout != self._layout:
            refusal = "the layout is another one"
        if refusal:
            log.warning("refused an engine that would read blocks: %s", refusal)
            channel.send(Refusal(refusal))
            return False
        pool = self._pool
        welcome = Welcome(
            engine_id=self._engine_id,
            block_bytes=self._block_bytes,
            num_blocks=self._num_blocks,
            part_bytes=[] if pool is None else [*pool.shape.part_bytes],
        )
        channel.send(welcome, fd=None if pool is None else pool.fd)
        return True

    def _answer(self, channel: Channel[Question], borrower: _Borrower, question: Question) -> None:
        answer: Answer
        if isinstance(question, ReleaseBlocks):
            if borrower.fronts.pop(question.hold_id, None) is not None:
                self._holds.release(question.hold_id)
        elif isinstance(question, HoldBlocks):
            channel.send(self._hold(borrower, question))
        elif isinstance(question, ReadBlocks):
            answer, rows = self._read(borrower, question)
            channel.send(answer)
            if rows is not None:
                channel.sock.sendall(rows)
        else:
            raise ProtocolError("it says twice who it is")

    def _hold(self, borrower: _Borrower, question: HoldBlocks) -> BlocksHeld | NoBlocks:
        text = question.digests
        if question.first < 0 or len(text) % DIGEST_BYTES:
            raise ProtocolError("it asks for no blocks")
        digests = [text[at : at + DIGEST_BYTES] for at in range(0, len(text), DIGEST_BYTES)]
        front = self._holds.find(digests)
        if len(front.blocks) <= question.first:
            return NoBlocks()
        hold_id = self._holds.begin(front, question.duration_s)
        blocks = front.blocks[question.first :]
        generations = front.generations[question.first :]
        for ended in [each for each in borrower.fronts if not self._holds.is_held(each)]:
            del borrower.fronts[ended]
        if hold_id:
            borrower.fronts[hold_id] = BlockRange(blocks, generations)
        return BlocksHeld(hold_id=hold_id, blocks=blocks, generations=generations)

    def _read(
        self, borrower: _Borrower, question: ReadBlocks
    ) -> tuple[Blocks | NoBlocks, memoryview | None]:
        front = borrower.fronts.get(question.hold_id)
        if front is None or not self._holds.is_held(question.hold_id):
            return NoBlocks(), None
        if question.first < 0 or not 1 <= question.count <= self._max_read:
            raise ProtocolError("it reads what is no part of a hold")
        wanted = slice(question.first, question.first + question.count)
        blocks, generations = front.blocks[wanted], front.generations[wanted]
        rows = borrower.rows_for(len(blocks), self._block_bytes)
        count = self._reader.read(blocks, generations, rows)
        if not count:
            return NoBlocks(), None
        read = rows[:count].data.cast("B")
        return Blocks(count=count, crc=crc32(read)), read


class _Borrower:
    """Keeps what one engine that reads has: its holds, and memory for what it is sent."""

    def __init__(self) -> None:
        self.fronts: dict[int, BlockRange] = {}
        self._rows = np.empty((0, 0), np.uint8)

    def rows_for(self, num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
        if len(self._rows) < num_blocks:
            self._rows = np.empty((num_blocks, block_bytes), np.uint8)
        return self._rows[:num_blocks]
