"""Marks engines of a home that get nothing new, in a file that all of its workers map: who looks
sees a mark as soon as it is made.

A mark is of an engine's number (`gateway.home.engine_number`), not of its process: one that is
started again stays marked. What runs at an engine when it is marked goes on there.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

MAX_ENGINES = 4096
"""The bound on numbers: one byte of the file for each."""
_NO, _YES = 0, 1


class DrainMarks:
    """The marks of one home. Constructing it makes the file, without a mark, where there is
    none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, MAX_ENGINES)
            self._bytes = mmap.mmap(file, MAX_ENGINES)
        finally:
            os.close(file)

    def __contains__(self, number: int) -> bool:
        return number < MAX_ENGINES and self._bytes[number] == _YES

    def mark(self, number: int) -> None:
        assert number < MAX_ENGINES, f"engine {number} of at most {MAX_ENGINES}"
        self._bytes[number] = _YES

    def remove(self, number: int) -> None:
        """Idempotent."""
        if number < MAX_ENGINES:
            self._bytes[number] = _NO

    def close(self) -> None:
        self._bytes.close()
