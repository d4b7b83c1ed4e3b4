"""Where long prompts are rendered and tokenized: a few threads beside the event loop, with a
bounded queue.

Above: the replicas' `prepare`. Below: a ThreadPoolExecutor. The tokenizers library releases the
GIL, so that other requests go on meanwhile. What is short is done at once: a thread's hand-over
costs more than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from gateway.fleet.errors import ReplicaOverloaded

INLINE_CHARS = 2048
"""Well under a millisecond of tokenizing."""
MAX_THREADS = 2
MAX_QUEUED = 256
"""Long prompts being prepared in this process; beyond it a request is refused with Retry-After."""

P = ParamSpec("P")
R = TypeVar("R")


class PrepareThreads:
    """Shared by all replicas of a process."""

    def __init__(self, *, max_threads: int = MAX_THREADS, max_queued: int = MAX_QUEUED) -> None:
        self._executor = ThreadPoolExecutor(max_threads, thread_name_prefix="prepare")
        self._max_queued = max_queued
        self._num_queued = 0

    async def run(
        self, size_chars: int, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """`work(*args)`, elsewhere if `size_chars` is large. Raises ReplicaOverloaded, and what
        `work` raises.
        """
        if size_chars <= INLINE_CHARS:
            return work(*args, **kwargs)
        if self._num_queued >= self._max_queued:
            raise ReplicaOverloaded(f"{self._num_queued} prompts are being prepared")
        self._num_queued += 1
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))
        # Counted until the thread is free again, also when the one who waits has left.
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def close(self) -> None:
        """What has not begun never will."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: asyncio.Future[R]) -> None:
        self._num_queued -= 1
        if not future.cancelled():
            future.exception()  # seen here, should nobody wait for it any more
