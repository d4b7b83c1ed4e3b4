"""The spool: the truth about usage until Postgres has it. Append-only, synced, on our own disk.

    spool = await Spool.open(directory)      # what a crash left open is billed now: `recovered`
    spool.attempt_opened(attempt)            # buffered
    spool.checkpoint(id, quantities, False)  # buffered
    on_disk = await spool.attempt_begun(attempt, quantities)  # both, written; await on_disk
    await spool.close(event)                 # returns once it is on disk
    batch = await spool.read_closed(1000); ...; await spool.commit(batch)      # the shipper's side

Buffered records reach the disk within FLUSH_INTERVAL_S or with the next close. Closes share syncs:
all that arrive while one fdatasync runs are written by the next. A close that is alone, with
nothing else open, on a disk that has been quick of late, is synced on the spot: handing it to a
thread and back takes longer, and nobody else is there to wait. Nothing bounds that sync: a disk
that was quick NUM_TIMED times and then hangs stops the event loop for as long, and who comes
meanwhile waits at the door, not at their own close. To wait so long and no longer takes a thread to
wait for, and two thirds of what is saved (0.28 ms on the spot, 0.39 so, 0.46 by the loop). A disk
without room fails closes with SpoolFull, keeps their records in memory and tries again every
RETRY_INTERVAL_S; a sync that fails in any other way leaves the file in doubt: the spool stays
broken until its process restarts.

What has begun is synced beside all else, by the kernel where it does that (`sync`): the file
is written meanwhile, and who comes then shares the next sync.

Knows no database, price or tenant. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec

from billing.errors import SpoolBroken, SpoolError, SpoolFull
from billing.events import Attempt, Quantities, UsageEvent
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
from billing.spool.sync import SyncBeside

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.05
"""The most a checkpoint waits for its sync."""
QUICK_SYNC_S = 0.002
"""While each of the last NUM_TIMED syncs took no longer the disk is quick."""
NUM_TIMED = 8
RETRY_INTERVAL_S = 0.25
"""Between attempts to write to a full disk."""
LOCK_WAIT_S = 10.0
"""How long a starting gateway waits for an adopter to finish with its directory."""
SEGMENT_BYTES = 8 * 1024 * 1024
MAX_SPOOL_BYTES = 1024 * 1024 * 1024
"""Above this new attempts are refused; those under way may still close."""

T = TypeVar("T")


@dataclass
class FlushBatch:
    """The records that are flushed together: in the file and not synced, in no file yet, and who
    waits."""

    written: bytearray = field(default_factory=bytearray)
    data: bytearray = field(default_factory=bytearray)
    closes: int = 0
    waiters: list[Future[None]] = field(default_factory=list)


def _retrieve(waiter: Future[None]) -> None:
    """Retrieve a future's exception: whoever waits is told, and that nobody does is no error of its
    own."""
    if not waiter.cancelled():
        waiter.exception()


class Spool:
    """One process's spool. Make it with `open`, end it with `shutdown` (or `remove`)."""

    def __init__(
        self,
        files: SpoolDirectory,
        threads: ThreadPoolExecutor,
        *,
        segment_bytes: int,
        max_bytes: int,
    ) -> None:
        self.recovered: list[UsageEvent] = files.recovered
        """Attempts of the process before, billed at their last checkpoint (at nothing without)."""
        self.backlog = files.unshipped
        """Events on disk that Postgres may not have yet."""
        self._files, self._threads = files, threads
        self._beside = SyncBeside(threads)
        self._synced = files.durable_end
        """Where the shipper may read to; moves together with `backlog`."""
        self._segment_bytes, self._max_bytes = segment_bytes, max_bytes
        self._open: dict[str, OpenAttempt] = {}
        self._buffer, self._written = bytearray(), bytearray()
        """Records that are nowhere else; and older ones, in the file and not synced."""
        self._buffered_closes = 0
        """In either."""
        self._sync_times_s = deque([inf], NUM_TIMED)
        self._flushing = False
        """In a thread, which has the files meanwhile."""
        self._syncing = False
        """Beside it all: the file may be written meanwhile. Never both."""
        self._not_syncing = asyncio.Event()
        self._waiters: list[Future[None]] = []
        self._failure: SpoolError | None = None
        self.broken = asyncio.Event()
        """Set once a sync failed for good: only a new process can account for anything."""
        self._stopping = False
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
        """Lock, recover and take over `directory`, which is made if need be.

        Raises: SpoolLocked when it is another process's; OSError when the disk refuses.
        """
        # One thread for the flusher and one for the shipper: neither waits for the other.
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
        """False: admit nothing, it could not be accounted for."""
        return self._failure is None and self._files.total_bytes < self._max_bytes

    @property
    def directory(self) -> Path:
        return self._files.path

    # The gateway's side.

    def attempt_opened(self, attempt: Attempt) -> None:
        """Note that `attempt` may begin. An OPEN alone bills nothing, so nobody waits for it.

        Raises: SpoolFull, SpoolBroken.
        """
        if self._failure is not None:
            raise copy(self._failure)
        if not self.healthy:
            raise SpoolFull(f"{self.directory} holds {self._max_bytes} bytes that did not ship")
        self._append(OpenRecord(attempt))

    def checkpoint(self, attempt_id: str, quantities: Quantities, estimated: bool) -> None:
        """Cumulative usage so far, input included: the bill, should this process die."""
        record = Checkpoint(attempt_id, quantities, estimated, time.time())
        if self._failure is None:
            self._append(record)
        else:
            # A full disk keeps what is queued; checkpoints would queue without bound, and are
            # superseded by the next one or by the close.
            apply(self._open, record)

    async def attempt_begun(self, attempt: Attempt, quantities: Quantities) -> Future[None]:
        """Write that `attempt` begins now and costs `quantities`, before anybody else hears of it:
        a process that is killed has left it to be billed. What this returns is done once it is on
        disk, where it survives the machine as well; that raises SpoolFull, SpoolBroken, too.

        Raises: SpoolFull, SpoolBroken; then it did not begin, and is to be voided.
        """
        self.attempt_opened(attempt)
        self.checkpoint(attempt.id, quantities, False)
        on_disk = self._when_flushed()
        on_disk.add_done_callback(_retrieve)
        if self._flushing:
            self._urgent.set()
            await on_disk  # another thread has the file
        else:
            self._write_here()
            self._sync_what_is_written()
        return on_disk

    async def close(self, *events: UsageEvent) -> None:
        """Put events on disk, together; they are acknowledged when this returns.

        Raises: SpoolFull (not on disk; kept in memory, and billed if room comes before the process
        ends), SpoolBroken (the attempt bills at its last checkpoint after a restart; so it does
        after the end).
        """
        self.close_buffered(*events)
        if self._is_alone:
            self._flush_here()
            return
        self._urgent.set()
        await self._when_flushed()

    def close_buffered(self, *events: UsageEvent) -> None:
        """Events that cost what is on disk already (`attempt_begun`): nobody waits, as a crash
        takes with it no more than how they ended. Raises: SpoolBroken, as `close`."""
        if isinstance(self._failure, SpoolBroken):
            raise copy(self._failure)
        if self._flusher.done():
            raise SpoolBroken(f"{self.directory} is let go of")
        self._append(*map(CloseRecord, events))
        self._buffered_closes += len(events)

    def _when_flushed(self) -> Future[None]:
        """Done once what was appended in this very turn of the loop is on disk. Raises: SpoolFull,
        SpoolBroken."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    async def void(self, attempt_id: str) -> None:
        """The attempt never ran. Buffered: an OPEN that stays alone means the same."""
        self._append(VoidRecord(attempt_id))

    def _append(self, *records: Record) -> None:
        self._buffer += b"".join(map(frame, records))
        for record in records:
            apply(self._open, record)
        self._dirty.set()

    # The shipper's side: one reader at a time.

    async def wait_readable(self) -> None:
        """Until there is something to ship or a finished segment to drop."""
        await self._readable.wait()

    async def read_closed(self, limit: int) -> Batch:
        """The oldest events that have not shipped; none is skipped and none is marked."""
        end, expected = self._synced, self.backlog
        batch = await self._in_thread(lambda: self._files.read_closed(limit, end))
        if batch.end == end and len(batch.events) < expected:
            return msgspec.structs.replace(batch, lost=expected - len(batch.events))
        return batch

    async def commit(self, batch: Batch) -> None:
        """Postgres has committed `batch`, the result of the latest `read_closed`."""
        await self._in_thread(lambda: self._files.commit(batch))
        self.backlog -= len(batch.events) + batch.lost
        if not self.backlog:
            self._readable.clear()

    async def quarantine(self, event: UsageEvent) -> None:
        """Put an event aside that Postgres will never take, where a person finds it."""
        data = frame(CloseRecord(event))
        await self._in_thread(lambda: self._files.quarantine(f"{event.id}.refused", data))

    # The end.

    async def shutdown(self) -> None:
        """Flush what is buffered and let go of the directory; open attempts stay open in it."""
        await self._stop()
        self._files.release()

    async def remove(self) -> None:
        """Delete the directory; everything in it must have shipped."""
        assert not self.backlog and not self._open, "a spool in use cannot be removed"
        await self._stop()
        self._files.remove()

    async def _stop(self) -> None:
        self._stopping = True
        self._dirty.set()
        self._urgent.set()
        await self._flusher
        self._beside.close()
        self._threads.shutdown()

    # The flusher.

    async def _flush_until_stopped(self) -> None:
        while True:
            await self._dirty.wait()
            await self._pause_for_a_close()
            while self._syncing:
                await self._not_syncing.wait()
            if isinstance(self._failure, SpoolBroken):
                return  # a close that was alone found out meanwhile: what is buffered was refused
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
        """Let buffered records gather, but never make a close wait."""
        try:
            async with asyncio.timeout(FLUSH_INTERVAL_S):
                await self._urgent.wait()
        except TimeoutError:
            return

    @property
    def _is_alone(self) -> bool:
        """True if buffered records may be synced on the event loop: no request is there that would
        wait."""
        return (
            not (self._open or self._flushing or self._syncing or self._waiters)
            and not (self._is_full or self._stopping)
            and self._failure is None
            and max(self._sync_times_s) <= QUICK_SYNC_S
        )

    @property
    def _is_full(self) -> bool:
        """The segment is, with what is buffered."""
        pending = len(self._written) + len(self._buffer)
        return self._files.durable_end.offset + pending >= self._segment_bytes

    def _flush_here(self) -> None:
        """Raises: SpoolFull, SpoolBroken."""
        taken = self._take()
        try:
            self._sync_times_s.append(self._files.append(taken.data))
        except Exception as error:
            raise self._not_flushed(error, taken) from error
        self._succeeded(taken)

    def _write_here(self) -> None:
        """All that is buffered, and not synced. Raises: SpoolFull, SpoolBroken."""
        data, self._buffer = self._buffer, bytearray()
        try:
            self._files.write(data)
        except Exception as error:
            raise self._not_flushed(error, FlushBatch(data=data)) from error
        self._written += data

    def _sync_what_is_written(self) -> None:
        """Beside all else, from now on, and again for who comes meanwhile: a turn of the loop
        earlier than the flusher would begin it, and two earlier when it tells who waits."""
        if self._syncing:
            return
        if self._buffer or self._is_full or self._stopping or self._failure is not None:
            self._urgent.set()  # there is more to do than to sync
            return
        self._syncing = True
        self._not_syncing.clear()
        taken = self._take()
        taken.waiters, self._waiters = self._waiters, []
        self._beside.sync(self._files.fd, partial(self._sync_ended, taken))

    def _sync_ended(self, taken: FlushBatch, ended: float | Exception) -> None:
        self._syncing = False
        self._not_syncing.set()
        if isinstance(ended, float):
            self._sync_times_s.append(ended)
            self._files.synced(len(taken.written))
            self._succeeded(taken)
            if self._waiters:
                self._sync_what_is_written()
            return
        try:
            self._files.cut()
        except OSError as error:
            ended = error
        taken.written += self._written
        self._written = bytearray()
        self._not_flushed(ended, taken)

    async def _flush(self) -> None:
        """Write and sync all that is buffered, tell those who wait, rotate when it is time."""
        full, taken = self._is_full, self._take()
        taken.waiters, self._waiters = self._waiters, []
        if not (taken.data or taken.written):
            return  # it was flushed meanwhile
        try:
            # The carried attempts must be those of this moment: after `data`, before what comes.
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
        """Fail a flush: whatever went wrong, nobody may wait for it forever, and nothing may look
        healthy."""
        failure = self._failed(error, taken.waiters)
        self._buffer[:0] = taken.written + taken.data
        self._buffered_closes += taken.closes
        self._dirty.set()
        return copy(failure)

    def _succeeded(self, taken: FlushBatch) -> None:
        if isinstance(self._failure, SpoolFull):  # what is broken stays so
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
            # The segment in use stays in use, and the next flush tries again.
            log.warning("spool %s: cannot begin a segment: %s", self.directory, error.strerror)
        except Exception as error:
            # Nobody knows which segment is in use now.
            self._failed(error, [])
        else:
            self._synced = self._files.durable_end
            self._readable.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
