"""Counts the seconds of work that each worker of a home has sent a replica, in memory that all of
them map.

What a replica said is as old as its last status; what was sent since is known here at once, whoever
sent it. Each worker adds to numbers of its own, without a lock, and reads all of them: only
differences between two readings are used, so that what a killed worker had counted is in both, and
nobody has to clear it. Its row is free again as soon as it is dead (`gateway.fleet.slots`); whoever
takes it goes on with its numbers.

A file has, by lane and then by row, the sum of seconds as a double.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane
from gateway.fleet.slots import SharedSlots

log = logging.getLogger(__name__)

ROWS = 64
"""Workers of a home, with those that they replace; who finds no row counts for itself alone."""
PLACES = {lane: ROWS * number for number, lane in enumerate(LANE_WEIGHTS)}
NUM_BYTES = 8 * ROWS * len(LANE_WEIGHTS)


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
        self._lanes = {lane: self._numbers[place : place + ROWS] for lane, place in PLACES.items()}

    def add(self, lane: Lane, seconds: float) -> None:
        self._numbers[PLACES[lane] + self._row] += seconds

    def total_s(self, lane: Lane) -> float:
        """Return the seconds that all workers have ever sent in a lane."""
        return sum(self._lanes[lane])

    def totals_s(self) -> dict[Lane, float]:
        return {lane: sum(numbers) for lane, numbers in self._lanes.items()}

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
