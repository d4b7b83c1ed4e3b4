"""A thing that was replaced is closed when nobody holds it, once, or with its owner."""

from __future__ import annotations

import asyncio
import gc

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
