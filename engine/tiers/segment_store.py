"""Finds records by their digests in a bounded number of segments, and makes room for new ones.

One segment is appended to, the others are sealed. When there is no room for one more, the coldest
one is removed: what was read of it since it was written is written anew, up to a part of a segment,
and the rest is dropped. So the files never take more than is allowed, also after more was allowed
to who wrote them.

Appending is for one thread; all else is thread-safe.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple

from engine.tiers.segment_files import SegmentFile, SegmentFolder
from engine.tiers.segments import SegmentFormat

REWRITTEN_PART = 8
"""One part in so many of a segment is written anew when it is removed, at most."""
FORGOTTEN_AT_ONCE = 256
"""Records that leave the index while the lock is held, which a step may wait for."""
_SLOT_BITS = 32


class RecordRun(NamedTuple):
    """Records side by side in a segment, which is pinned until `SegmentStore.unpin`."""

    segment: SegmentFile
    slot: int
    digests: list[bytes]


class SegmentStore:
    """The records of a folder. Damaged ones are found when they are read, not here."""

    def __init__(
        self,
        folder: SegmentFolder,
        form: SegmentFormat,
        *,
        capacity: int,
        max_segments: int,
        max_bytes: int,
    ) -> None:
        """capacity: records of a new segment. max_segments, max_bytes: of all segments; two at
        least, and room for two. Raises OSError."""
        assert capacity >= 1 and max_segments >= 2 and max_bytes >= 2 * form.sealed_bytes(capacity)
        self._folder = folder
        self._form = form
        self._capacity = capacity
        self._max_segments = max_segments
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, SegmentFile] = {}
        self._place_of: dict[bytes, int] = {}
        """Segment number and slot, in one number."""
        self._current: SegmentFile | None = None
        self._num_uses = self._last_number = 0
        for segment in folder.open_all():
            self._last_number = self._num_uses = segment.number
            self._segments[segment.number] = segment
            for slot, digest in enumerate(segment.digests):
                self._place_of[digest] = _place(segment, slot)
        while self._is_full:
            self._remove(self._coldest())

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._place_of

    @property
    def num_bytes(self) -> int:
        """Return what the files take once they are sealed."""
        with self._lock:
            segments = list(self._segments.values())
        return sum(self._form.sealed_bytes(len(each.digests)) for each in segments)

    @property
    def _is_full(self) -> bool:
        """Whether there is no room for one more segment."""
        size, current = self._form.sealed_bytes, self._current
        num_bytes = self.num_bytes
        if current is not None:  # which is going to be as large as may be
            num_bytes += size(self._capacity) - size(len(current.digests))
        is_too_large = num_bytes + size(self._capacity) > self._max_bytes
        return is_too_large or len(self._segments) >= self._max_segments

    def find(
        self, digests: Sequence[bytes], max_records: int, num_alike: int = 0
    ) -> list[RecordRun]:
        """Return where the records are, up to the first that is not here, in runs of at most
        `max_records`. Each run's segment is pinned. num_alike: the first so many runs are of one
        record each, as many more of two, then of four: who reads as many at a time has the first
        soonest. 0: all are as long as may be."""
        runs: list[RecordRun] = []
        with self._lock:
            for digest in digests:
                place = self._place_of.get(digest)
                if place is None:
                    break
                segment, slot = self._segments[place >> _SLOT_BITS], place & (1 << _SLOT_BITS) - 1
                last = runs[-1] if runs else None
                doublings = (len(runs) - 1) // num_alike if num_alike else _SLOT_BITS
                if (
                    last is not None
                    and last.segment is segment
                    and last.slot + len(last.digests) == slot
                    and len(last.digests) < min(max_records, 1 << doublings)
                ):
                    last.digests.append(digest)
                else:
                    segment.pin()
                    runs.append(RecordRun(segment, slot, [digest]))
        return runs

    def unpin(self, run: RecordRun, num_read: int) -> None:
        """End a run, of which so many records were read."""
        with self._lock:
            if num_read:
                self._num_uses += 1
                run.segment.last_used = self._num_uses
                run.segment.is_hot[run.slot : run.slot + num_read] = b"\1" * num_read
            is_nobodys = run.segment.unpin()
        if is_nobodys:
            run.segment.discard()

    def forget(self, run: RecordRun, index: int) -> None:
        """Find a record no more, which is damaged."""
        digest, place = run.digests[index], _place(run.segment, run.slot + index)
        with self._lock:
            if self._place_of.get(digest) == place:
                del self._place_of[digest]

    def append(self, records: memoryview, digests: Sequence[bytes]) -> None:
        """Seal and add records that lie one behind the other in page-aligned memory. OSError."""
        done, size = 0, self._form.record_bytes
        while done < len(digests):
            segment = self._current
            if segment is None or len(segment.digests) >= self._capacity:
                segment = self._begin_segment()
            num_new = min(len(digests) - done, self._capacity - len(segment.digests))
            part = records[done * size : (done + num_new) * size]
            self._append(segment, part, digests[done : done + num_new])
            done += num_new

    def close(self) -> None:
        """Seal what is open and give the folder back. OSError, after all else is closed."""
        try:
            self._seal_current()
        finally:
            with self._lock:
                dropped = [each for each in self._segments.values() if each.drop()]
                self._segments.clear()
                self._place_of.clear()
            for segment in dropped:
                segment.discard()
            self._folder.close()

    def check_integrity(self) -> None:
        """AssertionError unless all is within bounds and the index says what is in the segments."""
        assert len(self._segments) < self._max_segments and self.num_bytes < self._max_bytes
        for segment in self._segments.values():
            assert len(segment.digests) == len(segment.is_hot)
        for digest, place in self._place_of.items():
            segment = self._segments[place >> _SLOT_BITS]
            assert segment.digests[place & (1 << _SLOT_BITS) - 1] == digest

    def _append(self, segment: SegmentFile, part: memoryview, digests: Sequence[bytes]) -> None:
        form, slot = self._form, len(segment.digests)
        size = form.record_bytes
        for index, digest in enumerate(digests):
            record = part[index * size : (index + 1) * size]
            form.seal(record, digest, slot + index, segment.cipher)
        self._folder.write(segment, part, form.offset_of(slot))
        with self._lock:
            self._num_uses += 1
            segment.last_used = self._num_uses
            segment.digests += digests
            segment.is_hot += bytes(len(digests))
            for index, digest in enumerate(digests):
                self._place_of[digest] = _place(segment, slot + index)

    def _begin_segment(self) -> SegmentFile:
        self._seal_current()
        segment = self._folder.create(self._last_number + 1)
        self._last_number = segment.number
        with self._lock:
            self._segments[segment.number] = segment
        self._current = segment
        while self._is_full:
            coldest = self._coldest()
            self._rewrite(coldest, segment)
            self._remove(coldest)
        return segment

    def _seal_current(self) -> None:
        segment, self._current = self._current, None
        if segment is not None:
            self._folder.seal(segment)

    def _coldest(self) -> SegmentFile:
        sealed = (each for each in self._segments.values() if each is not self._current)
        return min(sealed, key=lambda each: each.last_used)

    def _rewrite(self, cold: SegmentFile, segment: SegmentFile) -> None:
        """Move what was read of a segment to a new one."""
        form = self._form
        left = self._capacity // REWRITTEN_PART - len(segment.digests)
        with mmap.mmap(-1, form.record_bytes) as memory, memoryview(memory) as record:
            for slot, digest in enumerate(cold.digests):
                if left <= 0:
                    return
                if not cold.is_hot[slot] or self._place_of.get(digest) != _place(cold, slot):
                    continue
                num_read = cold.read_at(record, form.offset_of(slot))
                if num_read < len(record):
                    continue
                if form.unseal(record, slot, cold.cipher) == digest:
                    self._append(segment, record, [digest])
                    left -= 1

    def _remove(self, segment: SegmentFile) -> None:
        for start in range(0, len(segment.digests), FORGOTTEN_AT_ONCE):
            with self._lock:
                for slot in range(start, min(start + FORGOTTEN_AT_ONCE, len(segment.digests))):
                    digest = segment.digests[slot]
                    if self._place_of.get(digest) == _place(segment, slot):
                        del self._place_of[digest]
        with self._lock:
            del self._segments[segment.number]
            is_nobodys = segment.drop()
        self._folder.unlink(segment)
        if is_nobodys:
            segment.discard()


def _place(segment: SegmentFile, slot: int) -> int:
    return segment.number << _SLOT_BITS | slot
