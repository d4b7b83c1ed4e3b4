"""The disk tier: a thread that writes blocks, and threads that read them.

    put    the step thread fills a buffer with blocks; the writer appends them, each sealed
    read   records that lie side by side are read at once, checked, and taken in order

No call of the step thread waits for the disk: without a free buffer nothing is written. A full,
read-only or broken disk turns the tier off for good, with one line in the log; from then on it has
nothing and takes nothing.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.tiers.buffers import Buffer, BufferPool
from engine.tiers.policy import LearntReads, ReadCosts
from engine.tiers.segment_files import Write, open_folder, remove_plain
from engine.tiers.segment_store import RecordRun, SegmentStore
from engine.tiers.segments import HEAD_BYTES, SegmentFormat
from engine.tiers.sources import Arrival, Signal

if TYPE_CHECKING:  # its library is only needed by who encrypts
    from engine.tiers.encryption import TierKey

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
MIN_SEGMENTS, MAX_SEGMENTS = 8, 256
"""Fewer could not make room in small parts; more would be too many open files."""
MAX_RECORDS = 1 << 20
"""The index takes some 200 bytes of memory for each."""
READ_BYTES = 2 << 20
"""Records that lie side by side are read together, up to so many bytes."""
NUM_READERS = 4
NUM_READ_BUFFERS, NUM_WRITE_BUFFERS = 16, 16
MAX_QUEUED_READS = 4096
"""A disk that hangs is asked for no more."""
CLOSE_TIMEOUT_S = 10.0
_POLL_S = 0.1


class _Job:
    """A run on its way; guarded by the tier's lock once it is queued."""

    __slots__ = ("buffer", "is_done", "num_good", "reading", "run")

    def __init__(self, reading: DiskRead, run: RecordRun) -> None:
        self.reading = reading
        self.run = run
        self.is_done = False
        self.num_good = 0
        self.buffer: Buffer | None = None


class DiskRead:
    """Blocks of one prompt on their way from the disk. `num_blocks`: how many are expected."""

    def __init__(self, tier: DiskTier, runs: Sequence[RecordRun]) -> None:
        self.num_blocks = sum(len(run.digests) for run in runs)
        self.jobs = deque(_Job(self, run) for run in runs)
        self._first = self.jobs[0] if self.jobs else None
        self.is_cancelled = False
        self.num_jobs = self.num_left = len(self.jobs)
        self.read_s = self.first_s = 0.0
        """The time that the threads spent on it, all together, and on its first run."""
        self._tier = tier

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return not self.jobs

    @property
    def is_ready(self) -> bool:
        """Whether `take` has something to return."""
        return bool(self.jobs) and self.jobs[0].is_done

    def took(self, job: _Job, read_s: float) -> None:
        """Note what one of its runs took; the tier's lock is held."""
        self.num_left -= 1
        self.read_s += read_s
        if job is self._first:
            self.first_s = read_s

    def take(self) -> Arrival | None:
        """Return what comes next, if it has arrived."""
        return self._tier.take(self)

    def cancel(self) -> None:
        """Drop what has not been taken."""
        self._tier.cancel(self)


