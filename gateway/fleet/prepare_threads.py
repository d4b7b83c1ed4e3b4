"""Renders and tokenizes long prompts: a few threads beside the event loop, and a bounded
queue before them in which no tenant waits behind another's flood.

`Tokenizer` releases the GIL for what is long, so that other requests go on meanwhile. What is short
is done at once: a thread's hand-over costs more than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from gateway.fleet.waiting_room import WaitingRoom
from gateway.lanes import Priority

INLINE_CHARS = 2048
"""Well under a millisecond of tokenizing."""
MAX_THREADS = 2
AHEAD = 1
"""Handed over beyond the threads, so that none waits for the event loop to come round."""
MAX_QUEUED = 128
"""Long prompts of a lane that wait in this process; beyond it a request is refused with
Retry-After, and before that one of a tenant who has most of them."""

P = ParamSpec("P")
R = TypeVar("R")


class PrepareThreads:
    """The threads that prepare requests, shared by all replicas of a process. `executor`: with so
    many threads, in place of its own."""

    def __init__(
        self,
        *,
        max_threads: int = MAX_THREADS,
        max_queued: int = MAX_QUEUED,
        executor: Executor | None = None,
    ) -> None:
        self._executor = executor or ThreadPoolExecutor(max_threads, thread_name_prefix="prepare")
        self._room = WaitingRoom(max_threads + AHEAD, max_waiting=max_queued)

    async def run(
        self,
        priority: Priority,
        size_chars: int,
        work: Callable[P, R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run `work(*args)`, elsewhere if `size_chars` is large, in its turn. Raises NoSlot, and
        what `work` raises."""
        if size_chars <= INLINE_CHARS:
            return work(*args, **kwargs)
        ticket = self._room.join(priority, size_chars)
        try:
            await ticket.served.wait()
        except asyncio.CancelledError:
            self._room.leave(ticket)
            raise
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))

        def done(future: asyncio.Future[R]) -> None:
            self._room.leave(ticket)
            if not future.cancelled():
                future.exception()  # seen here, should nobody wait for it any more

        # The slot is taken until the thread is free again, also when the one who waits has left.
        future.add_done_callback(done)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Stop; what has not begun never will."""
        self._executor.shutdown(wait=False, cancel_futures=True)
