"""Sums that the workers of a home add to and all of them read, in memory that they map.

Each worker adds to numbers of its own, without a lock, and reads all of them: only differences
between two readings are used, so that what a killed worker had counted is in both, and nobody has
to clear it. Its row is free again as soon as it is dead (`gateway.fleet.slots`); whoever takes it
goes on with its numbers.

A file has how many rows were ever in use, then by row and by column the sum, as doubles.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

from gateway.fleet.slots import SharedSlots

log = logging.getLogger(__name__)

ROWS = 64
"""Workers of a home, with those that they replace; who finds no row counts for itself alone."""
DOUBLE_BYTES = 8
Column = TypeVar("Column", bound=str)


class SharedSums(Generic[Column]):
    """One sum for each of `columns`, at least 0. `path`: of the file; None: nobody else adds.
    `adds`: False: for who only reads."""

    def __init__(
        self, columns: Sequence[Column], path: Path | None = None, *, adds: bool = True
    ) -> None:
        num_bytes = DOUBLE_BYTES * (1 + ROWS * len(columns))
        self.columns, self._num_columns = tuple(columns), len(columns)
        self._slots: SharedSlots | None = None
        row: int | None = 0
        if path is None:
            self._map = mmap.mmap(-1, num_bytes)
        else:
            if adds:
                self._slots = SharedSlots(path.with_suffix(".rows"), ROWS, share=ROWS)
                row = self._slots.take()
            self._map = map_file(path, num_bytes)
        if row is None:
            log.warning("%s: more than %d workers; this one counts by itself", path, ROWS)
            self._map, row = mmap.mmap(-1, num_bytes), 0
        self._row = row
        first = 1 + row * len(columns)
        self._own = {column: first + number for number, column in enumerate(columns)}
        """The places of this worker's numbers."""
        self._numbers = memoryview(self._map).cast("d")
        self._in_use = self._numbers[:0]
        """The rows in use."""
        self._num_rows = 0.0

    def add(self, column: Column, amount: float) -> None:
        numbers = self._numbers
        if numbers[0] <= self._row:  # also after another has put its own number there
            numbers[0] = self._row + 1
        numbers[self._own[column]] += amount

    def total(self) -> float:
        """Return what all workers have ever added, to all columns. Who finds it as it was need not
        look at `totals`."""
        if self._numbers[0] != self._num_rows:
            self._num_rows = self._numbers[0]
            num_rows = min(ROWS, int(self._num_rows))
            self._in_use = self._numbers[1 : 1 + self._num_columns * num_rows]
        return sum(self._in_use)

    def totals(self) -> list[float]:
        """Return the same by column, in the order of the columns."""
        self.total()
        return [sum(self._in_use[each :: self._num_columns]) for each in range(self._num_columns)]

    def close(self) -> None:
        """Give the row back. Idempotent."""
        if self._slots is not None:
            self._slots.close()


def map_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a file that processes of a home share; it is made, with zeros, where there is none.
    Raises: OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
        return mmap.mmap(file, num_bytes)
    finally:
        os.close(file)
