"""The hand-over between a generation and its response."""

from __future__ import annotations

import asyncio

import pytest

from gateway.delivery import MAX_QUEUED_CHUNKS, Delivery

STALLED_S = 60.0


async def test_what_is_ready_is_read_together_and_in_order() -> None:
    box = Delivery(STALLED_S)
    for word in (b"a", b"b", b"c"):
        await box.put(word)
    assert await box.next() == b"abc"
    box.end()
    assert await box.next() is None


async def test_a_failure_comes_after_what_was_queued() -> None:
    box = Delivery(STALLED_S)
    await box.put(b"so far")
    box.fail(ValueError("lost"))
    assert await box.next() == b"so far"
    with pytest.raises(ValueError, match="lost"):
        await box.next()


async def test_the_writer_waits_for_a_slow_reader() -> None:
    box = Delivery(STALLED_S)
    for _ in range(MAX_QUEUED_CHUNKS):
        await box.put(b".")
    late = asyncio.create_task(box.put(b"!"))
    await asyncio.sleep(0.01)
    assert not late.done()
    assert await box.next() == b"." * MAX_QUEUED_CHUNKS
    await asyncio.wait_for(late, 1)
    assert await box.next() == b"!"


async def test_a_reader_that_stalls_is_given_up() -> None:
    box = Delivery(stalled_reader_s=0.02)
    for _ in range(MAX_QUEUED_CHUNKS + 1):
        await asyncio.wait_for(box.put(b"."), 1)
    assert box.abandoned


async def test_abandoning_frees_a_waiting_writer_and_calls_back_once() -> None:
    box, calls = Delivery(STALLED_S), []
    with box.on_abandon(lambda: calls.append("gone")):
        for _ in range(MAX_QUEUED_CHUNKS):
            await box.put(b".")
        late = asyncio.create_task(box.put(b"!"))
        await asyncio.sleep(0)
        box.abandon()
        box.abandon()
        await asyncio.wait_for(late, 1)
    assert calls == ["gone"]
    assert await box.next() is None


async def test_who_comes_late_to_an_abandoned_delivery_is_told_at_once() -> None:
    box, calls = Delivery(STALLED_S), []
    box.abandon()
    with box.on_abandon(lambda: calls.append("gone")):
        assert calls == ["gone"]


async def test_after_the_end_nobody_can_abandon() -> None:
    box = Delivery(STALLED_S)
    await box.put(b"all of it")
    box.end()
    box.abandon()
    assert not box.abandoned
    assert await box.next() == b"all of it"


async def test_an_abandoned_reader_learns_the_reason() -> None:
    box = Delivery(STALLED_S)
    box.abandon(RuntimeError("shutting down"))
    with pytest.raises(RuntimeError, match="shutting down"):
        await box.next()
