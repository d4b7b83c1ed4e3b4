"""The hand-over between the task that drives a generation and the response that writes it out.

A bounded queue of wire-ready bytes, and two one-way signals: `fail` (driver to reader: nothing more
will come, and why) and `abandon` (reader to driver: nobody listens). `expire` is both: the time
that the reader gave is over. It knows no HTTP and no model. One event loop, no locks.

Once the queue is full the writer rests, and what writes for it (our engine's sequence is paused, an
upstream is not read from), until the reader has taken all of it or is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from billing.pricing.rating import RatedUsage
from gateway.limits.allowance import SetPaused
from gateway.limits.outcomes import RateState

MAX_QUEUED_CHUNKS = 64
MAX_QUEUED_BYTES = 64 * 1024
"""A queue may exceed this by one chunk."""


class Delivery:
    """Single producer, single consumer. A reader that takes nothing for `stalled_reader_s` is
    treated as gone."""

    def __init__(self, stalled_reader_s: float) -> None:
        self.stalled_reader_s = stalled_reader_s
        self.rate_state: RateState | None = None
        self.ignored: tuple[str, ...] = ()
        """The paths of fields of the request that were left out."""
        self.version: int | None = None
        """The version of the model that answers; None: the model has none."""
        self.cost: RatedUsage | None = None
        """The price of an answer that tells its cost; it is set before the last chunk."""
        self.is_billed = False
        """True if the generated tokens are billed."""
        self.abandoned = False
        self.failure: Exception | None = None
        """Why the reader gets no more, where that was not the reader's own leaving."""
        self._chunks: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_put = self._num_taken = self._num_sent = 0
        self._marks: deque[tuple[int, Callable[[], None]]] = deque()
        """How many chunks must have been sent, and who wants to know; at most one for a chunk that
        is queued or being sent."""
        self._is_whole = self._has_expired = False
        self._ended = False
        self._over: asyncio.Event | None = None
        """Made for who waits for the driver's end."""
        self._awaited: asyncio.Future[None] | None = None
        """By the reader: that there is something to read, or nothing more."""
        self._write: Callable[[bytes], bool] | None = None
        """Sends a chunk for a reader that waits for one."""
        self._writable: asyncio.Event | None = None
        """Made for a writer that rests."""
        self._on_abandon: Callable[[], None] | None = None

    # the driver's side

    @property
    def begun(self) -> bool:
        """Tell whether the reader has taken anything."""
        return self._num_taken > 0

    @property
    def has_room(self) -> bool:
        """Tell whether a chunk of usual size leaves some room behind it."""
        is_short = len(self._chunks) < MAX_QUEUED_CHUNKS - 1
        return is_short and self._num_bytes < MAX_QUEUED_BYTES // 2

    def admitted(self, rate_state: RateState) -> None:
        """Note what the response headers will say; called before the first chunk."""
        self.rate_state = rate_state

    async def put(self, chunk: bytes, set_paused: SetPaused) -> None:
        """Queue a chunk; if that took the last room, pause the writer until there is some again. A
        chunk for a reader that is gone is dropped: it was generated and is billed."""
        self._append(chunk)
        if len(self._chunks) < MAX_QUEUED_CHUNKS and self._num_bytes < MAX_QUEUED_BYTES:
            return
        self._writable = asyncio.Event()
        await asyncio.sleep(0)  # a reader that waits for nothing else takes it now
        if self._writable.is_set():
            return
        await set_paused(True)
        try:
            async with asyncio.timeout(self.stalled_reader_s):
                await self._writable.wait()
        except TimeoutError:
            self.abandon()
        if not self.abandoned:
            await set_paused(False)

    def put_at_once(self, chunk: bytes) -> None:
        """Queue a chunk for which there is room (`has_room`)."""
        self._append(chunk)

    def put_last(self, chunk: bytes) -> None:
        """Queue the last chunk: nothing follows it, so it waits for nobody."""
        self._queue(chunk)
        self._is_whole = True

    def once_sent(self, callback: Callable[[], None]) -> None:
        """Run `callback` when all that was put by now has been sent; never, if the reader leaves
        before."""
        if self._num_sent == self._num_put and not self.abandoned:
            callback()
        else:
            self._marks.append((self._num_put, callback))

    def end(self) -> None:
        self._ended = True
        if self._over is not None:
            self._over.set()
        self._wake_reader()

    def fail(self, error: Exception) -> None:
        """Let what is queued still be read; then `next` raises `error`."""
        self.failure = self.failure or error
        self.end()

    @property
    def was_left(self) -> bool:
        """Tell whether the reader abandoned it by its own will, or for want of it: who left is
        billed, too."""
        return self.abandoned and (self._has_expired or self.failure is None)

    def on_abandon(self, callback: Callable[[], None]) -> Abandonment:
        """Run `callback` once when the reader leaves, at once if it has left already: within a
        `with` block."""
        return Abandonment(self, callback)

    def tell_abandonment(self, callback: Callable[[], None] | None) -> None:
        self._on_abandon = callback
        if callback is not None and self.abandoned:
            callback()

    # the reader's side

    @property
    def is_taken(self) -> bool:
        """Tell whether the reader has taken the last chunk, and nothing failed by then: it need not
        ask for more."""
        is_left = self.abandoned or self.failure is not None
        return self._is_whole and not self._chunks and not is_left

    def write_with(self, write: Callable[[bytes], bool]) -> None:
        """Let what comes while the reader waits be sent by `write`, which wakes no task. False: it
        cannot take it now, so the reader does."""
        self._write = write

    def sent(self) -> None:
        """Note that the reader has sent what it got."""
        self._num_sent = self._num_taken
        while self._marks and self._marks[0][0] <= self._num_taken:
            self._marks.popleft()[1]()

    async def next(self) -> bytes | None:
        """Return all chunks that are ready, joined; None at the end, which needs not be waited for
        behind the last one, or when abandoned. Raises what `fail` was given. Whoever comes back has
        sent what it got before."""
        self.sent()
        while not self._chunks:
            if self._ended or self.abandoned or self._is_whole:
                if self.failure is not None:
                    raise self.failure
                return None
            self._awaited = asyncio.get_running_loop().create_future()
            try:
                await self._awaited
            finally:
                self._awaited = None
        ready = b"".join(self._chunks)
        self._chunks.clear()
        self._num_bytes = 0
        self._num_taken = self._num_put
        self._let_write()
        return ready

    async def over(self) -> None:
        """The driver has ended: `is_billed` is final. What is abandoned or expires is still aborted
        and billed after its reader has heard of it."""
        if not self._ended:
            self._over = self._over or asyncio.Event()
            await self._over.wait()

    def abandon(self, reason: Exception | None = None) -> None:
        """The reader is gone, or told to go with a `reason`. Idempotent; once all is put it changes
        nothing."""
        if self.abandoned or self._ended or self._is_whole:
            return
        self._chunks.clear()
        self._num_bytes = 0
        self._leave(reason)

    def expire(self, reason: Exception) -> None:
        """Abandon it as if the reader left, but what is queued is still read; then `next` raises
        `reason`. An answer that is whole has come in time."""
        if not (self.abandoned or self._ended or self._is_whole):
            self._has_expired = True
            self._leave(reason)

    def _append(self, chunk: bytes) -> None:
        """Send a chunk, or queue it."""
        if self._write is not None and self._may_send and self._write(chunk):
            self._num_put += 1
            self._num_taken = self._num_put
            self.sent()
        else:
            self._queue(chunk)

    def _queue(self, chunk: bytes) -> None:
        if not self.abandoned:
            self._chunks.append(chunk)
            self._num_bytes += len(chunk)
            self._num_put += 1
            self._wake_reader()

    @property
    def _may_send(self) -> bool:
        """Tell whether the reader waits, with all that it took sent."""
        is_awaited = self._awaited is not None and not self._awaited.done()
        return is_awaited and not self._chunks and not self.abandoned

    def _wake_reader(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _let_write(self) -> None:
        if self._writable is not None:
            self._writable.set()

    def _leave(self, reason: Exception | None) -> None:
        self.abandoned = True
        self.failure = reason
        self._let_write()
        self._wake_reader()
        if self._on_abandon is not None:
            self._on_abandon()


class Abandonment:
    """Tells of a delivery's abandonment within a `with` block. A generator would take four times as
    long, in each request."""

    __slots__ = ("_callback", "_delivery")

    def __init__(self, delivery: Delivery, callback: Callable[[], None]) -> None:
        self._delivery, self._callback = delivery, callback

    def __enter__(self) -> None:
        self._delivery.tell_abandonment(self._callback)

    def __exit__(self, *error: object) -> None:
        self._delivery.tell_abandonment(None)
