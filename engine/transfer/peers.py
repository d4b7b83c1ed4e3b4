"""Brings blocks from other engines, in threads: one for each engine that is asked.

A gateway names the engine that has a prompt's beginning (`EngineRequest.fetch`). That is a guess:
what is there when it is asked for is brought, in order, up to the first block that is not. An
engine that is away, refuses, hangs or sends nonsense brings nothing, and is left alone for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from engine.errors import ProtocolError
from engine.protocol import KVSource
from engine.sequence import Key
from engine.tiers.buffers import Buffer, BufferPool, to_pages
from engine.tiers.policy import LearntReads, ReadCosts
from engine.tiers.sources import Arrival, Signal
from engine.transfer.connection import PeerConnection
from engine.transfer.messages import BlocksHeld
from engine.transfer.peer_tls import PeerTls
from engine.transport.entrance import is_local

log = logging.getLogger(__name__)

MAX_PEERS = 16
MAX_QUEUED = 256
"""Reads that wait for one engine; further ones bring nothing."""
READ_BYTES = 3 << 20
"""Blocks are read together up to so many bytes: more at once are read faster, and come later."""
NUM_BUFFERS = 12
TIMEOUT_S = 1.0
"""For each call to another engine: one that hangs keeps its thread no longer."""
AWAY_S = 5.0
"""An engine that could not be read is asked again after so long."""
IDLE_S = 300.0
"""A connection that nobody needs is closed after so long."""
HOLD_S = 10.0
FIRST_COSTS = ReadCosts(latency_s=0.001, bytes_per_s=5e8)
"""A guess before anything was read: of a socket on a slow machine."""
_POLL_S = 0.05


class _Hint:
    """A gateway's word on a prompt: `source` has the blocks with these digests."""

    __slots__ = ("digests", "source")

    def __init__(self, source: KVSource, digests: Sequence[bytes]) -> None:
        self.source, self.digests = source, digests


class PeerRead:
    """Blocks of one prompt on their way from another engine."""

    def __init__(self, hint: _Hint, first: int, num_blocks: int, lock: threading.Lock) -> None:
        self.hint, self.first, self.num_blocks = hint, first, num_blocks
        self.is_cancelled = False
        self._has_ended = False
        self._arrived: deque[Arrival] = deque()
        self._lock = lock

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self._has_ended and not self._arrived

    @property
    def is_ready(self) -> bool:
        """Whether `take` has something to return."""
        return bool(self._arrived)

    def take(self) -> Arrival | None:
        """Return what comes next, if it has arrived."""
        with self._lock:
            return self._arrived.popleft() if self._arrived else None

    def cancel(self) -> None:
        """Drop what has not been taken."""
        with self._lock:
            self.is_cancelled = self._has_ended = True
            dropped = list(self._arrived)
            self._arrived.clear()
        for arrival in dropped:
            arrival.give_back()

    def put(self, arrival: Arrival) -> bool:
        """Add what arrived; False when nobody wants it any more."""
        with self._lock:
            if not self.is_cancelled:
                self._arrived.append(arrival)
            return not self.is_cancelled

    def end(self) -> None:
        with self._lock:
            self._has_ended = True


