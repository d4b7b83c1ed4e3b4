"""Tests of generations of a model of which no engine runs until somebody asks for it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gateway.fleet.errors import ReplicaUnavailable
from gateway.fleet.replica import ReplicaHealth
from gateway.fleet.sent_work import AskedWork
from tests.gateway.inference.test_generate import open_office
from tests.gateway.office import ScriptedReplica, read

__all__ = ["open_office"]


class StartingReplica(ScriptedReplica):
    """Runs, and this worker has not reached it yet."""

    num_looks = 0

    def health(self) -> ReplicaHealth:
        self.num_looks += 1
        return ReplicaHealth(name=self.name, available=False)


async def test_a_model_that_sleeps_is_woken_and_waited_for(open_office) -> None:
    office = open_office(ScriptedReplica())
    fleet, [awake] = office.services.fleet, office.services.fleet.routes
    asked = AskedWork()
    fleet.replace([msgspec.structs.replace(awake, is_asleep=True, asked=asked)])
    delivery = office.begin()
    while not asked.by_column()["requests"]:
        await asyncio.sleep(0)
    starting = StartingReplica()
    fleet.replace([msgspec.structs.replace(awake, replicas=(starting,))])
    while starting.num_looks < 2:
        await asyncio.sleep(0)
    assert not starting.attempts, "it is not asked before it can be reached"
    fleet.replace([awake])
    assert await read(delivery) == b"w1 w2 w3 [3]"
    await office.settled()


async def test_a_start_that_takes_longer_than_a_request_has_is_told_at_once(open_office) -> None:
    office = open_office(ScriptedReplica())
    [awake], sleep = office.services.fleet.routes, {"is_asleep": True, "wakes_in_s": 300.0}
    office.services.fleet.replace([msgspec.structs.replace(awake, asked=AskedWork(), **sleep)])
    with pytest.raises(ReplicaUnavailable) as refused:
        await read(office.begin())
    assert refused.value.retry_after_s == 300.0 and await office.billed() == []
