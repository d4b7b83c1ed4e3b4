"""Counts the seconds of work that each worker of a home has sent a replica, in memory that all of
them map.

What a replica said is as old as its last status; what was sent since is known here at once, whoever
sent it. Each worker adds to numbers of its own, without a lock, and reads all of them: only
differences between two readings are used, so that what a killed worker had counted is in both, and
nobody has to clear it. Its row is free again as soon as it is dead (`gateway.fleet.slots`); whoever
takes it goes on with its numbers.

A file has how many rows were ever in use, then by row and by the lanes' ranks the sum of seconds,
as doubles.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

from engine.fairness import LANE_RANKS
from engine.protocol import Lane
from gateway.fleet.slots import SharedSlots

log = logging.getLogger(__name__)

ROWS = 64
"""Workers of a home, with those that they replace; who finds no row counts for itself alone."""
NUM_LANES = len(LANE_RANKS)
NUM_BYTES = 8 * (1 + ROWS * NUM_LANES)


class SentWork:
    """Counts what is sent to one replica. `path`: of the file; None: nobody else sends."""

    def __init__(self, path: Path | None = None) -> None:
        self._slots: SharedSlots | None = None
        row: int | None = 0
        if path is None:
            self._map = mmap.mmap(-1, NUM_BYTES)
        else:
            self._slots = SharedSlots(path.with_suffix(".rows"), ROWS, share=ROWS)
            row = self._slots.take()
            self._map = _map_file(path)
        if row is None:
            log.warning("%s: more than %d workers; this one counts by itself", path, ROWS)
            self._map, row = mmap.mmap(-1, NUM_BYTES), 0
        self._row = row
        self._numbers = memoryview(self._map).cast("d")
        self._in_use = self._numbers[:0]
        """The rows in use."""
        self._num_rows = 0.0

    def add(self, lane: Lane, seconds: float) -> None:
        numbers = self._numbers
        if numbers[0] <= self._row:  # also after another has put its own number there
            numbers[0] = self._row + 1
        numbers[1 + NUM_LANES * self._row + LANE_RANKS[lane]] += seconds

    def total_s(self) -> float:
        """Return the seconds that all workers have ever sent. Who finds it as it was need not look
        at `totals_s`."""
        if self._numbers[0] != self._num_rows:
            self._num_rows = self._numbers[0]
            self._in_use = self._numbers[1 : 1 + NUM_LANES * min(ROWS, int(self._num_rows))]
        return sum(self._in_use)

    def totals_s(self) -> list[float]:
        """Return the same by the lanes' ranks."""
        self.total_s()
        return [sum(self._in_use[rank::NUM_LANES]) for rank in range(NUM_LANES)]

    def close(self) -> None:
        """Give the row back. Idempotent."""
        if self._slots is not None:
            self._slots.close()


def _map_file(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, NUM_BYTES)
        return mmap.mmap(file, NUM_BYTES)
    finally:
        os.close(file)
