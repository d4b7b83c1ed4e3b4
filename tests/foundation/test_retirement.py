"""A thing that was replaced is closed when nobody holds it, once, or with its owner."""

from __future__ import annotations

import asyncio
import gc

import pytest

from foundation import retirement as retirement_module
from foundation.retirement import Retirement


class Thing:
    """A thing that others hold."""


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_thing_is_closed_when_its_last_holder_lets_go() -> None:
    retirement, closed = Retirement(), []

    async def close() -> None:
        closed.append(1)

    thing = Thing()
    holders = [thing, thing]
    retirement.add(thing, close)
    del thing
    await settled()
    holders.pop()
    await settled()
    assert not closed and retirement.num_waiting == 1
    holders.pop()
    gc.collect()
    await settled()
    assert closed == [1] and retirement.num_waiting == 0
    await retirement.close()
    assert closed == [1]


async def test_the_end_of_its_owner_closes_what_is_still_held() -> None:
    retirement, closed, thing = Retirement(), [], Thing()

    async def close() -> None:
        closed.append(1)

    retirement.add(thing, close)
    await retirement.close()
    assert closed == [1]
    del thing
    await settled()
    assert closed == [1]


async def test_garbage_that_holds_a_thing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame of a request that failed holds its error, which holds the frame."""
    monkeypatch.setattr(retirement_module, "FIRST_COLLECTION_S", 0.001)
    retirement, closed, thing = Retirement(), asyncio.Event(), Thing()

    async def close() -> None:
        closed.set()

    retirement.add(thing, close)
    thing.itself = thing  # type: ignore[attr-defined]
    gc.disable()
    try:
        del thing
        await closed.wait()
    finally:
        gc.enable()
    await retirement.close()
