"""Checks what a worker says of itself: whether it is ready, and gauges that nobody had to ask it
for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
import redis.asyncio
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import create_async_engine

from billing.ingestion.shipper import Shipper
from billing.spool.spool import Spool
from gateway.fleet.replica import Replica, ReplicaHealth
from gateway.fleet.router import Fleet, Route
from gateway.generate_request import ModelKind
from gateway.health.readiness import Readiness
from gateway.routes.shared import services
from gateway.telemetry.metrics import Telemetry
from tests.billing.samples import an_event
from tests.gateway.whole_app import services_with

NOWHERE = "postgresql+asyncpg://nobody@/none?host=/nonexistent"


class Switch:
    """A replica as readiness sees it."""

    def __init__(self, name: str, *, available: bool) -> None:
        self.name, self.weight, self.available = name, 1, available

    def health(self) -> ReplicaHealth:
        return ReplicaHealth(name=self.name, available=self.available)


def route(kind: ModelKind, *replicas: Switch) -> Route:
    return Route(model=replicas[0].name, kind=kind, replicas=cast(tuple[Replica, ...], replicas))


async def test_every_engine_is_waited_for_once(redis: redis.asyncio.Redis, spool: Spool) -> None:
    penny, fast = Switch("penny", available=False), Switch("fast", available=False)
    upstream = Switch("upstream", available=True)
    routes = (route("engine", penny), route("engine", fast), route("upstream", upstream))
    readiness = Readiness(fleet=Fleet(routes), redis=redis, spool=spool)
    assert await readiness.missing() == ["model penny", "model fast"]
    penny.available = True
    assert await readiness.missing() == ["model fast"]
    penny.available, fast.available = False, True
    assert await readiness.missing() == [], "penny was there, and the others go on being served"
    fast.available = upstream.available = False
    assert await readiness.missing() == [], "only a request shows that an upstream is back"
    readiness.begin_drain()
    assert await readiness.missing() == ["draining"]


async def test_engines_that_are_all_gone_are_missed(
    redis: redis.asyncio.Redis, spool: Spool
) -> None:
    penny = Switch("penny", available=True)
    readiness = Readiness(fleet=Fleet([route("engine", penny)]), redis=redis, spool=spool)
    assert await readiness.missing() == []
    penny.available = False
    assert await readiness.missing() == ["replicas"]


async def test_one_replica_is_enough_of_a_model(redis: redis.asyncio.Redis, spool: Spool) -> None:
    first, second = Switch("penny", available=False), Switch("again", available=True)
    readiness = Readiness(fleet=Fleet([route("engine", first, second)]), redis=redis, spool=spool)
    assert await readiness.missing() == []


async def test_upstreams_alone_are_ready_at_once(redis: redis.asyncio.Redis, spool: Spool) -> None:
    fleet = Fleet([route("upstream", Switch("upstream", available=True))])
    assert await Readiness(fleet=fleet, redis=redis, spool=spool).missing() == []


async def test_gauges_and_readiness_follow_without_a_scrape(
    redis: redis.asyncio.Redis, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "OBSERVE_INTERVAL_S", 0.01)
    penny, upstream = Switch("penny", available=True), Switch("upstream", available=True)
    fleet = Fleet([route("engine", penny), route("upstream", upstream)])
    db = create_async_engine(NOWHERE)
    worker = services_with(
        generation=SimpleNamespace(open_calls={1: None, 2: None}, fleet=fleet),
        telemetry=Telemetry(models=["penny"]),
        readiness=Readiness(fleet=fleet, redis=redis, spool=spool),
        spool=spool,
        shipper=Shipper(spool, db),
        engines={},
    )
    observing = asyncio.create_task(worker.periodic_observation().run())
    value = worker.telemetry.registry.get_sample_value
    await spool.close(an_event())
    worker.shipper.alarms.conflicts = 2
    async with asyncio.timeout(30):
        while value("tollgate_spool_backlog_events") != 1 or value("tollgate_usage_conflicts") != 2:
            await asyncio.sleep(0.01)
    assert value("tollgate_open_calls") == 2
    assert value("tollgate_spool_quarantined_records") == 0
    await spool.quarantine(an_event())
    await worker.readiness.probe()
    worker.observe()
    assert value("tollgate_spool_quarantined_records") == 1
    assert value("tollgate_tasks") == len(asyncio.all_tasks())
    monkeypatch.setattr(redis, "ping", nobody_answers)
    penny.available = False
    assert await worker.readiness.missing() == [], "they were seen though nobody asked"
    observing.cancel()
    await asyncio.gather(observing, return_exceptions=True)
    await db.dispose()


async def test_redis_is_waited_for_at_the_start_and_missed_no_more(
    redis: redis.asyncio.Redis, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet([route("upstream", Switch("upstream", available=True))])
    readiness = Readiness(fleet=fleet, redis=redis, spool=spool)
    with monkeypatch.context() as away:
        away.setattr(redis, "ping", nobody_answers)
        assert await readiness.missing() == ["redis"]
    assert await readiness.missing() == []
    monkeypatch.setattr(redis, "ping", nobody_answers)
    assert await readiness.missing() == []


async def nobody_answers() -> bool:
    raise RedisError("nobody is there")
