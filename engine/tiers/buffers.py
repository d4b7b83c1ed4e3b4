"""Lends page-aligned memory, as reads and writes past the page cache (O_DIRECT) need it."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096


def to_pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory of its own; `rows` [records, record_bytes] are the same bytes."""

    memory: memoryview
    rows: NDArray[np.uint8]


class BufferPool:
    """A number of equal buffers, made when they are first wanted. Thread-safe."""

    def __init__(self, num_buffers: int, num_records: int, record_bytes: int) -> None:
        """record_bytes: whole pages."""
        assert num_buffers >= 1 and num_records >= 1 and record_bytes % PAGE_BYTES == 0
        self.num_records = num_records
        self._record_bytes = record_bytes
        self._num_left = num_buffers
        self._free: list[Buffer] = []
        self._changed = threading.Condition()

    def take(self, timeout_s: float = 0.0) -> Buffer | None:
        """Return a buffer; None when there was none within the time."""
        with self._changed:
            if not self._changed.wait_for(self._has_one, timeout_s):
                return None
            if self._free:
                return self._free.pop()
            self._num_left -= 1
        return self._make()

    def give_back(self, buffer: Buffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def _has_one(self) -> bool:
        return bool(self._free) or self._num_left > 0

    def _make(self) -> Buffer:
        memory = mmap.mmap(-1, self.num_records * self._record_bytes)
        rows = np.frombuffer(memory, dtype=np.uint8).reshape(self.num_records, self._record_bytes)
        return Buffer(memoryview(memory), rows)
