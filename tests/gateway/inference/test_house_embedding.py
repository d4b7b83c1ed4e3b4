"""The gateway's own embeddings are booked to the house, however they end."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from billing.events import Attempt, UsageEvent
from billing.ingestion.settle_late import HOUSE
from billing.pricing.price_book import PriceBook
from foundation.tasks import TaskSet
from gateway.fleet.errors import ReplicaLost
from gateway.fleet.replica import PreparedRequest
from gateway.fleet.router import Fleet, Route
from gateway.generation_events import EmbeddingVector, MeteredUsage, ReplicaEvent
from gateway.inference.house_embedding import HouseEmbedding

USED = MeteredUsage(embedding_input=7)
VECTOR = struct.pack("<2f", 0.5, -1.0)


class Replica:
    """Embeds two texts, or ends as `ending` says."""

    name, weight = "e", 1

    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.aborted, self.acknowledged = asyncio.Event(), [""] * 0

    def health(self) -> Any:
        return SimpleNamespace(available=True, num_running=0, num_waiting=0, backlog=0.0)

    def predicted_ttft_s(self, prepared: PreparedRequest, priority: Any) -> float | None:
        return None

    async def prepare(self, request: Any, priority: Any, cache_salt: str) -> PreparedRequest:
        assert (priority.lane, priority.tenant) == ("batch", HOUSE)
        return PreparedRequest(
            request=request,
            input_tokens=7,
            max_output_tokens=0,
            max_tokens_given=True,
            payload=None,
        )

    async def stream(self, prepared: Any, **kwargs: Any) -> AsyncGenerator[ReplicaEvent, None]:
        if self.ending == "refused":
            raise ReplicaLost("refused")
        yield ReplicaEvent(items=(EmbeddingVector(1, VECTOR),), usage=USED)
        if self.ending == "lost":
            raise ReplicaLost("lost")
        if self.ending == "slow":
            await self.aborted.wait()
        yield ReplicaEvent(items=(EmbeddingVector(0, VECTOR),), usage=USED, finished=True)

    async def abort(self, attempt_id: str) -> None:
        self.aborted.set()

    async def acknowledge(self, attempt_id: str) -> None:
        self.acknowledged.append(attempt_id)


class Spool:
    def __init__(self) -> None:
        self.opened: list[Attempt] = []
        self.events: list[UsageEvent] = []
        self.voided: list[str] = []

    def attempt_opened(self, attempt: Attempt) -> None:
        self.opened.append(attempt)

    async def close(self, *events: UsageEvent) -> None:
        self.events += events

    async def void(self, attempt_id: str) -> None:
        self.voided.append(attempt_id)


def embedding_by(replica: Replica) -> tuple[HouseEmbedding, Spool, TaskSet]:
    spool, tasks = Spool(), TaskSet()
    route = Route(model="m", kind="engine", replicas=(replica,))  # type: ignore[arg-type]
    services = SimpleNamespace(
        fleet=Fleet([route]),
        spool=spool,
        tasks=tasks,
        price_book=PriceBook([]),
        cache_salts=lambda org: org,
    )
    return HouseEmbedding(services, "m"), spool, tasks  # type: ignore[arg-type]


async def test_vectors_come_in_order_and_the_house_pays() -> None:
    replica = Replica("well")
    embedding, spool, _ = embedding_by(replica)
    assert await embedding.embed(["a", "b"]) == [[0.5, -1.0]] * 2
    (event,) = spool.events
    assert (event.attempt.org, event.kind, event.finish) == (HOUSE, "waste", "done")
    assert event.quantities.embedding_input == 7 and event.attempt in spool.opened
    assert replica.acknowledged == [event.id]


@pytest.mark.parametrize("ending", ["lost", "refused"])
async def test_what_was_used_by_one_that_fails_is_booked(ending: str) -> None:
    embedding, spool, _ = embedding_by(Replica(ending))
    with pytest.raises(ReplicaLost, match=ending):
        await embedding.embed(["a", "b"])
    assert [each.finish for each in spool.events] == (["error"] if ending == "lost" else [])
    assert spool.voided == ([] if ending == "lost" else [spool.opened[0].id])


async def test_one_that_nobody_waits_for_any_more_is_ended_and_booked() -> None:
    replica = Replica("slow")
    embedding, spool, tasks = embedding_by(replica)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await embedding.embed(["a", "b"])
    async with asyncio.timeout(60):
        while tasks.num_running:
            await asyncio.sleep(0)
    assert replica.aborted.is_set()
    assert [each.quantities.embedding_input for each in spool.events] == [7]