class DiskTier:
    """Keeps blocks of one layout in a folder of its own below `path`."""

    name = "disk"

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        layout: bytes,
        payload_bytes: int,
        min_blocks: int = 1,
        segment_bytes: int = SEGMENT_BYTES,
        write: Write = os.pwrite,
        signal: Signal | None = None,
        key: TierKey | None = None,
    ) -> None:
        """Raises ConfigError naming the option where it asks for too little, OSError where nothing
        can be kept at the path. layout: 32 bytes. payload_bytes: of a block. min_blocks: those of
        the longest sequence. segment_bytes: at most. signal: told of all that is read or
        written. key: blocks are encrypted under it; None: they are not."""
        self.path = path
        self._form = form = SegmentFormat(layout, payload_bytes)
        if key is not None:
            self._form = form = SegmentFormat(key.layout_of(layout), payload_bytes, key)
        segment_bytes = min(segment_bytes, max_bytes // MIN_SEGMENTS)
        segment_bytes = max(segment_bytes, max_bytes // MAX_SEGMENTS)
        capacity = form.capacity(segment_bytes)
        max_segments = min(
            max_bytes // max(1, segment_bytes), max(2, MAX_RECORDS // max(1, capacity))
        )
        self.max_blocks = (max_segments - 1) * capacity
        if self.max_blocks < min_blocks:
            part = -(-min_blocks // (MIN_SEGMENTS - 1))
            raise ConfigError(
                f"kv_disk_bytes is {max_bytes}: a sequence of {min_blocks} blocks takes "
                f"{MIN_SEGMENTS * form.sealed_bytes(part)}"
            )
        self.num_written = self.num_read = self.num_damaged = 0
        """Blocks since the start."""
        self._is_off = self._is_closed = False
        self._pending: set[bytes] = set()
        self.signal = signal or Signal()
        self._lock = threading.Lock()
        self._dequeue = threading.Lock()
        num_records = max(1, READ_BYTES // form.record_bytes)
        self._read_buffers = BufferPool(NUM_READ_BUFFERS, num_records, form.record_bytes)
        self._write_buffers = BufferPool(NUM_WRITE_BUFFERS, num_records, form.record_bytes)
        self._writes: SimpleQueue[tuple[Buffer, Sequence[bytes], Callable[[], None]] | None]
        self._writes = SimpleQueue()
        self._reads: SimpleQueue[_Job | None] = SimpleQueue()
        folder = open_folder(path, form, write)
        try:
            if key is not None:
                remove_plain(path, layout)
            measured = ReadCosts(*folder.measure(num_records, NUM_READERS))
            self._store = SegmentStore(
                *(folder, form),
                capacity=capacity,
                max_segments=max_segments,
                max_bytes=max_bytes,
            )
        except BaseException:
            folder.close()
            raise
        self.folder = folder.path
        self._learnt = LearntReads(measured, time.monotonic)
        self._began_s = [math.inf] * NUM_READERS
        """When each thread began to wait for the disk; inf: it does not."""
        self._threads = self._start()

    @property
    def is_on(self) -> bool:
        return not self._is_off

    @property
    def costs(self) -> ReadCosts:
        """Return what reads took lately; or when the tier started, when there were none. No less
        than every thread has waited for the disk by now."""
        costs, waits_s = self._learnt.costs, time.monotonic() - max(self._began_s)
        return costs._replace(latency_s=max(costs.latency_s, waits_s))

    @property
    def num_blocks(self) -> int:
        return 0 if self._is_off else len(self._store)

    @property
    def place(self) -> str:
        return f"kv_disk {self.path}"

    @property
    def record_bytes(self) -> int:
        return self._form.record_bytes

    def has(self, digest: bytes) -> bool:
        """Whether a block can be read."""
        return not self._is_off and digest in self._store

    def takes(self, digest: bytes) -> bool:
        """Whether a block may be put: it is neither here nor on its way."""
        return not self._is_off and digest not in self._store and digest not in self._pending

    # Writing

    def write_buffer(self) -> Buffer | None:
        """Return a buffer whose rows are to be filled from HEAD_BYTES on; None: none is free."""
        return None if self._is_off else self._write_buffers.take()

    def payloads(self, buffer: Buffer, num_blocks: int) -> NDArray[np.uint8]:
        """Return the part of a buffer that blocks go to, [num_blocks, payload_bytes]."""
        return buffer.rows[:num_blocks, HEAD_BYTES : HEAD_BYTES + self._form.payload_bytes]

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer of which nothing is to be written."""
        self._write_buffers.give_back(buffer)

    def put(self, buffer: Buffer, digests: Sequence[bytes], wait: Callable[[], None]) -> None:
        """Write the first rows of a buffer, which goes back to the tier. wait: returns when the
        rows are filled."""
        with self._lock:
            self._pending.update(digests)
        self._writes.put((buffer, digests, wait))

    # Reading

    def read(self, digests: Sequence[bytes]) -> DiskRead:
        """Begin to read blocks, up to the first that is not here. The first ones are read alone,
        so that they are there soon, and more at once from there on."""
        is_stuck = self._reads.qsize() > MAX_QUEUED_READS
        num_records = self._read_buffers.num_records
        found = (
            [] if self._is_off or is_stuck else self._store.find(digests, num_records, NUM_READERS)
        )
        reading = DiskRead(self, found)
        for job in reading.jobs:
            self._reads.put(job)
        return reading

    def take(self, reading: DiskRead) -> Arrival | None:
        with self._lock:
            if not reading.jobs or not reading.jobs[0].is_done:
                return None
            job = reading.jobs.popleft()
        if job.num_good < len(job.run.digests):
            self.cancel(reading)  # what comes behind a block that is missing is of no use
        buffer = job.buffer
        if buffer is None:
            return None
        rows = self.payloads(buffer, job.num_good)
        return Arrival(rows, partial(self._read_buffers.give_back, buffer))

    def cancel(self, reading: DiskRead) -> None:
        with self._lock:
            reading.is_cancelled = True
            dropped = [job.buffer for job in reading.jobs if job.buffer is not None]
            reading.jobs.clear()
        for buffer in dropped:
            self._read_buffers.give_back(buffer)

    def close(self) -> None:
        """Write what was put, seal, and end the threads. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._writes.put(None)
        self._reads.put(None)
        ends_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.error("kv_disk %s hangs: it is left as it is", self.folder)
            return
        try:
            self._store.close()
        except OSError as error:
            self._turn_off(error)

    def _start(self) -> list[threading.Thread]:
        work: list[Callable[[], None]] = [self._write_all]
        work += [partial(self._read_all, each) for each in range(NUM_READERS)]
        threads = [
            threading.Thread(target=target, name=f"kv-disk-{number}", daemon=True)
            for number, target in enumerate(work)
        ]
        for thread in threads:
            thread.start()
        return threads

    # In the threads

    def _write_all(self) -> None:
        while (put := self._writes.get()) is not None:
            buffer, digests, wait = put
            try:
                wait()
                self._write(buffer, digests)
            except Exception as error:
                self._turn_off(error)
            with self._lock:
                self._pending.difference_update(digests)
            self._write_buffers.give_back(buffer)
            self.signal.notify()

    def _write(self, buffer: Buffer, digests: Sequence[bytes]) -> None:
        if self._is_off:
            return
        size = self._form.record_bytes
        self._store.append(buffer.memory[: len(digests) * size], digests)
        self.num_written += len(digests)

    def _read_all(self, thread: int) -> None:
        while True:
            with self._dequeue:  # buffers in the order of the queue: the first never waits for
                job = self._reads.get()  # those behind it, which cannot be taken before it
                buffer = None if job is None else self._buffer_for(job)
            if job is None:
                self._reads.put(None)
                return
            num_good, started_s = 0, time.monotonic()
            self._began_s[thread] = started_s
            try:
                if buffer is not None:
                    num_good = self._read(job.run, buffer)
            except Exception as error:
                self._turn_off(error)
            self._began_s[thread] = math.inf
            self._end(job, buffer, num_good, time.monotonic() - started_s)

    def _buffer_for(self, job: _Job) -> Buffer | None:
        while not (job.reading.is_cancelled or self._is_off or self._is_closed):
            if (buffer := self._read_buffers.take(_POLL_S)) is not None:
                return buffer
        return None

    def _read(self, run: RecordRun, buffer: Buffer) -> int:
        """Return how many records of a run are whole and the ones that were wanted."""
        form, size = self._form, self._form.record_bytes
        memory = buffer.memory[: len(run.digests) * size]
        num_bytes = run.segment.read_at(memory, form.offset_of(run.slot))
        for index, digest in enumerate(run.digests):
            record, slot = memory[index * size : (index + 1) * size], run.slot + index
            is_there = num_bytes >= (index + 1) * size
            if not is_there or form.unseal(record, slot, run.segment.cipher) != digest:
                self._store.forget(run, index)
                self.num_damaged += 1
                log.warning("a KV block on disk is damaged and was dropped: %s", run.segment.path)
                return index
        return len(run.digests)

    def _end(self, job: _Job, buffer: Buffer | None, num_good: int, read_s: float) -> None:
        self._store.unpin(job.run, num_good)
        reading = job.reading
        with self._lock:
            is_wanted = num_good > 0 and not reading.is_cancelled
            job.num_good, job.is_done = num_good, True
            job.buffer = buffer if is_wanted else None
            reading.took(job, read_s)
            self.num_read += num_good
            if reading.num_left == 0 and not reading.is_cancelled:
                self._learn(reading)
        if buffer is not None and not is_wanted:
            self._read_buffers.give_back(buffer)
        self.signal.notify()

    def _learn(self, reading: DiskRead) -> None:
        num_bytes = reading.num_blocks * self._form.record_bytes
        together_s = reading.read_s / min(NUM_READERS, reading.num_jobs)
        self._learnt.learn(num_bytes, together_s, reading.first_s)

    def _turn_off(self, error: Exception) -> None:
        with self._lock:
            if self._is_off:
                return
            self._is_off = True
        log_off(self.path, error)


def log_off(path: Path, error: Exception) -> None:
    """Say, once, that nothing is kept at a path, and why: with a trace, where it is not the
    disk."""
    of_disk = error if isinstance(error, OSError) else None
    log.error(
        "kv_disk %s is off until the engine starts again (%s): prompts are computed",
        *(path, repr(error) if of_disk is None else of_disk.strerror),
        exc_info=error if of_disk is None else None,
    )
