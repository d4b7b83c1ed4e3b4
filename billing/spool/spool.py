"""The spool: an append-only, synced log on local disk that holds usage until Postgres has it.

    spool = await Spool.open(directory)      # `recovered`: attempts that a crash left open
    spool.attempt_opened(attempt)            # buffered
    spool.checkpoint(id, quantities, False)  # buffered
    on_disk = await spool.attempt_begun(attempt, quantities)  # both, written; await on_disk
    await spool.close(event)                 # returns once it is on disk
    batch = await spool.read_closed(1000); ...; await spool.commit(batch)      # the shipper's side

Buffered records reach the disk within FLUSH_INTERVAL_S or with the next close. Closes share syncs:
those that arrive while one fdatasync runs are written by the next. A single close, while nothing
else is open and the disk has been quick of late, is synced on the event loop, because handing it to
a thread and back takes longer. That sync has no time limit: a disk that was quick NUM_TIMED times
and then hangs stops the event loop. A limit would need a thread, and cost two thirds of what is
saved (0.28 ms on the event loop, 0.39 with a limit, 0.46 in a thread). On a full disk closes fail
with SpoolFull, their records stay in memory, and writing is tried again every RETRY_INTERVAL_S. A
sync that fails in any other way leaves the file in doubt: the spool stays broken until its process
restarts.

`attempt_begun` syncs in the background (`sync`): the file is written meanwhile, and attempts that
begin then share the next sync.

Knows no database, price or tenant. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from billing.errors import SpoolBroken, SpoolError, SpoolFull
from billing.events import Attempt, DisputedUsage, Quantities, UsageEvent
from billing.spool.directory import NO_ROOM, Batch, SpoolDirectory
from billing.spool.format import (
    Checkpoint,
    CloseRecord,
    OpenAttempt,
    OpenRecord,
    Record,
    SegmentStart,
    VoidRecord,
    apply,
    frame,
)
from billing.spool.sync import BackgroundSync

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.05
"""A checkpoint waits at most so long for its sync."""
QUICK_SYNC_S = 0.002
"""A disk is quick if none of the last NUM_TIMED syncs took longer."""
NUM_TIMED = 8
RETRY_INTERVAL_S = 0.25
"""Between attempts to write to a full disk."""
LOCK_WAIT_S = 10.0
"""A starting gateway waits so long for a process that adopts its directory."""
SEGMENT_BYTES = 8 * 1024 * 1024
MAX_SPOOL_BYTES = 1024 * 1024 * 1024
"""Above this new attempts are refused; running ones may still close."""

T = TypeVar("T")


@dataclass
class FlushBatch:
    """Records that are flushed together, and the futures that wait for them."""

    written: bytearray = field(default_factory=bytearray)
    """Records that are in the file and not synced."""
    data: bytearray = field(default_factory=bytearray)
    """Records that are not in the file yet."""
    closes: int = 0
    waiters: list[Future[None]] = field(default_factory=list)


def _retrieve(waiter: Future[None]) -> None:
    """Mark a future's exception as retrieved: asyncio need not log it if nobody awaits it."""
    if not waiter.cancelled():
        waiter.exception()


