"""Checks how a worker finds the parts that requests depend on, what makes it not ready, and what it
names as degraded."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis.asyncio
from redis.exceptions import ResponseError
from sqlalchemy.ext.asyncio import create_async_engine

from billing.errors import SpoolFull
from billing.spool import directory
from billing.spool.spool import Spool
from gateway.fleet.contact import Contact
from gateway.fleet.replica import Replica, ReplicaHealth
from gateway.fleet.router import Fleet, Route
from gateway.health import readiness as module
from gateway.health.component import Component
from gateway.health.readiness import Disk, Readiness
from gateway.telemetry.metrics import COMPONENT_STATES, Telemetry
from tests.billing.samples import an_event

NOWHERE = "postgresql+asyncpg://nobody:secret@/none?host=/nonexistent"


class Far:
    """An upstream as its health is told."""

    def __init__(self, name: str = "far/0") -> None:
        self.name, self.weight, self.identity = name, 1, name
        self.contact = Contact()
        self.available = True

    def health(self) -> ReplicaHealth:
        return ReplicaHealth(name=self.name, available=self.available)


def fleet_of(*replicas: Far) -> Fleet:
    return Fleet(
        [Route(model="far", kind="upstream", replicas=cast(tuple[Replica, ...], replicas))]
    )


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    opened = await Spool.open(tmp_path / "spools" / "one")
    yield opened
    await opened.shutdown()


def one(readiness: Readiness, kind: str) -> Component:
    return next(each for each in readiness.components() if each.kind == kind)


async def test_a_write_without_room_makes_the_worker_not_ready_until_one_succeeds(
    redis: redis.asyncio.Redis, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    readiness = Readiness(fleet=fleet_of(Far()), redis=redis, spool=spool)
    await readiness.probe()
    assert (await readiness.health()).status == "ready"
    with monkeypatch.context() as full:
        full.setattr(directory.os, "write", no_room)
        with pytest.raises(SpoolFull):
            await spool.close(an_event())
        found = await readiness.health()
        assert (found.status, found.missing) == ("unready", ["spool"])
        assert found.components[0].state == "full" and found.components[0].since is not None
    async with asyncio.timeout(30):
        while (await readiness.health()).missing:
            await asyncio.sleep(0.01)
    assert one(readiness, "spool").state == "ok"


def no_room(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("disk", "state", "missing"),
    [
        (Disk(free_bytes=0, total_bytes=1 << 30, num_quarantined=0), "full", ["spool"]),
        (Disk(free_bytes=1 << 20, total_bytes=1 << 30, num_quarantined=0), "low_space", []),
        (Disk(free_bytes=1 << 20, total_bytes=2 << 20, num_quarantined=0), "ok", []),
        (Disk(free_bytes=1 << 29, total_bytes=1 << 30, num_quarantined=3), "quarantine", []),
        (Disk(free_bytes=0, total_bytes=0, num_quarantined=0), "ok", []),
    ],
)
async def test_the_disk_is_looked_at_before_a_write_fails(
    disk: Disk,
    state: str,
    missing: list[str],
    redis: redis.asyncio.Redis,
    spool: Spool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "look_at_disk", lambda _: disk)
    readiness = Readiness(fleet=fleet_of(Far()), redis=redis, spool=spool)
    await readiness.probe()
    assert one(readiness, "spool").state == state
    assert await readiness.missing() == missing
    assert readiness.free_bytes == disk.free_bytes


async def test_what_waits_in_quarantine_is_counted(
    redis: redis.asyncio.Redis, spool: Spool
) -> None:
    await spool.quarantine(an_event())
    readiness = Readiness(fleet=fleet_of(Far()), redis=redis, spool=spool)
    await readiness.probe()
    found = await readiness.health()
    assert (found.status, found.missing) == ("degraded", [])
    assert found.components[0].detail == "1 records wait for a person"


async def test_an_upstream_that_refuses_us_is_degraded_and_not_a_reason_to_stop(
    redis: redis.asyncio.Redis, spool: Spool
) -> None:
    far = Far()
    readiness = Readiness(fleet=fleet_of(far), redis=redis, spool=spool)
    await readiness.probe()
    assert one(readiness, "upstream").state == "unknown"
    far.contact.failed("unauthorised", "answered 401")
    found = await readiness.health()
    assert (found.status, found.missing) == ("degraded", [])
    part = found.components[-1]
    assert (part.state, part.reachable, part.authorised) == ("unauthorised", True, False)
    assert part.last_error == "answered 401" and part.since == part.last_error_at is not None
    far.contact.served()
    assert (await readiness.health()).status == "ready"
    far.available = False
    assert one(readiness, "upstream").state == "resting"
    far.contact.failed("failing", "it claims more tokens than it may")
    assert one(readiness, "upstream").state == "resting", "nobody is sent there"
    far.contact.failed("unauthorised", "answered 401")
    assert one(readiness, "upstream").state == "unauthorised"


async def test_workers_learn_from_each_other_what_they_saw(
    redis: redis.asyncio.Redis, spool: Spool
) -> None:
    here, there = Far(), Far()
    first = Readiness(fleet=fleet_of(here), redis=redis, spool=spool)
    second = Readiness(fleet=fleet_of(there), redis=redis, spool=spool)
    here.contact.failed("unauthorised", "answered 401")
    await first.probe()
    await second.probe()
    assert there.contact.observation == here.contact.observation
    there.contact.served()
    await second.probe()
    await first.probe()
    assert here.contact.observation.state == "ok"
    other_key = Far()
    other_key.identity = "with another key"
    await Readiness(fleet=fleet_of(other_key), redis=redis, spool=spool).probe()
    assert other_key.contact.observation.state == "unknown"


async def test_stores_that_are_away_are_named_without_their_addresses(
    redis: redis.asyncio.Redis, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = create_async_engine(NOWHERE)
    readiness = Readiness(fleet=fleet_of(Far()), redis=redis, spool=spool, db=db)
    assert await readiness.missing() == []
    monkeypatch.setattr(redis, "ping", cannot_write)
    await readiness.probe()
    await db.dispose()
    found = await readiness.health()
    assert (found.status, found.missing) == ("degraded", [])
    states = {each.kind: (each.state, each.reachable) for each in found.components[1:3]}
    assert states == {"postgres": ("unreachable", False), "redis": ("failing", True)}
    assert "secret" not in repr(found) and "nonexistent" not in repr(found)


async def cannot_write() -> bool:
    raise ResponseError("MISCONF Errors writing to the AOF file")


async def test_postgres_that_books_nothing_is_failing(
    redis: redis.asyncio.Redis, spool: Spool, postgres_url: str
) -> None:
    db = create_async_engine(postgres_url)
    shipper: Any = SimpleNamespace(failure=OSError(errno.ENOSPC, "full"))
    readiness = Readiness(fleet=fleet_of(Far()), redis=redis, spool=spool, db=db, shipper=shipper)
    await readiness.probe()
    found = one(readiness, "postgres")
    assert (found.state, found.detail) == ("failing", "usage waits to be booked")
    shipper.failure = None
    await readiness.probe()
    assert one(readiness, "postgres").state == "ok"
    await db.dispose()


async def test_every_state_is_shown_as_a_metric(redis: redis.asyncio.Redis, spool: Spool) -> None:
    telemetry = Telemetry(models=["far"])
    for kind, states in COMPONENT_STATES.items():
        for state in states:
            telemetry.components([(kind, "x", state)])
            shown = {
                each: telemetry.registry.get_sample_value(
                    "tollgate_components", {"kind": kind, "name": "x", "state": each}
                )
                for each in states
            }
            assert shown == {each: float(each == state) for each in states}
    readiness = Readiness(fleet=fleet_of(Far()), redis=redis, spool=spool)
    assert {each.kind for each in readiness.components()} <= COMPONENT_STATES.keys()
