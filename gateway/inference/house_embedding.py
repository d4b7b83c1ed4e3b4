"""Embeds texts for the gateway itself: no tenant asks, no limit is spent and nobody is billed.

The tokens are booked as the house's own, beside the waste that it pays for, so that what engines
count agrees with the books. What was begun is booked, however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from billing.events import Attempt, Finish
from billing.ingestion.settle_late import HOUSE, house_attempt
from gateway.fleet.errors import ReplicaLost
from gateway.fleet.replica import PreparedRequest, Replica
from gateway.generate_request import AnswerHeader
from gateway.generation_events import MeteredUsage
from gateway.ids import uuid7_text
from gateway.inference.metering import to_events
from gateway.inference.services import GenerationServices
from gateway.lanes import Priority
from gateway.wire.surfaces import EMBEDDINGS, Encoder

PRIORITY = Priority(lane="batch", tenant=HOUSE)
"""The last of all: behind whoever pays."""
MAX_ANSWER_S = 60.0


class HouseAnswer(msgspec.Struct, frozen=True):
    """The body of an answer, or why there is none."""

    body: bytes = b""
    failure: Exception | None = None


class Vector(msgspec.Struct):
    index: int
    embedding: list[float]


class Vectors(msgspec.Struct):
    """The part of an answer that is used."""

    data: list[Vector]


class HouseEmbedding:
    """Embeds by one model that this gateway serves."""

    def __init__(self, services: GenerationServices, model: str) -> None:
        self._services, self._model = services, model

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Raises: what a replica raises before and after its first event, msgspec.MsgspecError. A
        cancelled caller abandons it."""
        services = self._services
        route = next(each for each in services.fleet.routes if each.model == self._model)
        body = msgspec.json.encode({"model": self._model, "input": texts})
        request = EMBEDDINGS.read(body, route.dialect)
        replicas = services.fleet.order(route)
        prepared = await replicas[0].prepare(request, PRIORITY, services.cache_salts(HOUSE))
        replica = services.fleet.choose(route, replicas, prepared, PRIORITY).replicas[0]
        record = msgspec.structs.replace(
            house_attempt(uuid7_text(), self._model, services.price_book), lane=PRIORITY.lane
        )
        encoder = EMBEDDINGS.encoder(request, AnswerHeader(id=record.id, created=0))
        task = services.tasks.spawn(
            self._run(record, replica, prepared, encoder), name="house-embedding"
        )
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            services.tasks.spawn(replica.abort(record.id), name="abort")
            raise
        if answer.failure is not None:
            raise answer.failure
        found = msgspec.json.decode(answer.body, type=Vectors)
        return [each.embedding for each in sorted(found.data, key=lambda each: each.index)]

    async def _run(
        self, record: Attempt, replica: Replica, prepared: PreparedRequest, encoder: Encoder
    ) -> HouseAnswer:
        spool, written = self._services.spool, b""
        usage: MeteredUsage | None = None
        failure: Exception | None = ReplicaLost("the stream ended without a last event")
        spool.attempt_opened(record)
        events = replica.stream(
            prepared,
            attempt_id=record.id,
            cache_salt=self._services.cache_salts(HOUSE),
            priority=PRIORITY,
        )
        try:
            async with aclosing(events), asyncio.timeout(MAX_ANSWER_S):
                async for event in events:
                    usage = event.usage or usage
                    written += encoder.encode(event.items)
                    if event.finished:
                        failure = None
                        break
        except Exception as error:  # raised to the caller; what was used until then is booked
            failure = error
        if usage is None:
            await spool.void(record.id)
            return HouseAnswer(failure=failure or ReplicaLost("the answer has no usage"))
        await self._book(record, usage, replica, "error" if failure else "done")
        return HouseAnswer(written + encoder.finish(usage), failure)

    async def _book(
        self, record: Attempt, usage: MeteredUsage, replica: Replica, finish: Finish
    ) -> None:
        """Raises: SpoolError."""
        events = to_events(record, usage, replica=replica.name, kind="waste", finish=finish)
        await self._services.spool.close(*events)
        await replica.acknowledge(record.id)
