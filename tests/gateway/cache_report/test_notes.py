"""The main path tells the cache report of what is on a bill, and of nothing else; whatever becomes
of that, the answer is out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from foundation.tasks import TaskSet
from gateway.fleet.errors import ReplicaLost, ReplicaUnavailable
from gateway.fleet.router import Fleet, Route
from gateway.inference.cache_notes import CacheNote, OnCached
from gateway.inference.services import GenerationServices
from gateway.limits.limiter import Limiter
from tests.gateway.office import AsListed, Office, ScriptedReplica, read

Open = Callable[[OnCached, ScriptedReplica], Office]


@pytest.fixture
async def open_office(tmp_path: Path, redis: Redis) -> AsyncIterator[Open]:
    spool, tasks, limiter = await Spool.open(tmp_path / "spool"), TaskSet(), Limiter(redis)

    def make(on_cached: OnCached, replica: ScriptedReplica) -> Office:
        route = Route(model="m", kind="upstream", replicas=(replica,))
        services = GenerationServices(
            fleet=Fleet([route], rng=AsListed()),
            limiter=limiter,
            spool=spool,
            price_book=PriceBook.load(),
            tasks=tasks,
            cache_salts=lambda org: f"salt of {org}",
            stalled_reader_s=60.0,
            on_cached=on_cached,
        )
        return Office(services, redis)

    yield make
    await tasks.close()
    await limiter.close()
    await spool.shutdown()


async def test_what_is_billed_is_told_once(open_office: Open) -> None:
    told: list[CacheNote] = []
    office = open_office(told.append, ScriptedReplica("far"))
    await read(office.begin())
    await office.settled()
    [note], [event] = told, await office.billed()
    assert note.attempt == event.attempt and note.replica == "far"
    assert note.usage.cache_read == event.quantities.cache_read == 4
    assert note.outcome is not None and (note.outcome.cause, note.outcome.prefix) == ("unknown", "")
    assert note.locate is None


@pytest.mark.parametrize(
    ("stream", "fault", "is_told"),
    [
        (True, {"fails_after": (2, ReplicaLost("gone"))}, True),
        (False, {"fails_after": (2, ReplicaLost("gone"))}, False),
        (True, {"refuses": ReplicaUnavailable("away", retry_after_s=1.0)}, False),
    ],
)
async def test_what_is_on_no_bill_is_told_of_to_nobody(
    open_office: Open, stream: bool, fault: dict[str, Any], is_told: bool
) -> None:
    """A stream that had begun to be delivered is on a bill."""
    told: list[CacheNote] = []
    office = open_office(told.append, ScriptedReplica(**fault))
    with pytest.raises((ReplicaLost, ReplicaUnavailable)):
        await read(office.begin(stream=stream))
    await office.settled()
    billed = [each for each in await office.billed() if each.kind == "usage"]
    assert len(told) == len(billed) == is_told


async def test_a_report_that_fails_fails_no_request(open_office: Open) -> None:
    wrong: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))

    def fails(note: CacheNote) -> None:
        raise msgspec.ValidationError("a bug")

    office = open_office(fails, ScriptedReplica())
    assert await read(office.begin()) == b"w1 w2 w3 [3]"
    await office.settled()
    assert len(await office.billed()) == 1 and len(wrong) == 1
