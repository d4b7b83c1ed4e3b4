"""A worker that leaves: what is open has its time, and what is left is ended and billed."""

from __future__ import annotations

import asyncio

import pytest

from gateway.fleet.errors import ReplicaLost
from gateway.inference.generate import drain
from tests.gateway.inference.test_generate import open_office
from tests.gateway.office import ScriptedReplica, read

__all__ = ["open_office"]
"""Fixtures."""


async def test_draining_ends_what_does_not_end_by_itself(open_office) -> None:
    office = open_office(ScriptedReplica(length=9, hangs_after=2))
    delivery = office.begin()
    assert await delivery.next() is not None
    await drain(office.services, 0.05)
    await office.settled()
    with pytest.raises(ReplicaLost):
        await read(delivery)
    (event,) = await office.billed()
    assert event.quantities.output == 2


async def test_what_comes_while_others_end_has_the_drains_time_too(open_office) -> None:
    """A worker that leaves still takes what is on its way to it."""
    office = open_office(ScriptedReplica(length=9, hangs_after=2))
    earlier = office.begin()
    assert await earlier.next() is not None
    draining = asyncio.create_task(drain(office.services, 60))
    await asyncio.sleep(0)
    later = office.begin()
    assert await later.next() is not None
    earlier.abandon()
    while len(office.services.open_calls) > 1:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert not draining.done() and not later.abandoned
    draining.cancel()
    later.abandon()
    await office.settled()
