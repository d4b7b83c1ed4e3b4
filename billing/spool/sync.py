"""A file that is synced beside everything else, with no thread of ours that would wait for it.

    beside = SyncBeside.begun(threads)
    beside.sync(fd, ended)      # ended(seconds) or ended(OSError), on the event loop, later
    beside.close()

Python's threads take turns: one that is to sync begins when whoever asked for it rests, and has to
be waited for again when it is done, which costs a third of a call's time where calls are short. The
kernel syncs by itself where it is asked to (Linux AIO, IOCB_CMD_FDSYNC since 4.18; io_submit(2)):
0.11 ms of processor time instead of 0.22, begun at once. Where it refuses (a sandbox may forbid the
calls, a filesystem may not know them, fs.aio-max-nr may be spent) a thread does it.

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

Ended = Callable[[float | Exception], None]

MAX_REQUESTS = 4
"""That the kernel keeps room for. A spool has one at a time."""
NEGATIVE = 1 << 63
"""Results come as they lie in 64 bits: from here on they are less than zero."""


class SyncBeside:
    def __init__(self, threads: Executor) -> None:
        self._threads, self._loop = threads, asyncio.get_running_loop()
        self._kernel = _kernel()
        if self._kernel is not None:
            self._loop.add_reader(self._kernel.fileno, self._take_results)

    @property
    def is_by_kernel(self) -> bool:
        return self._kernel is not None

    def sync(self, fd: int, ended: Ended) -> None:
        """Sync what was written to `fd` before now. `ended` hears the seconds that it took, or why
        it is not known to be on disk. Raises nothing."""
        if self._kernel is not None and self._asked_of_kernel(fd, ended):
            return
        self._threads.submit(self._in_thread, fd, ended)

    def close(self) -> None:
        """Once nothing is under way."""
        if self._kernel is not None:
            self._loop.remove_reader(self._kernel.fileno)
            self._kernel = None

    def _asked_of_kernel(self, fd: int, ended: Ended) -> bool:
        assert self._kernel is not None
        operation = linux_aio.Operation.fdsync(fd)
        operation.set_callback(partial(_tell, ended, time.perf_counter()))
        try:
            self._kernel.submit(operation)
        except (ValueError, OSError, SystemError) as error:
            log.warning("spool: the kernel syncs nothing by itself (%s): threads do", error)
            self.close()
            return False
        return True

    def _take_results(self) -> None:
        assert self._kernel is not None
        self._kernel.poll()
        self._kernel.process_events()

    def _in_thread(self, fd: int, ended: Ended) -> None:
        began_at = time.perf_counter()
        try:
            os.fdatasync(fd)
            found: float | Exception = time.perf_counter() - began_at
        except Exception as error:
            found = error
        self._loop.call_soon_threadsafe(ended, found)


def _kernel() -> linux_aio.Context | None:
    if sys.platform != "linux":
        return None
    try:
        return linux_aio.Context(max_requests=MAX_REQUESTS)
    except (ValueError, OSError, SystemError) as error:
        log.info("spool: the kernel syncs nothing by itself (%s): threads do", error)
        return None


def _tell(ended: Ended, began_at: float, result: int) -> None:
    if result >= NEGATIVE:
        number = 2 * NEGATIVE - result
        ended(OSError(number, os.strerror(number)))
    else:
        ended(time.perf_counter() - began_at)
