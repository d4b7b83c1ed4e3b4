"""The spool: an append-only, synced log on local disk that holds usage until Postgres has it.

    spool = await Spool.open(directory, policy="group")    # `recovered`: left open by a crash
    spool.attempt_opened(attempt)            # buffered
    spool.checkpoint(id, quantities, False)  # buffered
    kept = await spool.attempt_begun(attempt, quantities)  # both, written; await kept
    await spool.close(event)                 # returns once it is kept
    batch = await spool.read_closed(1000); ...; await spool.commit(batch)      # the shipper's side

A policy says when a close is kept, so that its answer may go out:

    before_answer   once it is synced. No crash loses anything that was answered.
    group           once it is written, which survives the death of the process. A sync follows
                    within MAX_UNSYNCED_S for all. What a power cut may lose was answered within one
                    span of that length, however slow the disk is: while the oldest record that is
                    not synced is older, closes wait until it is.

Closes share syncs: those that come while one runs are in the next. The kernel syncs in the
background (`sync`), and the file is written on the event loop meanwhile: handing over to a thread
and back takes longer than the write. A thread flushes what a failure has held up, and rotates.

An OPEN is written with the close of its attempt if that comes within FLUSH_INTERVAL_S, else by
then, and a sync is never made for it alone: it bills nothing.

On a full disk closes fail with SpoolFull, their records stay in memory, and writing is tried again
every RETRY_INTERVAL_S. A sync that fails in any other way leaves the file in doubt: the spool stays
broken until its process restarts. What nobody was told of is cut off; what was answered under
`group` stays in the file, where the next process finds it, and is written and synced once more.

Knows no database, price or tenant. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from copy import copy
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeVar

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
from billing.spool.sync_policy import MAX_UNSYNCED_S, SyncPolicy

log = logging.getLogger(__name__)

SYNC_DELAY_S = 0.002
"""Under `group` a sync waits so long for more closes; the rest of the time is the disk's."""
FLUSH_INTERVAL_S = 0.05
"""A record that nobody waits for is written within so long."""
QUICK_SYNC_S = 0.002
"""A disk is quick if none of the last NUM_TIMED syncs took longer; no sync of a slow one waits."""
NUM_TIMED = 8
RETRY_INTERVAL_S = 0.25
"""Between attempts to write to a full disk."""
LOCK_WAIT_S = 10.0
"""A starting gateway waits so long for a process that adopts its directory."""
SEGMENT_BYTES = 8 * 1024 * 1024
MAX_SPOOL_BYTES = 1024 * 1024 * 1024
"""Above this new attempts are refused; running ones may still close."""

T = TypeVar("T")
Waiters = list[Future[None]]


class SpoolCounts(NamedTuple):
    writes: int
    syncs: int
    bytes: int


