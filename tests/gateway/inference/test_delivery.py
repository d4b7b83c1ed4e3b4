"""The hand-over between a generation and its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.delivery import MAX_QUEUED_BYTES, MAX_QUEUED_CHUNKS, Delivery
from gateway.limits.allowance import PauseReasons
from tests.pace import within

STALLED_S = 60.0


class PauseRecorder:
    """A `SetPaused` that notes what it was told."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    async def __call__(self, resting: bool) -> None:
        self.told.append(resting)


@pytest.fixture
def rest() -> PauseRecorder:
    return PauseRecorder()


async def test_what_is_ready_is_read_together_and_in_order(rest: PauseRecorder) -> None:
    box = Delivery(STALLED_S)
    for word in (b"a", b"b", b"c"):
        await box.put(word, rest)
    assert await box.next() == b"abc"
    box.end()
    assert await box.next() is None
    assert rest.told == []


async def test_a_failure_comes_after_what_was_queued(rest: PauseRecorder) -> None:
    box = Delivery(STALLED_S)
    await box.put(b"so far", rest)
    box.fail(ValueError("lost"))
    assert await box.next() == b"so far"
    with pytest.raises(ValueError, match="lost"):
        await box.next()


@pytest.mark.parametrize(
    "chunks", [[b"."] * MAX_QUEUED_CHUNKS, [b"x" * (MAX_QUEUED_BYTES // 4)] * 4]
)
async def test_the_writer_rests_while_the_reader_is_slow(
    rest: PauseRecorder, chunks: list[bytes]
) -> None:
    box = Delivery(STALLED_S)
    for chunk in chunks[1:]:
        await box.put(chunk, rest)
    assert rest.told == []
    late = asyncio.create_task(box.put(chunks[0], rest))
    await asyncio.sleep(0.01)
    assert not late.done() and rest.told == [True]
    assert await box.next() == b"".join(chunks)
    await asyncio.wait_for(late, 30)
    assert rest.told == [True, False]
    await box.put(b"!", rest)
    assert await box.next() == b"!"


async def test_a_reader_that_waits_for_nothing_else_lets_nobody_rest(rest: PauseRecorder) -> None:
    box = Delivery(STALLED_S)
    reading = asyncio.create_task(box.next())
    for _ in range(MAX_QUEUED_CHUNKS):
        await box.put(b".", rest)
    assert await reading == b"." * MAX_QUEUED_CHUNKS
    assert rest.told == []


async def test_the_last_chunk_waits_for_nobody(rest: PauseRecorder) -> None:
    box = Delivery(STALLED_S)
    for _ in range(MAX_QUEUED_CHUNKS - 1):
        await box.put(b".", rest)
    box.put_last(b"!")
    box.end()
    assert rest.told == []
    assert (await box.next() or b"").endswith(b".!")
    assert await box.next() is None


async def test_a_reader_that_stalls_is_given_up_and_nothing_written_again(
    rest: PauseRecorder,
) -> None:
    box = Delivery(stalled_reader_s=0.02)
    for _ in range(MAX_QUEUED_CHUNKS + 1):
        await asyncio.wait_for(box.put(b".", rest), 30)
    assert box.abandoned
    assert rest.told == [True], "it is aborted as it is"


async def test_abandoning_frees_a_waiting_writer_and_calls_back_once(rest: PauseRecorder) -> None:
    box, calls = Delivery(STALLED_S), []
    with box.on_abandon(lambda: calls.append("gone")):
        for _ in range(MAX_QUEUED_CHUNKS - 1):
            await box.put(b".", rest)
        late = asyncio.create_task(box.put(b"!", rest))
        await asyncio.sleep(0.01)
        box.abandon()
        box.abandon()
        await asyncio.wait_for(late, 30)
    assert calls == ["gone"]
    assert await box.next() is None


@given(wishes=st.lists(st.tuples(st.booleans(), st.booleans())))
async def test_it_rests_while_either_wants_it_to(wishes: list[tuple[bool, bool]]) -> None:
    halt = PauseRecorder()
    rests = PauseReasons(halt)
    wants = {True: False, False: False}
    for by_limits, resting in wishes:
        before = any(wants.values())
        wants[by_limits] = resting
        told = len(halt.told)
        await (rests.for_limits if by_limits else rests.for_reader)(resting)
        assert halt.told[told:] == ([any(wants.values())] if any(wants.values()) != before else [])
    assert all(one != other for one, other in pairwise(halt.told))


async def test_who_comes_late_to_an_abandoned_delivery_is_told_at_once() -> None:
    box, calls = Delivery(STALLED_S), []
    box.abandon()
    with box.on_abandon(lambda: calls.append("gone")):
        assert calls == ["gone"]


async def test_what_was_written_before_it_expired_is_read_and_nothing_after(
    rest: PauseRecorder,
) -> None:
    box, calls = Delivery(STALLED_S), []
    with box.on_abandon(lambda: calls.append("late")):
        await box.put(b"in time", rest)
        box.expire(TimeoutError("late"))
        await box.put(b"too late", rest)
    assert calls == ["late"] and box.abandoned and box.was_left
    assert await box.next() == b"in time"
    with pytest.raises(TimeoutError, match="late"):
        await box.next()


async def test_a_whole_answer_does_not_expire() -> None:
    box = Delivery(STALLED_S)
    box.put_last(b"all of it")
    box.expire(TimeoutError("late"))
    assert not box.abandoned and await box.next() == b"all of it"
    box.end()
    assert await box.next() is None


async def test_behind_the_last_chunk_nothing_is_waited_for() -> None:
    box = Delivery(STALLED_S)
    box.put_last(b"all of it")
    assert await box.next() == b"all of it"
    async with within(1.0):
        assert await box.next() is None, "whatever else its driver has to do"
    box.abandon()
    assert not box.abandoned, "who has it all does not leave it"


async def test_after_the_end_nobody_can_abandon() -> None:
    box = Delivery(STALLED_S)
    box.put_last(b"all of it")
    box.end()
    box.abandon()
    assert not box.abandoned
    assert await box.next() == b"all of it"


async def test_an_abandoned_reader_learns_the_reason() -> None:
    box = Delivery(STALLED_S)
    box.abandon(RuntimeError("shutting down"))
    with pytest.raises(RuntimeError, match="shutting down"):
        await box.next()


async def test_a_chunk_is_sent_when_its_reader_comes_back_for_more(rest: PauseRecorder) -> None:
    box, sent = Delivery(STALLED_S), []
    await box.put(b"a", rest)
    box.once_sent(lambda: sent.append("a"))
    assert not box.begun
    assert await box.next() == b"a"
    assert box.begun and sent == [], "it may still fail to write it"
    await box.put(b"b", rest)
    box.once_sent(lambda: sent.append("b"))
    assert await box.next() == b"b"
    assert sent == ["a"]
    box.abandon()
    assert await box.next() is None
    assert sent == ["a", "b"]


async def test_what_comes_while_the_reader_waits_is_sent_without_it(rest: PauseRecorder) -> None:
    box, wire, sent = Delivery(STALLED_S), list[bytes](), list[str]()
    is_full = False

    def write(chunk: bytes) -> bool:
        if not is_full:
            wire.append(chunk)
        return not is_full

    box.write_with(write)
    await box.put(b"head", rest)
    assert wire == [] and await box.next() == b"head", "nobody waited"
    waiting = asyncio.create_task(box.next())
    await asyncio.sleep(0)
    await box.put(b"a", rest)
    box.put_at_once(b"b")
    box.once_sent(lambda: sent.append("b"))
    await asyncio.sleep(0)
    assert wire == [b"a", b"b"] and sent == ["b"] and box.begun and not waiting.done()
    is_full = True
    box.put_at_once(b"c")
    box.once_sent(lambda: sent.append("c"))
    is_full = False
    box.put_at_once(b"d")
    assert await waiting == b"cd" and wire == [b"a", b"b"], "in order"
    waiting = asyncio.create_task(box.next())
    await asyncio.sleep(0)
    assert sent == ["b", "c"]
    box.put_last(b"!")
    assert await waiting == b"!" and box.is_taken, "the end goes out by its reader"


@pytest.mark.parametrize("leave", [Delivery.abandon, lambda box: box.expire(TimeoutError())])
async def test_nothing_is_sent_for_a_reader_that_is_gone(
    rest: PauseRecorder, leave: Callable[[Delivery], None]
) -> None:
    box, wire, sent = Delivery(STALLED_S), list[bytes](), list[str]()
    box.write_with(lambda chunk: wire.append(chunk) is None)
    waiting = asyncio.create_task(box.next())
    await asyncio.sleep(0)
    leave(box)
    box.put_at_once(b"a")
    box.once_sent(lambda: sent.append("a"))
    assert wire == [] and sent == []
    await asyncio.gather(waiting, return_exceptions=True)


async def test_there_is_room_until_one_chunk_would_take_the_last_of_it(rest: PauseRecorder) -> None:
    box = Delivery(STALLED_S)
    while box.has_room:
        box.put_at_once(b".")
    assert rest.told == [] and box._num_put == MAX_QUEUED_CHUNKS - 1
    await box.next()
    assert box.has_room
    box.put_at_once(b"x" * (MAX_QUEUED_BYTES // 2))
    assert not box.has_room
