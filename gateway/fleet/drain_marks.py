"""Marks engines of a home that get nothing new, in a file that all of its workers map: who looks
sees a mark as soon as it is made.

A mark is of an engine's number (`gateway.home.engine_number`), not of its process: one that is
started again stays marked. What runs at an engine when it is marked goes on there for a time
(`gateway.fleet.moving.engine_stay`).

The file has a double for each number: the Unix seconds since which it is marked; below zero those
since which it is not any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gateway.fleet.shared_sums import map_file

MAX_ENGINES = 4096
"""The bound on numbers."""
NUM_BYTES = 8 * MAX_ENGINES


class DrainMark:
    """The mark of one engine. As it is, that of one which is never drained."""

    @property
    def is_set(self) -> bool:
        return False

    @property
    def changed_at(self) -> float | None:
        """Return since when it is so, in Unix seconds; None: it has always been."""
        return None


NEVER_DRAINED = DrainMark()


class DrainMarks:
    """The marks of one home. Constructing it makes the file, without a mark, where there is
    none. `clock`: Unix seconds."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._map = map_file(path, NUM_BYTES)
        self._changed_at = memoryview(self._map).cast("d")
        self._clock = clock

    def __contains__(self, number: int) -> bool:
        return number < MAX_ENGINES and self._changed_at[number] > 0

    def changed_at(self, number: int) -> float | None:
        """Return when it was marked, or ceased to be; None: it never was."""
        return abs(self._changed_at[number]) or None if number < MAX_ENGINES else None

    def mark(self, number: int) -> None:
        """Idempotent."""
        assert number < MAX_ENGINES, f"engine {number} of at most {MAX_ENGINES}"
        if number not in self:
            self._changed_at[number] = self._clock()

    def remove(self, number: int) -> None:
        """Idempotent."""
        if number in self:
            self._changed_at[number] = -self._clock()

    def of(self, number: int) -> DrainMark:
        return _NumberedMark(self, number)

    def close(self) -> None:
        self._changed_at.release()
        self._map.close()


class _NumberedMark(DrainMark):
    def __init__(self, marks: DrainMarks, number: int) -> None:
        self._marks, self._number = marks, number

    @property
    def is_set(self) -> bool:
        return self._number in self._marks

    @property
    def changed_at(self) -> float | None:
        return self._marks.changed_at(self._number)