def _tell(waiters: Waiters, failure: SpoolError | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if failure is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(copy(failure))


def _retrieve(waiter: Future[None]) -> None:
    """Mark a future's exception as retrieved: asyncio need not log it if nobody awaits it."""
    if not waiter.cancelled():
        waiter.exception()


class Spool:
    """The spool of one process. Open it with `open`, end it with `shutdown` or `remove`."""

    def __init__(
        self,
        files: SpoolDirectory,
        threads: Executor,
        *,
        policy: SyncPolicy,
        segment_bytes: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recovered: list[UsageEvent] = files.recovered
        """Attempts of the previous process, closed at their last checkpoint."""
        self.policy = policy
        self._on_disk = files.unshipped
        """The number of events on disk that Postgres may not have yet."""
        self._oldest_at: float | None = None
        self._files, self._threads, self._clock = files, threads, clock
        self._loop = asyncio.get_running_loop()
        self._background = BackgroundSync(threads)
        self._synced = files.durable_end
        """The position up to which the shipper may read; moves together with `_on_disk`."""
        self._segment_bytes, self._max_bytes = segment_bytes, max_bytes
        self._open: dict[str, OpenAttempt] = {}
        self._buffer = bytearray()
        """Records that are in memory alone."""
        self._buffered_at = 0.0
        """When the oldest of them came."""
        self._buffers_usage = False
        """True if one of them is worth a sync."""
        self._buffered_closes = self._written_closes = self._covered_closes = 0
        """The number of closes among them; in the file; and in what is being synced."""
        self._unsynced_since: float | None = None
        """When the oldest record that is worth a sync was written, which none has ended for."""
        self._uncovered_since: float | None = None
        """The same, of those that the running sync does not cover."""
        self._sync_times_s = deque([inf], NUM_TIMED)
        self._flushing = False
        """True while a thread uses the files."""
        self._syncing = False
        """True while the file is synced in the background and may be written. Never with
        `_flushing`."""
        self._not_syncing = asyncio.Event()
        self._write_waiters: Waiters = []
        """Under `group`: who waits for the sync of what was written before, and then for the write
        of the buffer; until then nothing else may write it."""
        self._sync_waiters: Waiters = []
        self._write_timer: asyncio.TimerHandle | None = None
        self._sync_timer: asyncio.TimerHandle | None = None
        self._failure: SpoolError | None = None
        self.broken = asyncio.Event()
        """Set once a sync failed for good: only a new process can account for anything."""
        self._stopping = False
        self._seals_early = False
        """True if the segment has damage, which is examined once it is sealed."""
        self._rotates_at = -inf
        """A full segment is not sealed before."""
        self._wanted = asyncio.Event()
        """Set when the flusher has work."""
        self._readable = asyncio.Event()
        self._has_sealed = False
        """A segment was finished since the latest read began."""
        if self._on_disk:
            self._readable.set()
        self._is_kept = self._loop.create_future()
        self._is_kept.set_result(None)
        self._flusher = asyncio.create_task(self._flush_until_stopped(), name="spool flusher")

    @classmethod
    async def open(
        cls,
        directory: Path | str,
        *,
        policy: SyncPolicy = "before_answer",
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
        return cls(files, threads, policy=policy, segment_bytes=segment_bytes, max_bytes=max_bytes)

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

    @property
    def backlog(self) -> int:
        """The number of closed events that Postgres may not have yet, synced or not."""
        unsynced = self._buffered_closes + self._written_closes + self._covered_closes
        return self._on_disk + unsynced

    @property
    def unsynced_s(self) -> float:
        """The age of the oldest record that is in the file and not synced; 0: there is none. It
        may have been answered under `group` alone."""
        since = self._unsynced_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @property
    def counts(self) -> SpoolCounts:
        """Counts what was written and synced since this process opened the directory."""
        files = self._files
        return SpoolCounts(files.num_writes, files.num_syncs, files.num_bytes)

    # The gateway's side.

    def attempt_opened(self, attempt: Attempt) -> None:
        """Record, buffered, that an attempt was admitted; an OPEN alone bills nothing.

        Raises: SpoolFull, SpoolBroken.
        """
        if (failure := self.failure) is not None:
            raise copy(failure)
        self._append(OpenRecord(attempt), is_usage=False)

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
            self._append(record, is_usage=True)
        else:
            # On a full disk checkpoints would be queued without bound; the next one or the close
            # replaces this one.
            apply(self._open, record)

    async def attempt_begun(self, attempt: Attempt, quantities: Quantities) -> Future[None]:
        """Write that an attempt begins and costs `quantities`, which are billed if this process is
        killed from now on. Return a future that is done once an answer may go out, as by `close`;
        it raises SpoolFull, SpoolBroken.

        Raises: SpoolFull, SpoolBroken; then the attempt did not begin, and is to be voided.
        """
        self.attempt_opened(attempt)
        self.checkpoint(attempt.id, quantities, False)
        if self._flushing or self._write_waiters:
            kept = self._when_synced()  # the buffer may not be written now
            await kept
            return kept
        self._write_buffer()
        if not self._may_answer_unsynced:
            return self._when_synced()
        self._sync_soon()
        return self._is_kept

    async def close(self, *events: UsageEvent) -> None:
        """Write events together; they are kept when this returns, as the policy has it.

        Raises: SpoolFull (the events stay in memory and are billed if room is made before the
        process ends, unless `replace_queued` puts others in their place); SpoolBroken (a restart
        bills the attempts at their last checkpoint).
        """
        self.close_buffered(*events)
        if self.policy == "before_answer":
            await self._when_synced()
        elif self._may_answer_unsynced:
            self._write_buffer()
            self._sync_soon()
        else:
            await self._when_written()

    def close_buffered(self, *events: UsageEvent) -> None:
        """Close attempts whose cost is on disk already (`attempt_begun`), without waiting: a crash
        loses only how they ended. Raises: SpoolBroken, as `close`."""
        if isinstance(self._failure, SpoolBroken):
            raise copy(self._failure)
        if self._flusher.done():
            raise SpoolBroken(f"{self.directory} is released")
        for event in events:
            self._append(CloseRecord(event), is_usage=True)
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

    async def void(self, attempt_id: str) -> None:
        """Record that an attempt never ran. An OPEN alone means the same, so that is buffered; one
        that would be billed at its checkpoint is void on disk when this returns, unless nothing can
        be written: a customer who is told that it costs nothing has to find it so."""
        known = self._open.get(attempt_id)
        is_billed = known is not None and known.has_usage
        self._append(VoidRecord(attempt_id), is_usage=is_billed)
        is_over = isinstance(self._failure, SpoolBroken) or self._flusher.done()
        if is_billed and not is_over:
            await asyncio.wait([self._when_synced()])

    def _append(self, record: Record, *, is_usage: bool) -> None:
        """Buffer a record. `is_usage`: it is worth a sync."""
        if not self._buffer:
            self._buffered_at = self._clock()
        self._buffer += frame(record)
        self._buffers_usage |= is_usage
        apply(self._open, record)
        if self._write_timer is None:
            self._write_timer = self._loop.call_later(FLUSH_INTERVAL_S, self._write_late)

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
        end, expected = self._synced, self._on_disk
        self._has_sealed = False
        batch = await self._in_thread(lambda: self._files.read_closed(limit, end))
        self._on_disk += batch.num_repaired
        expected += batch.num_repaired
        self._oldest_at = batch.events[0].occurred_at if batch.events else None
        if batch.has_live_damage:
            self._seals_early = True
            self._wanted.set()
        if batch.end == end and len(batch.events) < expected:
            return msgspec.structs.replace(batch, lost=expected - len(batch.events))
        return batch

    async def commit(self, batch: Batch) -> None:
        """Move the cursor behind the batch of the latest `read_closed`, which Postgres has."""
        await self._in_thread(lambda: self._files.commit(batch))
        self._on_disk -= len(batch.events) + batch.lost
        if not self._on_disk:
            self._oldest_at = None
            if not self._has_sealed:
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
        self._wanted.set()
        await self._flusher
        for timer in (self._write_timer, self._sync_timer):
            if timer is not None:
                timer.cancel()
        self._background.close()
        self._threads.shutdown()

    # Writing and syncing, on the event loop.

    @property
    def _may_answer_unsynced(self) -> bool:
        """True if an answer may go out once its record is written."""
        if self.policy == "before_answer" or self._failure is not None:
            return False
        if self._flushing or self._stopping:
            return False
        since = self._unsynced_since
        return since is None or self._clock() - since < MAX_UNSYNCED_S

    @property
    def _is_full(self) -> bool:
        """True if the segment is full with the buffered records, or to be sealed for another
        reason."""
        if self._clock() < self._rotates_at:
            return False
        pending = len(self._files.unsynced) + len(self._buffer)
        return self._seals_early or self._files.durable_end.offset + pending >= self._segment_bytes

    def _when_written(self) -> Future[None]:
        """Return a future that is done once what is written is synced and the buffer written. It
        raises SpoolFull, SpoolBroken."""
        waiter = self._new_waiter(self._write_waiters)
        self._begin_sync()
        return waiter

    def _when_synced(self) -> Future[None]:
        """Return a future that is done once the buffered and written records are on disk. It raises
        SpoolFull, SpoolBroken."""
        waiter = self._new_waiter(self._sync_waiters)
        self._begin_sync()
        return waiter

    def _new_waiter(self, waiters: Waiters) -> Future[None]:
        waiter = self._loop.create_future()
        waiter.add_done_callback(_retrieve)
        waiters.append(waiter)
        return waiter

    def _write_late(self) -> None:
        """Write what nobody waits for, once it has waited for FLUSH_INTERVAL_S."""
        self._write_timer = None
        if not self._buffer:
            return
        left_s = self._buffered_at + FLUSH_INTERVAL_S - self._clock()
        if left_s > 0 or self._flushing or self._write_waiters:
            left_s = left_s if left_s > 0 else FLUSH_INTERVAL_S
            self._write_timer = self._loop.call_later(left_s, self._write_late)
        elif self._failure is not None or self._stopping or self._is_full:
            self._wanted.set()
        else:
            self._try_to_write([])
            self._sync_soon()

    def _try_to_write(self, waiters: Waiters) -> None:
        """Write the buffer, and tell those who wait for it."""
        try:
            self._write_buffer()
        except SpoolError as failure:
            _tell(waiters, failure)
        else:
            _tell(waiters, None)

    def _write_buffer(self) -> None:
        """Write the buffer without a sync. Raises: SpoolFull, SpoolBroken."""
        try:
            self._files.write(self._buffer)
        except Exception as error:
            raise copy(self._failed(error, [])) from error
        self._buffer = bytearray()
        self._written_closes += self._buffered_closes
        self._buffered_closes = 0
        if self._buffers_usage:
            self._buffers_usage = False
            now = self._clock()
            if self._unsynced_since is None:
                self._unsynced_since = now
            if self._syncing and self._uncovered_since is None:
                self._uncovered_since = now

    def _sync_soon(self) -> None:
        """Let a sync follow if what was written is worth one; the end of one that runs sees to it,
        too."""
        if self._unsynced_since is not None and self._sync_timer is None and not self._syncing:
            is_quick = max(self._sync_times_s) <= QUICK_SYNC_S
            delay_s = SYNC_DELAY_S if is_quick else 0.0
            self._sync_timer = self._loop.call_later(delay_s, self._begin_sync)

    def _begin_sync(self) -> None:
        """Sync in the background what was written, and before that what may be written for who
        waits."""
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        if self._syncing or self._flushing:
            return
        if self._failure is not None or self._is_full or self._stopping:
            self._wanted.set()  # the flusher also retries, rotates or ends
            return
        waiters: Waiters = []
        if not self._write_waiters:
            if self._sync_waiters and self._buffer:
                try:
                    self._write_buffer()
                except SpoolError:
                    return  # the flusher tries again, and tells them
            waiters, self._sync_waiters = self._sync_waiters, waiters
        self._syncing = True
        self._not_syncing.clear()
        self._uncovered_since = None
        self._covered_closes, self._written_closes = self._written_closes, 0
        ended = partial(self._sync_ended, len(self._files.unsynced), waiters)
        self._background.sync(self._files.fd, ended)

    def _sync_ended(self, num_bytes: int, waiters: Waiters, result: float | Exception) -> None:
        self._syncing = False
        self._not_syncing.set()
        if isinstance(result, float):
            self._sync_times_s.append(result)
            self._files.synced(num_bytes)
            self._unsynced_since, self._uncovered_since = self._uncovered_since, None
            self._succeeded(waiters)
            if self._is_full:
                self._wanted.set()
            self._go_on()
        else:
            self._written_closes += self._covered_closes
            self._covered_closes = 0
            self._not_synced(result, waiters)

    def _go_on(self) -> None:
        """Do what has waited for the end of a sync or of a flush."""
        has_records = self._buffer or self._files.unsynced
        if self._failure is not None or self._stopping or (has_records and self._is_full):
            self._wanted.set()
            return
        # What was written while the sync ran may be too old by now for another answer beside it.
        if self._write_waiters and self._may_answer_unsynced:
            waiters, self._write_waiters = self._write_waiters, []
            self._try_to_write(waiters)
        if self._write_waiters or self._sync_waiters:
            self._begin_sync()
        else:
            self._sync_soon()

    def _not_synced(self, error: Exception, waiters: Waiters) -> None:
        """Fail a sync or a flush: keep its records, tell who waited and mark the spool as failed.
        What was answered stays in the file, else a kill -9 would lose it; the rest goes back."""
        self._files.not_synced()
        if self.policy == "before_answer":
            self._buffer[:0] = self._files.unsynced
            self._buffers_usage = True
            self._buffered_closes += self._written_closes
            self._written_closes, self._unsynced_since = 0, None
            try:
                self._files.cut()
            except OSError as another:
                error = another
        self._failed(error, waiters)

    def _succeeded(self, waiters: Waiters) -> None:
        _tell(waiters, None)
        self._synced = self._files.durable_end
        if self._covered_closes:
            self._on_disk += self._covered_closes
            self._covered_closes = 0
            self._readable.set()

    def _failed(self, error: Exception, waiters: Waiters) -> SpoolError:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            failure: SpoolError = SpoolFull(f"{self.directory}: {error.strerror}")
        else:
            failure = SpoolBroken(f"{self.directory}: {error}")
            self.broken.set()
            waiters = [*waiters, *self._take_waiters()]
        if type(failure) is not type(self._failure):
            log.error("spool cannot write (%s)", failure.code, exc_info=error)
        self._failure = failure
        self._wanted.set()
        _tell(waiters, failure)
        return failure

    def _take_waiters(self) -> Waiters:
        taken = self._write_waiters + self._sync_waiters
        self._write_waiters, self._sync_waiters = [], []
        return taken

    # The flusher: what takes a thread.

    async def _flush_until_stopped(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if isinstance(self._failure, SpoolFull) and not self._stopping:
                # Also lets those who were told of it replace what they have queued.
                await asyncio.sleep(RETRY_INTERVAL_S)
            while self._syncing:
                await self._not_syncing.wait()
            if isinstance(self._failure, SpoolBroken):
                break
            self._flushing = True
            await self._flush()
            self._flushing = False
            if self._failure is None and self._stopping:
                if not (self._buffer or self._files.unsynced):
                    return
            elif isinstance(self._failure, SpoolBroken) or self._stopping:
                break
            self._go_on()
        _tell(self._take_waiters(), self._failure)
        await self._save_what_was_answered()

    async def _flush(self) -> None:
        """Write the buffer, sync all that is written, wake the waiters, and rotate a full
        segment."""
        full, waiters = self._is_full, self._take_waiters()
        data, self._buffer = self._buffer, bytearray()
        closes, self._buffered_closes = self._buffered_closes, 0
        self._covered_closes, self._written_closes = closes + self._written_closes, 0
        self._buffers_usage = False
        try:
            # The next segment carries the attempts that are open after `data`, before later ones.
            start = frame(SegmentStart(list(self._open.values()))) if full else None
            took_s = await self._in_thread(lambda: self._files.append(data))
        except Exception as error:
            self._buffer[:0] = data
            self._buffers_usage = True
            self._buffered_closes += closes
            self._written_closes, self._covered_closes = self._covered_closes - closes, 0
            self._not_synced(error, waiters)
            return
        if isinstance(self._failure, SpoolFull):  # a broken spool stays broken
            log.warning("spool %s: writing again", self.directory)
            self._failure = None
        self._sync_times_s.append(took_s)
        self._unsynced_since = None
        self._succeeded(waiters)
        if start is not None:
            await self._rotate(start)

    async def _save_what_was_answered(self) -> None:
        """Write and sync once more what a spool that is given up holds of answers that are out. If
        that fails, too, they are in the file all the same for the process that follows, unless the
        power goes first."""
        num_bytes = len(self._files.unsynced)
        if self.policy == "before_answer" or not num_bytes:
            return
        try:
            await self._in_thread(lambda: self._files.append(b""))
        except Exception as error:
            log.critical(
                "spool %s: %d bytes of usage of answers that are out may not survive a "
                "power cut: %s",
                self.directory,
                num_bytes,
                error,
            )
        else:
            self._covered_closes, self._written_closes = self._written_closes, 0
            self._unsynced_since = None
            self._succeeded([])
            log.warning("spool %s: synced %d bytes after all", self.directory, num_bytes)

    async def _rotate(self, start: bytes) -> None:
        try:
            await self._in_thread(lambda: self._files.rotate(start))
        except OSError as error:
            # The segment stays in use for a while.
            self._rotates_at = self._clock() + RETRY_INTERVAL_S
            log.warning("spool %s: cannot begin a segment: %s", self.directory, error.strerror)
        except Exception as error:
            # It is unknown which segment is in use now.
            self._failed(error, [])
        else:
            self._synced = self._files.durable_end
            self._seals_early = False
            self._has_sealed = True
            self._readable.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
