"""Opens, reads, writes and removes the segment files of one engine, in a folder that it locks.

Engines may share a path: each takes the first folder of its layout there that nobody has locked, so
that one that starts again finds what it or its like left, and one that starts beside another does
not wait. A folder that no engine wanted for a day is removed by the next one that starts.

Past the page cache (O_DIRECT) where the file system can: what is read once for the pool need not be
kept in host memory as well.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.tiers.buffers import PAGE_BYTES, to_pages
from engine.tiers.segments import ID_BYTES, RecordCipher, SegmentFormat

log = logging.getLogger(__name__)

Write = Callable[[int, memoryview, int], int]
"""(file descriptor, bytes, offset) -> how many were written, as `os.pwrite`."""

MAX_FOLDERS = 64
"""Engines of one layout that share a path at a time."""
UNUSED_S = 86_400.0

_NAME = re.compile(r"(\d{10})\.kv")
_FOLDER = re.compile(r"[0-9a-f]{16}-\d+")
_LOCK, _PROBE = "lock", "probe"

PROBE_BYTES = 16 << 20
"""Written and read when a tier starts, to measure what a read takes."""


class FolderInUse(OSError):
    """Another process has locked a folder."""


class SegmentFile:
    """One segment, open. Its fields are guarded by the lock of the tier that has it."""

    def __init__(
        self,
        path: Path,
        fd: int,
        number: int,
        digests: list[bytes],
        cipher: RecordCipher | None = None,
    ) -> None:
        self.path = path
        self.fd = fd
        self.number = number
        self.cipher = cipher
        self.digests = digests
        """By slot."""
        self.is_hot = bytearray(len(digests))
        """By slot: whether it was read since it was written."""
        self.last_used = number
        """A tick of the tier's clock of uses."""
        self._num_readers = 0
        self._is_dropped = False

    def pin(self) -> None:
        """Keep the file open for a reader, removed or not."""
        self._num_readers += 1

    def unpin(self) -> bool:
        """End a pin; whether the file is nobody's now, and for the caller to `discard`."""
        self._num_readers -= 1
        return self._is_dropped and not self._num_readers

    def drop(self) -> bool:
        """Give the file up: nobody pins it from now on. Returns as `unpin`."""
        self._is_dropped = True
        return not self._num_readers

    def discard(self) -> None:
        """Close the file. What is unlinked leaves the disk here, which takes its time: no lock that
        a step may want is to be held."""
        os.close(self.fd)
        self.fd = -1

    def read_at(self, memory: memoryview, offset: int) -> int:
        """Fill `memory`, whole pages; how many bytes the file had."""
        return os.preadv(self.fd, [memory], offset)


