"""Long prompts are tokenized in their tenants' turns: a flood holds up nobody else for longer than
what was handed over already takes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Lane
from gateway.fleet.errors import NoSlot
from gateway.fleet.prepare_threads import AHEAD, INLINE_CHARS, PrepareThreads
from gateway.lanes import Priority
from tests.budget import examples

FLOOD = Priority(lane="batch", tenant="flood")
LONG = INLINE_CHARS + 1


class Workshop(Executor):
    """Threads that take as long as the test says: `finish` ends what was begun first."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.begun: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.begun.append((future, lambda: fn(*args, **kwargs)))
        return future

    def finish(self) -> None:
        future, work = self.begun.popleft()
        future.set_result(work())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@settings(max_examples=examples(60), deadline=None)
@given(
    num_threads=st.integers(1, 3),
    sizes=st.lists(st.integers(LONG, 50 * LONG), min_size=20, max_size=60),
    others=st.lists(
        st.tuples(
            st.integers(0, 15),  # how much was finished before it came
            st.sampled_from(["interactive", "agentic", "batch"]),
            st.sampled_from(["b", "c"]),
        ),
        min_size=1,
        max_size=8,
    ),
)
async def test_who_comes_into_a_flood_is_next(
    num_threads: int, sizes: list[int], others: list[tuple[int, Lane, str]]
) -> None:
    """Behind what the threads have already, one more of the flood for each that went before it in
    its lane, and the others."""
    shop = Workshop(num_threads)
    threads = PrepareThreads(max_threads=num_threads, executor=shop)
    done: list[str] = []
    running = [
        asyncio.create_task(threads.run(FLOOD, size, done.append, "flood")) for size in sizes
    ]
    await settle()
    came: dict[str, int] = {}
    waiting = sorted(others)
    while shop.begun:
        while waiting and waiting[0][0] <= len(done):
            _, lane, tenant = waiting.pop(0)
            name = f"{tenant}{len(came)}"
            came[name] = len(done)
            priority = Priority(lane=lane, tenant=tenant)
            running.append(asyncio.create_task(threads.run(priority, LONG, done.append, name)))
        await settle()
        shop.finish()
        await settle()
    await asyncio.gather(*running)
    threads._room.check_integrity()
    for name, at in came.items():
        floods = done[at : done.index(name)].count("flood")
        assert floods <= num_threads + AHEAD + len(came), (name, floods, done)


async def test_a_flood_is_refused_before_the_queue_is_full_and_others_are_not() -> None:
    shop = Workshop(1)
    threads = PrepareThreads(max_threads=1, max_queued=8, executor=shop)
    ended: Counter[str] = Counter()

    async def ask(priority: Priority) -> None:
        try:
            await threads.run(priority, LONG, str)
        except NoSlot:
            ended[f"{priority.tenant} refused"] += 1
        else:
            ended[priority.tenant] += 1

    asked = [asyncio.create_task(ask(FLOOD)) for _ in range(20)]
    await settle()
    asked += [asyncio.create_task(ask(Priority(lane="batch", tenant="b"))) for _ in range(2)]
    await settle()
    while shop.begun:
        shop.finish()
        await settle()
    await asyncio.gather(*asked)
    assert ended == {"flood": 1 + AHEAD + 6, "flood refused": 12 - AHEAD + 1, "b": 2}


async def test_what_is_short_is_done_at_once_and_what_was_begun_keeps_its_slot() -> None:
    threads = PrepareThreads(max_threads=1, max_queued=1)
    go_on, here = threading.Event(), threading.get_ident
    priority = Priority(tenant="a")
    try:
        assert await threads.run(priority, INLINE_CHARS, here) == here()
        first = asyncio.create_task(threads.run(priority, LONG, go_on.wait, 5))
        second, third = (asyncio.create_task(threads.run(priority, LONG, here)) for _ in "ab")
        await settle()
        with pytest.raises(NoSlot):
            await threads.run(priority, LONG, here)
        second.cancel()  # who waits may leave; the slot is taken until the work is done
        await settle()
        assert threads._room.num_served["interactive"] == 1 + AHEAD
        third.cancel()
        await settle()
        assert sum(threads._room.num_waiting.values()) == 0
        go_on.set()
        assert await first is True
        assert await threads.run(priority, LONG, here) != here()
        threads._room.check_integrity()
    finally:
        go_on.set()
        threads.close()
