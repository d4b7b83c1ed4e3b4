"""Cuts a stream of rows into chunks, at places that the rows themselves choose. Pure.

Content-defined: a row that is added or changed moves no cut but those near it, so all other chunks
are what they were in the last backup and need not be written again. A chunk ends behind a row whose
checksum is small for the row's length, which makes the mean size of chunks independent of that of
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

ROW_END = b"\n"
"""Postgres' text format of COPY escapes newlines inside of a value."""
MIN_BYTES = 2 * 1024 * 1024
MEAN_BYTES = 4 * 1024 * 1024
"""The mean of what follows the first MIN_BYTES, without MAX_BYTES."""
MAX_BYTES = 16 * 1024 * 1024
"""A longer row makes a longer chunk."""


class RowBatch(NamedTuple):
    """Rows that make one chunk."""

    data: bytes
    rows: int


class RowCutter:
    """Cuts the rows of one table; `feed` it the bytes of COPY as they come, then `finish`."""

    def __init__(
        self, *, least: int = MIN_BYTES, mean: int = MEAN_BYTES, most: int = MAX_BYTES
    ) -> None:
        self._least, self._mean, self._most = least, mean, most
        self._buffer = bytearray()
        self._start = 0
        """The start of the row that is read."""
        self._searched = 0
        self._rows = 0

    def feed(self, data: bytes) -> Iterator[RowBatch]:
        """Add bytes, and yield each chunk that is complete."""
        self._buffer += data
        while (found := self._buffer.find(ROW_END, self._searched)) >= 0:
            end = found + len(ROW_END)
            if self._rows and end > self._most:
                yield self._take(self._start)
                continue
            self._rows += 1
            is_cut = end >= self._least and self._chooses(self._start, end)
            self._start = self._searched = end
            if is_cut or end >= self._most:
                yield self._take(end)
        self._searched = len(self._buffer)

    def finish(self) -> Iterator[RowBatch]:
        """Yield the last chunk, if there is one. Raises: ValueError if a row has no end."""
        if self._start != len(self._buffer):
            raise ValueError("the last row has no end")
        if self._rows:
            yield self._take(self._start)

    def _chooses(self, start: int, end: int) -> bool:
        return crc32(memoryview(self._buffer)[start:end]) < ((end - start) << 32) // self._mean

    def _take(self, end: int) -> RowBatch:
        piece = RowBatch(bytes(memoryview(self._buffer)[:end]), self._rows)
        del self._buffer[:end]
        self._start, self._searched, self._rows = 0, 0, 0
        return piece
