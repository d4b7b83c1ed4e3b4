"""Hedges prefill: where a first token is late beside what was predicted, another replica is asked
for the same prompt, and the first of both to say something goes on alone.

Nothing that has said something is asked for twice: an engine that is lost amid an answer is a
matter of `resuming`. At most one of both is read by the attempt that bills and delivers, as the
second one's events are held until the first has ended without any. The other one is left before it
decodes on, and what it computed comes to the books as an orphan's: the house pays it, once.

How many are hedged is bounded twice: by `HedgeBudget`, and as only a replica is asked at which
nothing waits. An overload, where all are late, is not made worse.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

import msgspec

from engine.fairness import LANE_RANKS
from gateway.fleet.errors import (
    NoSlot,
    ReplicaStepFailed,
    ReplicaUnavailable,
    RequestTakenBack,
)
from gateway.fleet.replica import HeardReplica, RepeatableReplica, cell_of, is_viewed
from gateway.fleet.router import RoutedRequest
from gateway.generation_events import ReplicaEvent
from gateway.ids import uuid7_text
from gateway.inference.attempt import Outcome, ReplicaAttempt
from gateway.inference.resuming import elsewhere, is_there
from gateway.inference.services import GenerationServices

log = logging.getLogger(__name__)


async def run_hedged(
    services: GenerationServices, routed: RoutedRequest, attempt: ReplicaAttempt
) -> tuple[ReplicaAttempt, Outcome]:
    """Run the first attempt of a request, and perhaps a second one beside it until one of both says
    something. Return the attempt that went on, and how it ended."""
    late_s, call = routed.late_after_s, attempt.call
    is_awaited = call.priority.lane != "batch" and call.request.embedding is None
    if late_s is None or len(routed.replicas) < 2 or not services.hedges.share or not is_awaited:
        return attempt, await attempt.run()
    services.hedges.earn()
    hedge = Hedge(services, routed, attempt)
    timer = asyncio.get_running_loop().call_later(late_s, hedge.begin)
    try:
        outcome = await attempt.run()
    finally:
        timer.cancel()
    return await hedge.decide(outcome)


class Hedge:
    """The choice between an attempt and a second one. `routed`: as the first one was sent."""

    def __init__(
        self,
        services: GenerationServices,
        routed: RoutedRequest,
        attempt: ReplicaAttempt,
    ) -> None:
        self._services, self._routed = services, routed
        self._first = attempt
        self._second: SecondTry | None = None

    def begin(self) -> None:
        """Ask another replica, the first one being late, if one is free and as many may be."""
        first = self._first
        if first.usage is not None or first.delivery.abandoned:
            return
        found = self._free_one()
        if found is None or not self._services.hedges.spend():
            first.call.meter.hedged("withheld")
            return
        found.send()
        second = ReplicaAttempt(
            self._services,
            first.call,
            first.delivery,
            first.allowance,
            record=msgspec.structs.replace(first.record, id=uuid7_text()),
            replica=found.replicas[0],
            prepared=found.for_first(first.prepared),
            routes=first.routes,
            replays_left=first.replays_left,
            elsewhere=elsewhere(self._routed.replicas, found.replicas[0]),
        )
        log.info("%s is late, so %s is asked, too", first.call.request_id, second.replica.name)
        self._second = SecondTry(second, on_first=first.overtake)

    def _free_one(self) -> RoutedRequest | None:
        """Return the request as it would go to another replica at which nothing waits; None: there
        is none, or it is not to be asked twice."""
        first, priority = self._first, self._first.call.priority
        route = first.routes.route
        replica = first.replica
        if not (isinstance(replica, RepeatableReplica) and replica.may_repeat(first.prepared)):
            return None
        others = [each for each in self._routed.replicas if each is not replica and is_there(each)]
        if route.has_borrowed:  # a first token that is late is no reason to leave a cell
            others = [each for each in others if cell_of(each) == cell_of(replica)]
        if not others:
            return None
        found = self._services.fleet.choose(route, others, first.prepared, priority)
        best = found.replicas[0]
        is_free = is_viewed(best) and best.view.is_free(LANE_RANKS[priority.lane])
        return found if is_free else None

    async def decide(self, outcome: Outcome) -> tuple[ReplicaAttempt, Outcome]:
        """Go on with the second one if the first, which has ended, said nothing. Else leave it."""
        first, second = self._first, self._second
        if second is None:
            return first, outcome
        meter, failure = first.call.meter, outcome.failure
        is_back = isinstance(failure, RequestTakenBack)
        is_lost = isinstance(failure, ReplicaUnavailable) and not isinstance(failure, NoSlot)
        has_nothing = (
            outcome.usage is None and (is_lost or is_back) and not first.delivery.abandoned
        )
        if not has_nothing or second.error is not None:
            meter.hedged("lost" if second.error is None else "failed")
            await second.discard()
            return first, outcome
        if not first.is_overtaken and not is_back:
            self._services.fleet.report(first.replica, ok=False)
        meter.on_first_token = None  # it was about the first one
        attempt = second.attempt
        attempt.replays_left -= isinstance(failure, ReplicaStepFailed)
        attempt.begun = second.events()
        outcome = await attempt.run()
        meter.hedged("failed" if outcome.usage is None else "won")
        return attempt, outcome


class SecondTry:
    """The stream of an attempt that has begun before anybody reads it. `on_first` is called when it
    has said something."""

    def __init__(self, attempt: ReplicaAttempt, on_first: Callable[[], None]) -> None:
        self.attempt, self._on_first = attempt, on_first
        self.error: Exception | None = None
        """Why it will say nothing."""
        self._is_wanted = True
        self._event: ReplicaEvent | None = None
        self._stream: AsyncGenerator[ReplicaEvent, None] | None = None
        self._asking = attempt.services.tasks.spawn(self._ask(), name="ask a second replica")

    async def _ask(self) -> None:
        attempt = self.attempt
        if not self._is_wanted:
            return
        try:
            self._stream = attempt.open_stream()
            attempt.account.attempt_opened(attempt.record)
            self._event = await anext(self._stream)
        except Exception as error:
            self.error = error
            if self._is_wanted:
                log.warning("%s did not take a second try: %s", attempt.replica.name, error)
        else:
            self._on_first()

    async def events(self) -> AsyncGenerator[ReplicaEvent, None]:
        """Yield what comes, the first event included. Raises what `Replica.stream` does."""
        await self._asking
        if self.error is not None:
            raise self.error
        assert self._event is not None and self._stream is not None
        try:
            yield self._event
            async for event in self._stream:
                yield event
        finally:
            await self._stream.aclose()

    async def discard(self) -> None:
        """End it unread. What it used is an orphan's, or waste where that is known. What goes wrong
        there is no matter of the request, which is answered."""
        self._is_wanted = False
        try:
            await self._leave()
        except Exception:
            log.exception("cannot leave the second try of %s", self.attempt.call.request_id)

    async def _leave(self) -> None:
        attempt = self.attempt
        if isinstance(attempt.replica, HeardReplica):
            attempt.replica.leave(attempt.record.id)
        await self._asking
        if self._stream is None:
            return
        await self._stream.aclose()
        event = self._event
        if event is None or not event.finished or event.usage is None:
            await attempt.account.void(attempt.record.id)
            return
        waste = attempt.events(event.usage, kind="waste", finish="failover")
        await attempt.account.close(*waste)
        await attempt.replica.acknowledge(attempt.record.id)