class Spool:
    """The spool of one process. Open it with `open`, end it with `shutdown` or `remove`."""

    def __init__(
        self,
        files: SpoolDirectory,
        threads: ThreadPoolExecutor,
        *,
        segment_bytes: int,
        max_bytes: int,
    ) -> None:
        self.recovered: list[UsageEvent] = files.recovered
        """Attempts of the previous process, closed at their last checkpoint."""
        self.backlog = files.unshipped
        self._oldest_at: float | None = None
        """Events on disk that Postgres may not have yet."""
        self._files, self._threads = files, threads
        self._background = BackgroundSync(threads)
        self._synced = files.durable_end
        """The position up to which the shipper may read; moves together with `backlog`."""
        self._segment_bytes, self._max_bytes = segment_bytes, max_bytes
        self._open: dict[str, OpenAttempt] = {}
        self._buffer, self._written = bytearray(), bytearray()
        """Records that are in memory alone; and older ones, in the file and not synced."""
        self._buffered_closes = 0
        """The number of closes in both."""
        self._sync_times_s = deque([inf], NUM_TIMED)
        self._flushing = False
        """True while a thread uses the files."""
        self._syncing = False
        """True while the file is synced in the background and may be written. Never with
        `_flushing`."""
        self._not_syncing = asyncio.Event()
        self._waiters: list[Future[None]] = []
        self._failure: SpoolError | None = None
        self.broken = asyncio.Event()
        """Set once a sync failed for good: only a new process can account for anything."""
        self._stopping = False
        self._seals_early = False
        """True if the segment has damage, which is examined once it is sealed."""
        self._dirty, self._urgent = asyncio.Event(), asyncio.Event()
        self._readable = asyncio.Event()
        if self.backlog:
            self._readable.set()
        self._flusher = asyncio.create_task(self._flush_until_stopped(), name="spool flusher")

    @classmethod
    async def open(
        cls,
        directory: Path | str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int = MAX_SPOOL_BYTES,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> Spool:
        """Lock and recover `directory`, which is created if it is missing.

        Raises: SpoolLocked when another process holds it; OSError when the disk fails.
        """
        # The flusher and the shipper use a thread each, so neither waits for the other.
        threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="spool")
        loop = asyncio.get_running_loop()
        try:
            files = await loop.run_in_executor(
                threads, lambda: SpoolDirectory(Path(directory), lock_wait_s=lock_wait_s)
            )
        except BaseException:
            threads.shutdown(wait=False)
            raise
        return cls(files, threads, segment_bytes=segment_bytes, max_bytes=max_bytes)

    @property
    def healthy(self) -> bool:
        """False if no new attempt may be admitted, because it could not be recorded."""
        return self._failure is None and self._files.total_bytes < self._max_bytes

    @property
    def failure(self) -> SpoolError | None:
        """Why nothing can be recorded at the moment; None: it can."""
        if self._failure is None and not self.healthy:
            return SpoolFull(f"{self.directory} has {self._max_bytes} bytes that are not shipped")
        return self._failure

    @property
    def directory(self) -> Path:
        return self._files.path

    # The gateway's side.

    def attempt_opened(self, attempt: Attempt) -> None:
        """Record, buffered, that an attempt was admitted; an OPEN alone bills nothing.

        Raises: SpoolFull, SpoolBroken.
        """
        if (failure := self.failure) is not None:
            raise copy(failure)
        self._append(OpenRecord(attempt))

    def checkpoint(
        self,
        attempt_id: str,
        quantities: Quantities,
        estimated: bool,
        disputed: DisputedUsage | UnsetType = UNSET,
    ) -> None:
        """Record, buffered, the usage so far, input included: it is billed if this process dies.
        `disputed`: what its upstream claims beyond, recorded then, too."""
        record = Checkpoint(attempt_id, quantities, estimated, time.time(), disputed)
        if self._failure is None:
            self._append(record)
        else:
            # On a full disk checkpoints would be queued without bound; the next one or the close
            # replaces this one.
            apply(self._open, record)

    async def attempt_begun(self, attempt: Attempt, quantities: Quantities) -> Future[None]:
        """Write that an attempt begins and costs `quantities`, which are billed if this process is
        killed from now on. Return a future that is done once the record is on disk and survives a
        power failure; it raises SpoolFull, SpoolBroken.

        Raises: SpoolFull, SpoolBroken; then the attempt did not begin, and is to be voided.
        """
        self.attempt_opened(attempt)
        self.checkpoint(attempt.id, quantities, False)
        on_disk = self._when_flushed()
        on_disk.add_done_callback(_retrieve)
        if self._flushing:
            self._urgent.set()
            await on_disk  # another thread has the file
        else:
            self._write_buffer()
            self._sync_written()
        return on_disk

    async def close(self, *events: UsageEvent) -> None:
        """Write events to disk, together; they are acknowledged when this returns.

        Raises: SpoolFull (the events stay in memory and are billed if room is made before the
        process ends, unless `replace_queued` puts others in their place); SpoolBroken (a restart
        bills the attempts at their last checkpoint).
        """
        self.close_buffered(*events)
        if self._may_block_loop:
            self._flush_on_loop()
            return
        self._urgent.set()
        await self._when_flushed()

    def close_buffered(self, *events: UsageEvent) -> None:
        """Close attempts whose cost is on disk already (`attempt_begun`), without waiting: a crash
        loses only how they ended. Raises: SpoolBroken, as `close`."""
        if isinstance(self._failure, SpoolBroken):
            raise copy(self._failure)
        if self._flusher.done():
            raise SpoolBroken(f"{self.directory} is released")
        self._append(*map(CloseRecord, events))
        self._buffered_closes += len(events)

    def replace_queued(self, events: Sequence[UsageEvent], others: Sequence[UsageEvent]) -> None:
        """Put `others` in the place of events of which `close` has just raised SpoolFull; to be
        called before anything else is awaited: until then nobody writes them."""
        for event in events:
            record = frame(CloseRecord(event))
            start = self._buffer.index(record)
            del self._buffer[start : start + len(record)]
        self._buffered_closes -= len(events)
        self.close_buffered(*others)

    def _when_flushed(self) -> Future[None]:
        """Return a future that is done once the buffered records are on disk. It raises SpoolFull,
        SpoolBroken."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    async def void(self, attempt_id: str) -> None:
        """Record, buffered, that an attempt never ran; an OPEN alone means the same."""
        self._append(VoidRecord(attempt_id))

    def _append(self, *records: Record) -> None:
        self._buffer += b"".join(map(frame, records))
        for record in records:
            apply(self._open, record)
        self._dirty.set()

    # The shipper's side: one reader at a time.

    def lag_s(self, now: float) -> float:
        """Return the age of the oldest event that has not shipped, once somebody tried to ship it;
        0: there is none. `now`: Unix seconds."""
        return 0.0 if self._oldest_at is None else max(0.0, now - self._oldest_at)

    async def wait_readable(self) -> None:
        """Wait until there is an event to ship or a finished segment to delete."""
        await self._readable.wait()

    async def read_closed(self, limit: int) -> Batch:
        """Read the oldest events that have not shipped; the cursor stays."""
        end, expected = self._synced, self.backlog
        batch = await self._in_thread(lambda: self._files.read_closed(limit, end))
        self.backlog += batch.num_repaired
        expected += batch.num_repaired
        self._oldest_at = batch.events[0].occurred_at if batch.events else None
        if batch.has_live_damage:
            self._seals_early = True
            self._dirty.set()
        if batch.end == end and len(batch.events) < expected:
            return msgspec.structs.replace(batch, lost=expected - len(batch.events))
        return batch

    async def commit(self, batch: Batch) -> None:
        """Move the cursor behind the batch of the latest `read_closed`, which Postgres has."""
        await self._in_thread(lambda: self._files.commit(batch))
        self.backlog -= len(batch.events) + batch.lost
        if not self.backlog:
            self._oldest_at = None
            self._readable.clear()

    async def quarantine(self, event: UsageEvent) -> None:
        """Keep an event that Postgres refuses in a file for a person."""
        await self._in_thread(lambda: self._files.keep_refused(event))

    # The end.

    async def shutdown(self) -> None:
        """Flush the buffer and unlock the directory, in which open attempts stay open."""
        await self._stop()
        self._files.release()

    async def remove(self) -> None:
        """Delete the directory, whose events must all be shipped."""
        assert not self.backlog and not self._open, "a spool in use cannot be removed"
        await self._stop()
        self._files.remove()

    async def _stop(self) -> None:
        self._stopping = True
        self._dirty.set()
        self._urgent.set()
        await self._flusher
        self._background.close()
        self._threads.shutdown()

    # The flusher.

    async def _flush_until_stopped(self) -> None:
        while True:
            await self._dirty.wait()
            await self._pause_for_a_close()
            while self._syncing:
                await self._not_syncing.wait()
            if isinstance(self._failure, SpoolBroken):
                return  # a close on the event loop failed meanwhile: the buffer was refused
            self._dirty.clear()
            self._urgent.clear()
            self._flushing = True
            await self._flush()
            self._flushing = False
            if self._failure is not None:
                if self._stopping or isinstance(self._failure, SpoolBroken):
                    return
                await asyncio.sleep(RETRY_INTERVAL_S)
            elif self._stopping and not (self._buffer or self._written):
                return

    async def _pause_for_a_close(self) -> None:
        """Wait for more records, but never let a close wait."""
        try:
            async with asyncio.timeout(FLUSH_INTERVAL_S):
                await self._urgent.wait()
        except TimeoutError:
            return

    @property
    def _may_block_loop(self) -> bool:
        """True if the buffer may be synced on the event loop: no other request would wait."""
        return (
            not (self._open or self._flushing or self._syncing or self._waiters)
            and not (self._is_full or self._stopping)
            and self._failure is None
            and max(self._sync_times_s) <= QUICK_SYNC_S
        )

    @property
    def _is_full(self) -> bool:
        """True if the segment is full with the buffered records, or to be sealed for another
        reason."""
        pending = len(self._written) + len(self._buffer)
        return self._seals_early or self._files.durable_end.offset + pending >= self._segment_bytes

    def _flush_on_loop(self) -> None:
        """Write and sync the buffer. Raises: SpoolFull, SpoolBroken."""
        taken = self._take()
        try:
            self._sync_times_s.append(self._files.append(taken.data))
        except Exception as error:
            raise self._not_flushed(error, taken) from error
        self._succeeded(taken)

    def _write_buffer(self) -> None:
        """Write the buffer without a sync. Raises: SpoolFull, SpoolBroken."""
        data, self._buffer = self._buffer, bytearray()
        try:
            self._files.write(data)
        except Exception as error:
            raise self._not_flushed(error, FlushBatch(data=data)) from error
        self._written += data

    def _sync_written(self) -> None:
        """Sync the written records in the background, and again for those that are written
        meanwhile. This starts one iteration of the event loop earlier than the flusher would, and
        reports two iterations earlier."""
        if self._syncing:
            return
        if self._buffer or self._is_full or self._stopping or self._failure is not None:
            self._urgent.set()  # the flusher also writes, rotates or retries
            return
        self._syncing = True
        self._not_syncing.clear()
        taken = self._take()
        taken.waiters, self._waiters = self._waiters, []
        self._background.sync(self._files.fd, partial(self._sync_ended, taken))

    def _sync_ended(self, taken: FlushBatch, result: float | Exception) -> None:
        self._syncing = False
        self._not_syncing.set()
        if isinstance(result, float):
            self._sync_times_s.append(result)
            self._files.synced(len(taken.written))
            self._succeeded(taken)
            if self._waiters:
                self._sync_written()
            return
        try:
            self._files.cut()
        except OSError as error:
            result = error
        taken.written += self._written
        self._written = bytearray()
        self._not_flushed(result, taken)

    async def _flush(self) -> None:
        """Write and sync the buffer, wake the waiters, and rotate a full segment."""
        full, taken = self._is_full, self._take()
        taken.waiters, self._waiters = self._waiters, []
        if not (taken.data or taken.written or self._seals_early):
            return  # it was flushed meanwhile
        try:
            # The next segment carries the attempts that are open after `data`, before later ones.
            start = frame(SegmentStart(list(self._open.values()))) if full else None
            took_s = await self._in_thread(lambda: self._files.append(taken.data))
            self._sync_times_s.append(took_s)
        except Exception as error:
            self._not_flushed(error, taken)
            return
        self._succeeded(taken)
        if start is not None:
            await self._rotate(start)

    def _take(self) -> FlushBatch:
        taken = FlushBatch(self._written, self._buffer, self._buffered_closes)
        self._written, self._buffer, self._buffered_closes = bytearray(), bytearray(), 0
        return taken

    def _not_flushed(self, error: Exception, taken: FlushBatch) -> SpoolError:
        """Fail a flush: wake its waiters, keep its records and mark the spool as failed."""
        failure = self._failed(error, taken.waiters)
        self._buffer[:0] = taken.written + taken.data
        self._buffered_closes += taken.closes
        self._dirty.set()
        return copy(failure)

    def _succeeded(self, taken: FlushBatch) -> None:
        if isinstance(self._failure, SpoolFull):  # a broken spool stays broken
            log.warning("spool %s: writing again", self.directory)
            self._failure = None
        for waiter in taken.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.backlog += taken.closes
        self._synced = self._files.durable_end
        if taken.closes:
            self._readable.set()

    def _failed(self, error: Exception, waiters: list[Future[None]]) -> SpoolError:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            failure: SpoolError = SpoolFull(f"{self.directory}: {error.strerror}")
        else:
            failure = SpoolBroken(f"{self.directory}: {error}")
            self.broken.set()
            waiters, self._waiters = waiters + self._waiters, []
        if type(failure) is not type(self._failure):
            log.error("spool cannot write (%s)", failure.code, exc_info=error)
        self._failure = failure
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(copy(failure))
        return failure

    async def _rotate(self, start: bytes) -> None:
        try:
            await self._in_thread(lambda: self._files.rotate(start))
        except OSError as error:
            # The segment stays in use, and the next flush tries again.
            log.warning("spool %s: cannot begin a segment: %s", self.directory, error.strerror)
        except Exception as error:
            # It is unknown which segment is in use now.
            self._failed(error, [])
        else:
            self._synced = self._files.durable_end
            self._seals_early = False
            self._readable.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
