"""One spool directory: its lock, its segments, its cursor. Every call blocks; `spool` runs them in
threads.

    DIRECTORY/lock             flock held by the process that owns the directory
    DIRECTORY/00000007.log     segments, written in order; all but the last are sealed
    DIRECTORY/cursor           the position up to which Postgres has everything (JSON)
    DIRECTORY/../quarantine/   damaged or refused records, kept for a person to read

Knows no asyncio and no database.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from billing.errors import SpoolLocked
from billing.events import UsageEvent
from billing.spool.format import (
    CloseRecord,
    OpenAttempt,
    PlacedRecord,
    SegmentStart,
    apply,
    frame,
    is_torn,
    scan,
)

log = logging.getLogger(__name__)

LOCK_RETRY_S = 0.05
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Position(NamedTuple):
    """A position between two records, ordered as they were written."""

    segment: int
    offset: int


class Batch(msgspec.Struct, frozen=True):
    """Closed events in the order in which they were closed, and the position behind them."""

    events: list[UsageEvent]
    end: Position
    lost: int = 0
    """The number of events that were written and are damaged now; an alarm."""


class SpoolDirectory:
    """A spool directory, locked from construction to `release` or `remove`.

    Construction reads the segments, closes the attempts that were left open and starts a new
    segment. Raises: SpoolLocked when another process holds the directory for longer than
    `lock_wait_s`; OSError when the disk fails.
    """

    def __init__(self, path: Path, *, lock_wait_s: float) -> None:
        self.path = path
        self._lock = _lock(path, lock_wait_s)
        self._fd = -1
        self._unsynced = 0
        """Bytes that were written behind the durable end."""
        try:
            self.cursor = self._load_cursor()
            self.sizes: dict[int, int] = {}
            """Synced bytes by segment. One thread reads it while another adds or removes a key, so
            it is read by atomic operations (`sorted(...)`, a lookup), never by a loop."""
            self.unshipped = 0
            """Closed events behind the cursor when the directory was opened."""
            still_open = self._replay()
            self.recovered = [attempt.recovered() for attempt in still_open]
            # The segment starts with them as open, so that they survive if this write is torn.
            start = frame(SegmentStart(still_open))
            closes = b"".join(frame(CloseRecord(event)) for event in self.recovered)
            self.rotate(start + closes)
            self.unshipped += len(self.recovered)
        except BaseException:
            self.release()
            raise

    @property
    def durable_end(self) -> Position:
        """The position up to which everything has been synced."""
        return Position(self._segment, self.sizes[self._segment])

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    def write(self, data: bytes | bytearray) -> None:
        """Append without a sync: the data survives a kill -9, but maybe not a power failure.

        Raises: OSError, with nothing changed.
        """
        try:
            _write(self._fd, data)
        except OSError:
            self._cut(self._unsynced)
            raise
        self._unsynced += len(data)

    @property
    def fd(self) -> int:
        """The segment's file, for a caller that syncs it and calls `synced` or `cut` then."""
        return self._fd

    def synced(self, num_bytes: int) -> None:
        """Note that a sync, which began after so many bytes were written, has succeeded."""
        self.sizes[self._segment] += num_bytes
        self._unsynced -= num_bytes

    def cut(self) -> None:
        """Truncate the segment to what was synced. Raises: OSError."""
        self._unsynced = 0
        self._cut(0)

    def append(self, data: bytes | bytearray) -> float:
        """Write `data`, sync everything that was written, and return the seconds that it took.

        Raises: OSError, with the segment truncated to what was synced before.
        """
        began_at = time.perf_counter()
        try:
            self.write(data)
            os.fdatasync(self._fd)
        except OSError:
            self.cut()
            raise
        self.synced(self._unsynced)
        return time.perf_counter() - began_at

    def _cut(self, unsynced: int) -> None:
        size = self.sizes[self._segment] + unsynced
        os.ftruncate(self._fd, size)
        os.lseek(self._fd, size, os.SEEK_SET)

    def rotate(self, start: bytes) -> None:
        """Seal the segment, which must be synced, and begin the next one with `start`.

        Raises: OSError, with nothing changed.
        """
        number = max(self.sizes, default=0) + 1
        name = self._segment_path(number)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, start)
            os.fdatasync(fd)
            _sync_directory(self.path)
        except OSError:
            os.close(fd)
            name.unlink()
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self.sizes[number] = len(start)
        self._fd, self._segment = fd, number

    def read_closed(self, limit: int, end: Position) -> Batch:
        """Read at most `limit` closed events between the cursor and `end`."""
        events: list[UsageEvent] = []
        position = self.cursor
        for number in sorted(self.sizes):
            if not self.cursor.segment <= number <= end.segment:
                continue
            offset = position.offset if number == position.segment else 0
            data = self._read(number, offset, end.offset if number == end.segment else None)
            for placed in scan(data):
                if isinstance(placed.record, CloseRecord):
                    events.append(placed.record.event)
                elif placed.record is None:
                    self._keep_damage(number, placed, data, offset)
                position = Position(number, offset + placed.end)
                if len(events) == limit:
                    return Batch(events, position)
        return Batch(events, end)

    def commit(self, batch: Batch) -> None:
        """Move the cursor behind a batch that Postgres has, and delete finished segments.

        The cursor is not synced, so that closes need not wait for it: after a power failure an
        older one ships events again, which are booked once.
        """
        temporary = self.path / "cursor.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, msgspec.json.encode(batch.end))
        finally:
            os.close(fd)
        temporary.replace(self.path / "cursor")
        self.cursor = batch.end
        for number in sorted(self.sizes):
            if number < batch.end.segment:
                # Segments are deleted in order, so those that remain have no gap.
                self._segment_path(number).unlink()
                del self.sizes[number]

    def quarantine(self, name: str, data: bytes) -> None:
        """Keep bytes that cannot be billed in a file for a person."""
        folder = self.path.parent / "quarantine"
        folder.mkdir(mode=0o700, exist_ok=True)
        kept = folder / f"{self.path.name}-{name}"
        if not kept.exists():
            kept.write_bytes(data)
            _sync_directory(folder)
        log.error("spool %s: %d bytes could not be billed, kept in %s", self.path, len(data), kept)

    def release(self) -> None:
        """Unlock the directory and keep its files."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1  # another file may get the number
        os.close(self._lock)

    def remove(self) -> None:
        """Delete the directory, whose events must all be shipped, and unlock it."""
        for name in sorted(self.path.iterdir()):
            name.unlink()
        self.path.rmdir()
        self.release()

    def _segment_path(self, number: int) -> Path:
        return self.path / f"{number:08d}.log"

    def _load_cursor(self) -> Position:
        try:
            return read_cursor(self.path)
        except msgspec.MsgspecError:
            log.error("spool %s: unreadable cursor, shipping from the beginning", self.path)
            return Position(0, 0)

    def _replay(self) -> list[OpenAttempt]:
        """Return the attempts that are still open. Count unshipped events, truncate a torn end and
        quarantine damage."""
        open_attempts: dict[str, OpenAttempt] = {}
        numbers = sorted(int(name.stem) for name in self.path.glob("[0-9]" * 8 + ".log"))
        if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
            log.error("spool %s: segments are missing among %s", self.path, numbers)
        for number in numbers:
            data = self._segment_path(number).read_bytes()
            self.sizes[number] = len(data)
            for placed in scan(data):
                if placed.record is None:
                    self._damaged(number, placed, data, last=number == numbers[-1])
                else:
                    apply(open_attempts, placed.record)
                    unshipped = Position(number, placed.start) >= self.cursor
                    self.unshipped += unshipped and isinstance(placed.record, CloseRecord)
        return list(open_attempts.values())

    def _damaged(self, number: int, placed: PlacedRecord, data: bytes, *, last: bool) -> None:
        """Truncate a torn end; quarantine any other damage, which may be loss of usage."""
        if last and is_torn(data, placed):
            size = placed.end - placed.start
            log.warning("spool %s: cut %d torn bytes off segment %d", self.path, size, number)
            with self._segment_path(number).open("r+b") as file:
                file.truncate(placed.start)
                os.fsync(file.fileno())
            self.sizes[number] = placed.start
        else:
            self._keep_damage(number, placed, data)

    def _read(self, number: int, start: int, end: int | None) -> bytes:
        """Read a part of a segment: it is large, and read twice a second."""
        with self._segment_path(number).open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else max(0, end - start))

    def _keep_damage(self, number: int, placed: PlacedRecord, data: bytes, offset: int = 0) -> None:
        """Quarantine damage. `offset`: the position of `data` in its segment."""
        name = f"{number:08d}-{offset + placed.start}.corrupt"
        self.quarantine(name, data[placed.start : placed.end])


def read_cursor(path: Path) -> Position:
    """Read the cursor of a directory; without one everything ships again, which is harmless.

    Raises: MsgspecError, OSError.
    """
    try:
        return msgspec.json.decode((path / "cursor").read_bytes(), type=Position)
    except FileNotFoundError:
        return Position(0, 0)


def closed_events(path: Path) -> Iterator[tuple[UsageEvent, bool]]:
    """Yield every closed event of a directory, and whether it has shipped. Nothing is locked or
    changed, so the directory may be in use: a record that is not complete yet is left out, and a
    segment that is deleted meanwhile has shipped.

    Raises: OSError.
    """
    try:
        cursor = read_cursor(path)
    except msgspec.MsgspecError:
        cursor = Position(0, 0)
    for segment in sorted(path.glob("[0-9]" * 8 + ".log")):
        try:
            data = segment.read_bytes()
        except FileNotFoundError:
            continue
        for placed in scan(data):
            if isinstance(placed.record, CloseRecord):
                place = Position(int(segment.stem), placed.start)
                yield placed.record.event, place < cursor


def _lock(path: Path, wait_s: float) -> int:
    """Take an exclusive flock on `path`/lock, which is created if it is missing."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileExistsError, FileNotFoundError):
            if path.exists() and not path.is_dir():
                raise
            continue  # removed by an adopter between two steps
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(fd, path / "lock"):
                return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                raise SpoolLocked(f"{path} is held by another process") from None
            time.sleep(LOCK_RETRY_S)
        os.close(fd)


def _is_still(fd: int, path: Path) -> bool:
    """Return False when the lock file was removed with its directory while we waited for it."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _write(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
