"""One spool directory: its lock, its segments, its cursor. Every call blocks; `spool` runs them in
threads.

    DIRECTORY/lock             flock held by the process that owns the directory
    DIRECTORY/00000007.log     segments, written in order; all but the last are sealed
    DIRECTORY/cursor           the position up to which Postgres has everything (JSON)
    DIRECTORY/../quarantine/   damaged or refused records, kept for a person (`quarantine`)

A sealed segment with damage is repaired once: the attempts that it shows as open and its successor
does not carry have ended in a record that cannot be read, and are closed at their last checkpoint
behind its other records (`damage`).

Knows no asyncio and no database.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from billing.errors import SpoolLocked
from billing.events import UsageEvent
from billing.spool.damage import Examination, Span
from billing.spool.files import create_anew, read_file, sync_folder
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
from billing.spool.quarantine import Context, Quarantine, Reason, name_of

log = logging.getLogger(__name__)

LOCK_RETRY_S = 0.05
MAX_POSITION = 2**62
"""No file has more bytes."""
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
    num_repaired: int = 0
    """The number of events that repairs have added since the last batch."""
    has_live_damage: bool = False
    """True if the segment that is written has damage, which is examined once it is sealed."""


class SpoolDirectory:
    """A spool directory, locked from construction to `release` or `remove`.

    Construction reads the segments, closes the attempts that were left open and starts a new
    segment. Raises: SpoolLocked when another process holds the directory for longer than
    `lock_wait_s`; OSError when the disk fails.
    """

    def __init__(self, path: Path, *, lock_wait_s: float) -> None:
        self.path = path
        self.quarantine = Quarantine(path.parent)
        self._damaged: set[int] = set()
        """Segments with damage that was found while they were written."""
        self._repaired: set[int] = set()
        self._num_repaired = 0
        self._carried: dict[int, set[str]] = {}
        """Attempts that were open when each segment of this process began: its start may be damaged
        by now."""
        self._lock = _lock(path, lock_wait_s)
        self._fd = -1
        self.unsynced = bytearray()
        """Bytes that were written behind the durable end."""
        self._is_doubtful = False
        """True if a sync failed: what is unsynced may be neither on disk nor on its way."""
        self.num_writes = self.num_syncs = self.num_bytes = 0
        """Counts what was written to segments and synced since construction."""
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
            self._cut(len(self.unsynced))
            raise
        self.unsynced += data
        self.num_writes += 1
        self.num_bytes += len(data)

    @property
    def fd(self) -> int:
        """The segment's file, for a caller that syncs it and calls `synced` or `not_synced`
        then."""
        return self._fd

    def synced(self, num_bytes: int) -> None:
        """Note that a sync, which began after so many bytes were written, has succeeded."""
        self.sizes[self._segment] += num_bytes
        del self.unsynced[:num_bytes]
        self.num_syncs += 1

    def not_synced(self) -> None:
        """Note that a sync has failed. The kernel tells of it once, and may take the data for
        written from then on: the next `append` writes it again."""
        self._is_doubtful = True

    def cut(self) -> None:
        """Truncate the segment to what was synced. Raises: OSError."""
        self.unsynced = bytearray()
        self._cut(0)

    def append(self, data: bytes | bytearray) -> float:
        """Write `data`, sync everything that was written, and return the seconds that it took.

        Raises: OSError, with the segment as it was before.
        """
        began_at, kept = time.perf_counter(), len(self.unsynced)
        try:
            if self._is_doubtful:
                _write_at(self._fd, self.unsynced, self.sizes[self._segment])
            self.write(data)
            os.fdatasync(self._fd)
        except OSError:
            self._is_doubtful = True
            del self.unsynced[kept:]
            self._cut(kept)
            raise
        self._is_doubtful = False
        self.synced(len(self.unsynced))
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
            sync_folder(self.path)
        except OSError:
            os.close(fd)
            name.unlink()
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._carried[number] = _carried_by(start) or set()
        self.sizes[number] = len(start)
        self.num_writes += 1
        self.num_syncs += 1
        self.num_bytes += len(start)
        self._fd, self._segment = fd, number

    def read_closed(self, limit: int, end: Position) -> Batch:
        """Read at most `limit` closed events between the cursor and `end`."""
        events: list[UsageEvent] = []
        position = self.cursor
        for number in sorted(self.sizes):
            if not self.cursor.segment <= number <= end.segment:
                continue
            if number in self._damaged and number < end.segment:
                self._repair(number)
            offset = position.offset if number == position.segment else 0
            data = self._read(number, offset, end.offset if number == end.segment else None)
            for placed in scan(data):
                if isinstance(placed.record, CloseRecord):
                    events.append(placed.record.event)
                elif placed.record is None and number == end.segment:
                    self._keep_live_damage(number, placed, data, offset)
                elif placed.record is None and number not in self._repaired:
                    self._repair(number)
                    return self.read_closed(limit, end)
                position = Position(number, offset + placed.end)
                if len(events) == limit:
                    return self._batch(events, position)
        return self._batch(events, end)

    def _batch(self, events: list[UsageEvent], end: Position) -> Batch:
        num_repaired, self._num_repaired = self._num_repaired, 0
        has_live_damage = self._segment in self._damaged
        return Batch(events, end, num_repaired=num_repaired, has_live_damage=has_live_damage)

    def commit(self, batch: Batch) -> None:
        """Move the cursor behind a batch that Postgres has, and delete finished segments.

        The cursor is not synced, so that closes need not wait for it: after a power failure an
        older one ships events again, which are booked once.
        """
        temporary = self.path / "cursor.new"
        fd = create_anew(temporary)
        try:
            _write(fd, msgspec.json.encode(_StoredCursor.of(batch.end)))
        finally:
            os.close(fd)
        temporary.replace(self.path / "cursor")
        self.cursor = batch.end
        for number in sorted(self.sizes):
            if number < batch.end.segment:
                # Segments are deleted in order, so those that remain have no gap.
                self._segment_path(number).unlink()
                del self.sizes[number]
                self._carried.pop(number, None)

    def keep_refused(self, event: UsageEvent) -> None:
        """Keep an event that Postgres refuses, for a person."""
        data = frame(CloseRecord(event))
        name = name_of(self.path.name, event.id, data, "refused")
        self.quarantine.keep(name, data, Context(reason="refused"))
        log.error("spool %s: Postgres refuses an event, kept as %s", self.path, name)

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
        except (msgspec.MsgspecError, ValueError):
            log.error("spool %s: unreadable cursor, shipping from the beginning", self.path)
            return Position(0, 0)

    def _replay(self) -> list[OpenAttempt]:
        """Return the attempts that are still open. Count unshipped events, truncate a torn end and
        quarantine damage."""
        open_attempts: dict[str, OpenAttempt] = {}
        numbers = sorted(int(name.stem) for name in self.path.glob("[0-9]" * 8 + ".log"))
        for number in numbers:
            self.sizes[number] = self._segment_path(number).lstat().st_size
        if numbers:
            self._cut_torn_end(numbers[-1])
        ended: set[str] = set()
        for number in numbers:
            data = self._read(number, 0, None)
            if number not in self._repaired and self._has_damage(number, data):
                ended |= self._repair(number)
                data = self._read(number, 0, None)
            for placed in scan(data):
                if placed.record is not None:
                    apply(open_attempts, placed.record)
                    unshipped = Position(number, placed.start) >= self.cursor
                    self.unshipped += unshipped and isinstance(placed.record, CloseRecord)
        self._num_repaired = 0  # they are counted as unshipped
        return [it for it in open_attempts.values() if it.attempt.id not in ended]

    def _cut_torn_end(self, number: int) -> None:
        """Truncate what a crash left of a record that nobody was told of."""
        data = self._read(number, 0, None)
        for placed in scan(data):
            if placed.record is None and is_torn(data, placed):
                size = placed.end - placed.start
                log.warning("spool %s: cut %d torn bytes off segment %d", self.path, size, number)
                with self._segment_path(number).open("r+b") as file:
                    file.truncate(placed.start)
                    os.fsync(file.fileno())
                self.sizes[number] = placed.start

    def _has_damage(self, number: int, data: bytes) -> bool:
        """True if a segment has damage, or the next one is missing."""
        is_followed = number + 1 in self.sizes or number == max(self.sizes)
        return not is_followed or any(placed.record is None for placed in scan(data))

    def _repair(self, number: int) -> set[str]:
        """Find out what damage has lost since the segment `number`: close what is known, and keep
        the rest for a person. Return the attempts that wait for that person or were never to be
        billed."""
        examination, last, carried = Examination(), number, None
        for each in sorted(it for it in self.sizes if it >= number):
            if each > number:
                if each > last + 1:
                    examination.spans.append(Span(last + 1, 0, b""))
                carried = self._carried_into(each)
                if carried is not None:
                    break
            examination.read(each, self._read(each, 0, self.sizes[each]))
            last = each
        for span in examination.spans:
            name = _entry_name(self.path, span)
            known = self.quarantine.context_of(name)
            if known is not None and known.outcome in ("unresolved", "accepted", "discarded"):
                examination.settle(span, known.attempt)
            elif Position(span.segment, span.start) < self.cursor:
                # Without a context the shipper has found it, and shipped no event of it.
                if known is not None or not self.quarantine.has(name):
                    examination.mark_shipped(span)
        examination.finish(carried)
        # First what is billed: an examination that was cut short finds the rest again.
        self._append_to_sealed(last, examination.closes)
        for finding in examination.findings:
            self._keep(
                finding.span,
                Context(
                    reason="damaged" if finding.span.data else "missing",
                    outcome=finding.outcome,
                    attempt=finding.attempt,
                    checkpoint=finding.checkpoint,
                    candidates=finding.candidates,
                ),
            )
        done = {each for each in self.sizes if number <= each <= last}
        self._repaired |= done
        self._damaged -= done
        return examination.ended

    def _carried_into(self, number: int) -> set[str] | None:
        """Return the attempts that were open when a segment began; None: its start is damaged."""
        known = self._carried.get(number)
        return _carried_by(self._read(number, 0, self.sizes[number])) if known is None else known

    def _append_to_sealed(self, number: int, events: Sequence[UsageEvent]) -> None:
        """Append closes to a segment that is not written any more, all or none of them."""
        if not events:
            return
        path, beside = self._segment_path(number), self.path / "repaired.new"
        data = read_file(path) + b"".join(frame(CloseRecord(event)) for event in events)
        fd = create_anew(beside)
        try:
            _write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        beside.replace(path)
        sync_folder(self.path)
        self.sizes[number] = len(data)
        self._num_repaired += len(events)

    def _read(self, number: int, start: int, end: int | None) -> bytes:
        """Read a part of a segment: it is large, and read twice a second."""
        return read_file(self._segment_path(number), start, end)

    def _keep_live_damage(
        self, number: int, placed: PlacedRecord, data: bytes, offset: int
    ) -> None:
        """Keep damage of the segment that is written; `offset`: the position of `data` in it."""
        self._damaged.add(number)
        span = Span(number, offset + placed.start, data[placed.start : placed.end])
        self._keep(span, None)

    def _keep(self, span: Span, context: Context | None) -> None:
        name = _entry_name(self.path, span)
        self.quarantine.keep(name, span.data, context)
        size = len(span.data)
        if not size:
            log.error("spool %s: segment %d is missing, see %s", self.path, span.segment, name)
        elif context is None or context.outcome == "unresolved":
            log.error("spool %s: %d bytes could not be billed, kept as %s", self.path, size, name)
        else:
            outcome = context.outcome
            log.warning("spool %s: %d bytes are damaged (%s): %s", self.path, size, outcome, name)


def _carried_by(data: bytes) -> set[str] | None:
    """Return the attempts that a segment begins with; None: its start is damaged."""
    first = next(scan(data), None)
    if first is None or not isinstance(first.record, SegmentStart):
        return None
    return {each.attempt.id for each in first.record.open}


class _StoredCursor(msgspec.Struct, frozen=True):
    """The cursor as it is stored, with a checksum: a digit that changed would skip events."""

    segment: int
    offset: int
    checksum: int

    @classmethod
    def of(cls, position: Position) -> _StoredCursor:
        return cls(*position, crc32(repr(tuple(position)).encode()))


def read_cursor(path: Path) -> Position:
    """Read the cursor of a directory; without one everything ships again, which is harmless.

    Raises: MsgspecError, ValueError, OSError.
    """
    try:
        data = read_file(path / "cursor")
    except FileNotFoundError:
        return Position(0, 0)
    if data.startswith(b"["):  # of a version that stored no checksum
        return _checked(msgspec.json.decode(data, type=Position))
    stored = msgspec.json.decode(data, type=_StoredCursor)
    position = Position(stored.segment, stored.offset)
    if stored != _StoredCursor.of(position):
        raise msgspec.ValidationError("its checksum differs")
    return _checked(position)


def _checked(position: Position) -> Position:
    if not all(0 <= number <= MAX_POSITION for number in position):
        raise msgspec.ValidationError("it lies in no file")
    return position


class UnexaminedDamage(NamedTuple):
    """Damage in a spool that no gateway has come upon."""

    spool: str
    span: Span


def read_spool(path: Path) -> Iterator[tuple[UsageEvent, bool] | UnexaminedDamage]:
    """Yield every closed event of a directory, and whether it has shipped, and damage behind the
    cursor that is not in the quarantine. Nothing is locked or changed, so the directory may be in
    use: a record that is not complete yet is left out, and a segment that is deleted meanwhile has
    shipped.

    Raises: OSError.
    """
    try:
        cursor = read_cursor(path)
    except (msgspec.MsgspecError, ValueError):
        cursor = Position(0, 0)
    quarantine = Quarantine(path.parent)
    for segment in sorted(path.glob("[0-9]" * 8 + ".log")):
        try:
            data = read_file(segment)
        except FileNotFoundError:
            continue
        for placed in scan(data):
            place = Position(int(segment.stem), placed.start)
            if isinstance(placed.record, CloseRecord):
                yield placed.record.event, place < cursor
            elif placed.record is None and place >= cursor and not is_torn(data, placed):
                span = Span(*place, data[placed.start : placed.end])
                if not quarantine.has(_entry_name(path, span)):
                    yield UnexaminedDamage(path.name, span)


def closed_events(path: Path) -> Iterator[tuple[UsageEvent, bool]]:
    """Yield the events of `read_spool` without its damage. Raises: OSError."""
    return (found for found in read_spool(path) if not isinstance(found, UnexaminedDamage))


def _entry_name(path: Path, span: Span) -> str:
    """Return the name of damage of a spool in the quarantine."""
    reason: Reason = "damaged" if span.data else "missing"
    return name_of(path.name, span.where, span.data, reason)


def _lock(path: Path, wait_s: float) -> int:
    """Take an exclusive flock on `path`/lock, which is created if it is missing."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(path / "lock", flags, 0o600)
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


def is_free(lock: Path) -> bool:
    """Tell whether no living process holds a spool, by its lock file. An own one counts as held."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)  # which lets it go
    return True


def _is_still(fd: int, path: Path) -> bool:
    """Return False when the lock file was removed with its directory while we waited for it."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _write(fd: int, data: bytes | bytearray) -> None:
    # No memoryview: an error's traceback would keep it, and with it the buffer from growing.
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, data[written:])


def _write_at(fd: int, data: bytes | bytearray, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], offset + written)
