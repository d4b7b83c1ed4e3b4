"""The host tier: blocks that left the device's pool, in memory that the device copies from.

Memory is cut into chunks, which are filled one after the other; the one that was used least
recently is emptied as a whole. No thread and no waiting: copies out of the pool and into it are
queued on the device one behind the other, so that a row is read as it was written, and overwritten
after it was read.

Only for a pool that is not in host memory itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.tiers.buffers import Buffer
from engine.tiers.policy import ReadCosts
from engine.tiers.sources import Arrival

CHUNK_BLOCKS = 64
"""Blocks that are copied at once; less would be dear in launches, more in what is lost with one."""
MIN_CHUNKS = 4


class _Chunk:
    __slots__ = ("digests", "first_row", "num_readers")

    def __init__(self, first_row: int) -> None:
        self.first_row = first_row
        self.digests: list[bytes] = []
        """By row."""
        self.num_readers = 0


class _RowRun:
    """Rows side by side in a chunk, which is pinned: it has a reader."""

    __slots__ = ("chunk", "first", "num_rows")

    def __init__(self, chunk: _Chunk, first: int) -> None:
        self.chunk, self.first, self.num_rows = chunk, first, 1


class HostRead:
    """Blocks of one prompt that wait in host memory to be taken."""

    def __init__(self, tier: HostTier, runs: Sequence[_RowRun]) -> None:
        self._tier = tier
        self._runs = deque(runs)

    @property
    def is_over(self) -> bool:
        return not self._runs

    @property
    def is_ready(self) -> bool:
        return bool(self._runs)

    def take(self) -> Arrival | None:
        if not self._runs:
            return None
        run = self._runs.popleft()
        return Arrival(self._tier.rows_of(run), partial(self._tier.unpin, run))

    def cancel(self) -> None:
        while self._runs:
            self._tier.unpin(self._runs.popleft())


class HostTier:
    """Keeps blocks in `rows`. Not thread-safe: the step thread's alone."""

    name = "host"
    place = "kv_host_bytes"
    is_on = True

    def __init__(self, rows: NDArray[np.uint8], costs: ReadCosts) -> None:
        """rows: [blocks, payload_bytes], pinned where the pool is on a device. costs: of copies
        from them into the pool."""
        assert len(rows) >= MIN_CHUNKS
        self.costs = costs
        self._rows = rows
        self._chunk_blocks = min(CHUNK_BLOCKS, len(rows) // MIN_CHUNKS)
        self._unused = [*range(0, len(rows) - self._chunk_blocks + 1, self._chunk_blocks)][::-1]
        self.max_blocks = (len(self._unused) - 1) * self._chunk_blocks
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()
        """By their first rows, the least recently used one first."""
        self._current: _Chunk | None = None
        self._place_of: dict[bytes, tuple[_Chunk, int]] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._place_of)

    @property
    def record_bytes(self) -> int:
        return int(self._rows.shape[1])

    def has(self, digest: bytes) -> bool:
        return digest in self._place_of

    def takes(self, digest: bytes) -> bool:
        return digest not in self._place_of

    # Writing

    def write_buffer(self) -> Buffer | None:
        """Return the rows that are left of a chunk; None while readers have all of them."""
        chunk = self._current
        if chunk is None or len(chunk.digests) == self._chunk_blocks:
            self._current = chunk = self._begin_chunk()
        if chunk is None:
            return None
        first = chunk.first_row
        rows = self._rows[first + len(chunk.digests) : first + self._chunk_blocks]
        return Buffer(rows.data, rows)

    def payloads(self, buffer: Buffer, num_blocks: int) -> NDArray[np.uint8]:
        return buffer.rows[:num_blocks]

    def give_back(self, buffer: Buffer) -> None:
        """Do nothing: its rows are the next buffer's."""

    def put(self, buffer: Buffer, digests: Sequence[bytes], wait: Callable[[], None]) -> None:
        """Keep the first rows of the last buffer. Nobody waits: see above."""
        chunk = self._current
        assert chunk is not None and len(digests) <= len(buffer.rows)
        for digest in digests:
            self._place_of[digest] = chunk, len(chunk.digests)
            chunk.digests.append(digest)

    def _begin_chunk(self) -> _Chunk | None:
        if self._unused:
            chunk = _Chunk(self._unused.pop())
        else:
            coldest = next((each for each in self._chunks.values() if not each.num_readers), None)
            if coldest is None:
                return None
            for digest in coldest.digests:
                del self._place_of[digest]
            del self._chunks[coldest.first_row]
            chunk = _Chunk(coldest.first_row)
        self._chunks[chunk.first_row] = chunk
        return chunk

    # Reading

    def read(self, digests: Sequence[bytes]) -> HostRead:
        """Return what is there of the blocks, up to the first that is not."""
        runs: list[_RowRun] = []
        for digest in digests:
            place = self._place_of.get(digest)
            if place is None:
                break
            chunk, row = place
            last = runs[-1] if runs else None
            if last is not None and last.chunk is chunk and last.first + last.num_rows == row:
                last.num_rows += 1
            else:
                chunk.num_readers += 1
                self._chunks.move_to_end(chunk.first_row)
                runs.append(_RowRun(chunk, row))
        return HostRead(self, runs)

    def rows_of(self, run: _RowRun) -> NDArray[np.uint8]:
        first = run.chunk.first_row + run.first
        return self._rows[first : first + run.num_rows]

    def unpin(self, run: _RowRun) -> None:
        """End a run: its chunk may be emptied."""
        run.chunk.num_readers -= 1

    def close(self) -> None:
        """Do nothing: the memory goes with whoever has it."""

    def check_integrity(self) -> None:
        """AssertionError unless the index says what is in the chunks."""
        for digest, (chunk, row) in self._place_of.items():
            assert chunk.digests[row] == digest and self._chunks[chunk.first_row] is chunk
        assert len(self._place_of) == sum(len(each.digests) for each in self._chunks.values())
        for chunk in self._chunks.values():
            assert len(chunk.digests) <= self._chunk_blocks and chunk.num_readers >= 0
