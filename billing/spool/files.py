"""Opens the files of a spool: regular files alone. A link, a pipe or a device in the place of one
is refused by its path, and neither followed nor waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read_file(path: Path, start: int = 0, end: int | None = None) -> bytes:
    """Read a part of a file. Raises: OSError."""
    try:
        fd = os.open(path, READ)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise no_file(path) from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise no_file(path)
    with open(fd, "rb") as file:
        file.seek(min(start, found.st_size))
        return file.read(-1 if end is None else max(0, end - start))


def create_anew(path: Path) -> int:
    """Create a file for this user alone, in the place of what is there. Raises: OSError."""
    path.unlink(missing_ok=True)
    return os.open(path, CREATE, 0o600)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def no_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))
