"""Sync a file in the background, by the kernel where it can, else in a thread.

    syncs = BackgroundSync(threads)
    syncs.sync(fd, on_done)      # calls on_done(seconds) or on_done(OSError) on the event loop
    syncs.close()

A thread starts only when the event loop gives up the GIL, and has to get it back at the end, which
takes a third of a short call's time. Linux AIO (IOCB_CMD_FDSYNC since 4.18; io_submit(2)) starts at
once and takes 0.11 ms of processor time instead of 0.22. A thread syncs where the kernel refuses: a
sandbox may forbid the calls, a filesystem may lack them, fs.aio-max-nr may be used up.

Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

if sys.platform == "linux":
    from caio import linux_aio

log = logging.getLogger(__name__)

OnDone = Callable[[float | Exception], None]

MAX_REQUESTS = 4
"""The kernel reserves room for so many; a spool has one at a time."""
NEGATIVE = 1 << 63
"""Results are unsigned 64-bit numbers; from here on they stand for negative ones."""


class BackgroundSync:
    def __init__(self, threads: Executor) -> None:
        self._threads, self._loop = threads, asyncio.get_running_loop()
        self._kernel = _kernel()
        if self._kernel is not None:
            self._loop.add_reader(self._kernel.fileno, self._take_results)

    @property
    def is_by_kernel(self) -> bool:
        return self._kernel is not None

    def sync(self, fd: int, on_done: OnDone) -> None:
        """Sync what was written to `fd` before now, and call `on_done` with the seconds that it
        took, or with the error."""
        if self._kernel is None or not self._submit_to_kernel(fd, on_done):
            self._threads.submit(self._sync_in_thread, fd, on_done)

    def close(self) -> None:
        """Stop listening to the kernel; no sync may be running."""
        if self._kernel is not None:
            self._loop.remove_reader(self._kernel.fileno)
            self._kernel = None

    def _submit_to_kernel(self, fd: int, on_done: OnDone) -> bool:
        assert self._kernel is not None
        operation = linux_aio.Operation.fdsync(fd)
        operation.set_callback(partial(_finish, on_done, time.perf_counter()))
        try:
            self._kernel.submit(operation)
        except (ValueError, OSError, SystemError) as error:
            log.warning("spool: Linux AIO is not available (%s), syncing in threads", error)
            self.close()
            return False
        return True

    def _take_results(self) -> None:
        assert self._kernel is not None
        self._kernel.poll()
        self._kernel.process_events()

    def _sync_in_thread(self, fd: int, on_done: OnDone) -> None:
        began_at = time.perf_counter()
        try:
            os.fdatasync(fd)
            result: float | Exception = time.perf_counter() - began_at
        except Exception as error:
            result = error
        self._loop.call_soon_threadsafe(on_done, result)


def _kernel() -> linux_aio.Context | None:
    if sys.platform != "linux":
        return None
    try:
        return linux_aio.Context(max_requests=MAX_REQUESTS)
    except (ValueError, OSError, SystemError) as error:
        log.info("spool: Linux AIO is not available (%s), syncing in threads", error)
        return None


def _finish(on_done: OnDone, began_at: float, result: int) -> None:
    if result >= NEGATIVE:
        number = 2 * NEGATIVE - result
        on_done(OSError(number, os.strerror(number)))
    else:
        on_done(time.perf_counter() - began_at)