class PeerSource:
    """A source of blocks for the prefix loader: the other engines that gateways name. Thread-safe
    where its threads call it; all else is for the loader's thread."""

    name = "peer"

    def __init__(
        self,
        *,
        engine_id: str,
        layout: bytes,
        block_bytes: int,
        token: str,
        signal: Signal,
        insecure: bool = False,
        tls: PeerTls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """engine_id: of this engine, which is never asked. layout, token: as in `Hello`. signal:
        told whenever something came, or no more will. insecure: whether the token may be shown to
        other machines, in the clear. tls: by which other machines are met."""
        self.record_bytes = block_bytes
        self.num_stale = 0
        """Reads that ended at a block which was given up meanwhile, since the start."""
        self.num_failed = 0
        """Reads that ended because the other engine could not be read."""
        self.num_bytes = {"memory": 0, "socket": 0}
        """The bytes that came, by the way."""
        self._engine_id, self._layout, self._token = engine_id, layout, token
        self.signal, self._insecure, self._tls, self._clock = signal, insecure, tls, clock
        self._learnt = LearntReads(FIRST_COSTS, clock)
        self._hints: dict[bytes, tuple[_Hint, int]] = {}
        """By each digest that somebody waits for: the newest one, and its place there."""
        self._expected: dict[Key, _Hint] = {}
        self._peers: dict[str, _Peer] = {}
        self._away: dict[str, float] = {}
        self._lock = threading.Lock()
        num_blocks = max(1, READ_BYTES // block_bytes)
        self._buffers = BufferPool(NUM_BUFFERS, num_blocks, to_pages(block_bytes))
        self._is_closed = False

    @property
    def costs(self) -> ReadCosts:
        """Return what reads took lately."""
        return self._learnt.costs

    def expect(self, key: Key, source: KVSource, digests: Sequence[bytes]) -> None:
        """Take a gateway's word that an engine has blocks: those with these digests, of the front
        of the prompt of the sequence `key`."""
        if source.engine_id == self._engine_id or not digests:
            return
        hint = self._expected[key] = _Hint(source, digests)
        self._hints.update((digest, (hint, index)) for index, digest in enumerate(digests))

    def forget(self, key: Key) -> None:
        """Expect nothing more for this sequence; it may be unknown."""
        hint = self._expected.pop(key, None)
        for digest in () if hint is None else hint.digests:
            found = self._hints.get(digest)
            if found is not None and found[0] is hint:
                del self._hints[digest]

    def has(self, digest: bytes) -> bool:
        """Whether a block may be somewhere that can be asked."""
        found = self._hints.get(digest)
        return found is not None and not self._is_away(found[0].source.address)

    def read(self, digests: Sequence[bytes]) -> PeerRead:
        """Begin to read blocks that follow each other in a prompt, from where the first is and as
        far as that was said of the same prompt: another one may have begun alike."""
        hint, first = self._hints[digests[0]]
        alike = takewhile(
            lambda pair: pair[0] == pair[1], zip(digests, hint.digests[first:], strict=False)
        )
        reading = PeerRead(hint, first, sum(1 for _ in alike), self._lock)
        peer = self._peer_at(hint.source.address)
        if peer is None or not peer.ask(reading):
            reading.end()
        return reading

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._is_closed = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()

    def _is_away(self, address: str) -> bool:
        until = self._away.get(address)
        if until is None:
            return False
        if until > self._clock():
            return True
        del self._away[address]
        return False

    def _peer_at(self, address: str) -> _Peer | None:
        with self._lock:
            peer = self._peers.get(address)
            if peer is None and not self._is_closed and len(self._peers) < MAX_PEERS:
                peer = self._peers[address] = _Peer(self, address)
        return peer

    # In the threads

    def connect(self, address: str) -> PeerConnection:
        """Raises OSError, ProtocolError."""
        if not (self._tls or self._insecure or is_local(address)):
            raise ProtocolError("it is on another machine, and the token is not shown in the clear")
        return PeerConnection(
            address,
            token=self._token,
            layout=self._layout,
            block_bytes=self.record_bytes,
            timeout_s=TIMEOUT_S,
            tls=self._tls,
        )

    def bring(self, reading: PeerRead, peer: PeerConnection) -> None:
        """Do a read. Raises OSError, ProtocolError."""
        hint, first = reading.hint, reading.first
        if peer.engine_id != hint.source.engine_id:  # another one is there by now
            return
        started_s = time.perf_counter()
        end = first + reading.num_blocks
        held = peer.hold(hint.digests[:end], first, HOLD_S)
        if held is None:
            return
        held_s = time.perf_counter() - started_s
        num_read, read_s = self._copy(reading, peer, held)
        peer.release(held)
        self._learnt.learn(num_read * self.record_bytes, read_s, held_s)

    def failed(self, address: str, error: Exception) -> None:
        """Ask an engine nothing for a while."""
        self.num_failed += 1
        self._away[address] = self._clock() + AWAY_S
        log.warning("%s could not be read: %s", address, error)

    def ended(self, reading: PeerRead) -> None:
        reading.end()
        self.signal.notify()

    def left(self, address: str, peer: _Peer) -> None:
        """Note that a thread has ended."""
        with self._lock:
            if self._peers.get(address) is peer:
                del self._peers[address]

    def _copy(self, reading: PeerRead, peer: PeerConnection, held: BlocksHeld) -> tuple[int, float]:
        """Return how many blocks were read, and the seconds that took."""
        num_read, read_s = 0, 0.0
        num_blocks = min(len(held.blocks), reading.num_blocks)
        while num_read < num_blocks:
            buffer = self._buffer_for(reading)
            if buffer is None:
                break
            started_s = time.perf_counter()
            wanted = min(self._buffers.num_records, num_blocks - num_read)
            rows = self._rows_of(buffer, wanted)
            try:
                num_good = peer.read(held, num_read, rows)
            except BaseException:
                self._buffers.give_back(buffer)
                raise
            read_s += time.perf_counter() - started_s
            num_read += num_good
            self.num_bytes[peer.via] += num_good * self.record_bytes
            give_back = partial(self._buffers.give_back, buffer)
            if not num_good or not reading.put(Arrival(rows[:num_good], give_back)):
                give_back()
            self.signal.notify()
            if num_good < wanted:
                self.num_stale += not reading.is_cancelled
                break
        return num_read, read_s

    def _rows_of(self, buffer: Buffer, num_blocks: int) -> NDArray[np.uint8]:
        """Return the first part of a buffer as blocks side by side."""
        size = num_blocks * self.record_bytes
        return buffer.rows.reshape(-1)[:size].reshape(num_blocks, self.record_bytes)

    def _buffer_for(self, reading: PeerRead) -> Buffer | None:
        while not (reading.is_cancelled or self._is_closed):
            if (buffer := self._buffers.take(_POLL_S)) is not None:
                return buffer
        return None


class _Peer:
    """The thread that reads from the engine at one address, one read after the other."""

    def __init__(self, source: PeerSource, address: str) -> None:
        self._source, self._address = source, address
        self._queue: SimpleQueue[PeerRead | None] = SimpleQueue()
        self._connection: PeerConnection | None = None
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="kv-reading", daemon=True)
        self._thread.start()

    def ask(self, reading: PeerRead) -> bool:
        """Queue a read; False when there are too many, or the thread has just ended."""
        with self._lock:
            if self._has_ended or self._queue.qsize() >= MAX_QUEUED:
                return False
            self._queue.put(reading)
            return True

    def close(self) -> None:
        self._queue.put(None)
        connection = self._connection
        if connection is not None:
            connection.close()
        self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        while (reading := self._next()) is not None:
            try:
                if not reading.is_cancelled:
                    self._bring(reading)
            except Exception as error:  # whatever it is: the next read may go well
                self._drop()
                self._source.failed(self._address, error)
            finally:
                self._source.ended(reading)
        self._drop()
        self._source.left(self._address, self)
        while not self._queue.empty():
            if (left := self._queue.get()) is not None:
                self._source.ended(left)

    def _next(self) -> PeerRead | None:
        """Return what is to be read next; None: nobody needs this thread any more."""
        try:
            return self._queue.get(timeout=IDLE_S)
        except Empty:
            with self._lock:
                self._has_ended = self._queue.empty()
            return None if self._has_ended else self._queue.get()

    def _bring(self, reading: PeerRead) -> None:
        asked = reading.hint.source.engine_id
        if self._connection is not None and self._connection.engine_id != asked:
            self._drop()  # that one is gone, and another has its address
        if self._connection is None:
            self._connection = self._source.connect(self._address)
        self._source.bring(reading, self._connection)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
