"""Locks of a cache's files that end with the process that holds them, also if it is killed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class FileLock:
    """A lock of a file, from `exclusive` or `shared` until `close`. A file that was removed while
    somebody waited for its lock is made anew, and waited for again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def exclusive(cls, path: Path, *, waits: bool = True) -> Self:
        """Raises: BlockingIOError, if somebody has it and this does not wait; OSError."""
        return cls._take(path, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))

    @classmethod
    def shared(cls, path: Path) -> Self:
        """Raises: OSError."""
        return cls._take(path, fcntl.LOCK_SH)

    @classmethod
    def _take(cls, path: Path, how: int) -> Self:
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, how)
                if is_at(fd, path):
                    return cls(fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def close(self) -> None:
        """Let go of it. More than once is the same as once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def is_at(fd: int, path: Path) -> bool:
    """Tell whether an open file is still the one at `path`."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(fd)
    return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)