def open_folder(root: Path, form: SegmentFormat, write: Write = os.pwrite) -> SegmentFolder:
    """Return the first folder of a layout that nobody has. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    layout = form.layout.hex()[:16]
    _remove_unused(root, but=layout)
    for number in range(MAX_FOLDERS):
        try:
            return SegmentFolder(root / f"{layout}-{number}", form, write)
        except FolderInUse:
            continue
    raise FolderInUse(errno.EBUSY, f"{MAX_FOLDERS} other engines use it")


def remove_plain(root: Path, layout: bytes) -> None:
    """Remove what engines wrote of a layout before they encrypted it; what one uses stays. Raises
    OSError."""
    for path in sorted(root.glob(f"{layout.hex()[:16]}-*")):
        if not _FOLDER.fullmatch(path.name):
            continue
        if _remove(path):
            log.info("%s, which is not encrypted, is removed", path)
        elif path.exists():
            log.warning("%s is not encrypted, and stays: it is in use, or cannot be removed", path)


def _remove_unused(root: Path, but: str) -> None:
    """Remove folders of other layouts. `but`: the layout whose folders stay, in use or not."""
    for path in root.iterdir():
        if not _FOLDER.fullmatch(path.name) or path.name.startswith(but):
            continue
        try:
            if time.time() - (path / _LOCK).stat().st_mtime < UNUSED_S:
                continue
        except FileNotFoundError:  # another engine has just removed it
            continue
        if _remove(path):
            log.info("%s, which no engine used for a day, is removed", path)


def _remove(path: Path) -> bool:
    """Remove a folder of segments; False: an engine uses it, has just removed it, or a part of it
    cannot be removed."""
    try:
        fd = _lock(path / _LOCK)
    except OSError:  # FolderInUse and FileNotFoundError among them
        return False
    shutil.rmtree(path, ignore_errors=True)
    os.close(fd)
    return not path.exists()


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(fd)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise FolderInUse(errno.EBUSY, "another engine uses it") from error
        raise
    return fd


class SegmentFolder:
    """A folder of one layout. OSError where it cannot be made, locked or written to."""

    def __init__(self, path: Path, form: SegmentFormat, write: Write = os.pwrite) -> None:
        self.path = path
        self._form = form
        self._write = write
        path.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock(path / _LOCK)

    def close(self) -> None:
        os.utime(self._lock_fd)
        os.close(self._lock_fd)

    def open_all(self) -> list[SegmentFile]:
        """Return the segments of this layout, oldest first, each sealed; what else looks like one
        is removed: another model's, or one without a whole record."""
        found = []
        for path in sorted(self.path.iterdir()):
            if (named := _NAME.fullmatch(path.name)) is None:
                continue
            segment = self._open(path, int(named[1]))
            if segment is not None:
                found.append(segment)
        return found

    def measure(self, num_records: int, num_threads: int) -> tuple[float, float]:
        """Return the seconds until the first record is read, and the bytes a second of reading
        `num_records` at once in each of so many threads."""
        record_bytes = self._form.record_bytes
        part = num_records * record_bytes
        num_parts = max(num_threads, PROBE_BYTES // part)
        path = self.path / _PROBE
        probe = SegmentFile(path, _open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), 0, [])
        memories = [memoryview(mmap.mmap(-1, part)) for _ in range(num_threads)]
        try:
            for number in range(num_parts):
                self.write(probe, memories[0], number * part)
            if not fcntl.fcntl(probe.fd, fcntl.F_GETFL) & os.O_DIRECT:
                os.fdatasync(probe.fd)  # what is not written cannot leave the page cache
                os.posix_fadvise(probe.fd, 0, 0, os.POSIX_FADV_DONTNEED)

            def read_parts(thread: int) -> None:
                for number in range(thread, num_parts, num_threads):
                    probe.read_at(memories[thread], number * part)

            with ThreadPoolExecutor(num_threads) as threads:
                started_s = time.perf_counter()
                list(threads.map(read_parts, range(num_threads)))
                parts_s = time.perf_counter() - started_s
            latencies: list[float] = []
            for number in range(num_parts):
                started_s = time.perf_counter()
                probe.read_at(memories[0][:record_bytes], number * part)
                latencies.append(time.perf_counter() - started_s)
            return statistics.median(latencies), num_parts * part / parts_s
        finally:
            self.unlink(probe)
            probe.discard()

    def create(self, number: int) -> SegmentFile:
        """Return a new, empty segment. The lock's time says then that the folder is in use, also
        after a kill."""
        os.utime(self._lock_fd)
        path, segment_id = self.path / f"{number:010d}.kv", os.urandom(ID_BYTES)
        fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        segment = SegmentFile(path, fd, number, [], self._form.cipher_of(segment_id))
        try:
            self.write_text(segment, self._form.header(number, segment_id), 0)
        except OSError:
            self.unlink(segment)
            segment.discard()
            raise
        return segment

    def unlink(self, segment: SegmentFile) -> None:
        """Remove the name of a segment, which may still be read."""
        segment.path.unlink(missing_ok=True)

    def seal(self, segment: SegmentFile) -> None:
        """Write the footer behind the records."""
        footer = self._form.footer(segment.digests)
        self.write_text(segment, footer, self._form.offset_of(len(segment.digests)))

    def write_text(self, segment: SegmentFile, text: bytes, offset: int) -> None:
        """Write whole pages that are in no buffer of the tier."""
        with mmap.mmap(-1, len(text)) as aligned:
            aligned[:] = text
            with memoryview(aligned) as memory:
                self.write(segment, memory, offset)

    def write(self, segment: SegmentFile, memory: memoryview, offset: int) -> None:
        """Write all of it, page-aligned, or raise an OSError."""
        if self._write(segment.fd, memory, offset) != len(memory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self, path: Path, number: int) -> SegmentFile | None:
        fd = _open(path, os.O_RDWR)
        file_bytes = os.fstat(fd).st_size

        def read_at(offset: int, size: int) -> memoryview:
            memory = memoryview(mmap.mmap(-1, to_pages(max(size, 1))))
            return memory[: os.preadv(fd, [memory], offset)][:size]

        form, cipher = self._form, None
        digests: list[bytes] | None = []
        segment_id = form.read_header(read_at(0, PAGE_BYTES))
        if segment_id is not None:
            cipher = form.cipher_of(segment_id)
            digests = form.read_footer(read_at, file_bytes)
        segment = SegmentFile(path, fd, number, digests or [], cipher)
        if digests is None:
            digests = form.read_records(read_at, file_bytes, cipher)
            segment = SegmentFile(path, fd, number, digests, cipher)
            os.ftruncate(fd, form.offset_of(len(digests)))
            if segment.digests:
                self.seal(segment)
        if segment.digests:
            return segment
        self.unlink(segment)
        segment.discard()
        return None


def _open(path: Path, flags: int) -> int:
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Some file systems make the file before they refuse the flag.
    return os.open(path, flags & ~os.O_EXCL, 0o600)
