"""Goes on with a generation whose replica was lost: before its first token by asking again, amid it
by handing what was said to another replica of its route, or to the same one when it is back.

Its reader sees a pause. What was delivered is billed by the attempt that delivered it, what is
computed again is the house's, and limits are settled once, for all attempts together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from billing.events import Attempt, as_waste
from billing.pricing.rating import prices_at
from gateway.fleet.errors import NoSlot, ReplicaStepFailed, ReplicaUnavailable
from gateway.fleet.moving.engine_stay import HeldRoutes
from gateway.fleet.replica import HeardReplica, Replica, ResumingReplica, ReturningReplica
from gateway.fleet.router import affinity
from gateway.ids import uuid7_text
from gateway.inference.attempt import (
    Handover,
    Outcome,
    ReplicaAttempt,
    acknowledge,
    book,
    is_our_loss,
    note_billed,
)
from gateway.inference.calls import GenerationCall
from gateway.inference.delivery import Delivery
from gateway.inference.services import GenerationServices
from gateway.limits.allowance import Allowance
from gateway.request_errors import UnknownModel

log = logging.getLogger(__name__)

MAX_RETURN_S = 60.0
"""How long a request waits for a replica to be back."""
REST_S, MAX_REST_S = 0.25, 4.0
"""Between two rounds of asking replicas of which none took it: doubled with each."""


async def first_to_return(
    replicas: Sequence[Replica],
    died: Collection[Replica],
    call: GenerationCall,
    delivery: Delivery,
) -> Replica | None:
    """Wait, as long as the first token may take and somebody waits for it, until one of a route's
    replicas is back that died with the request or is away, and return it. None: none was."""
    away = [each for each in replicas if each in died or not each.health().available]
    returning = [each for each in away if isinstance(each, ReturningReplica)]
    deadline_s = call.priority.after(time.monotonic() - call.begun_at).deadline_s
    longest_s = MAX_RETURN_S if deadline_s is None else min(deadline_s, MAX_RETURN_S)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(longest_s) as limit:
            with delivery.on_abandon(lambda: limit.reschedule(loop.time())):
                back = await first_back(returning, longest_s) if returning else None
    except TimeoutError:
        return None
    return next((each for each in returning if each is back), None)


def elsewhere(replicas: Sequence[Replica], replica: Replica) -> Callable[[], bool] | None:
    """Return what tells whether another one could go on now; None: there is no other."""
    others = [each for each in replicas if each is not replica]
    return partial(any_is_there, others) if others else None


def any_is_there(replicas: Sequence[Replica]) -> bool:
    return any(map(is_there, replicas))


def is_there(replica: Replica) -> bool:
    """Tell whether it can be asked, as far as is known."""
    if not replica.health().available:
        return False
    return not (isinstance(replica, HeardReplica) and replica.is_silent)


async def go_on(
    services: GenerationServices,
    call: GenerationCall,
    delivery: Delivery,
    allowance: Allowance,
    record: Attempt,
    outcome: Outcome,
    routes: HeldRoutes,
) -> Outcome:
    """Go on for as long as attempts hand over, and return how the last one ended. `routes`:
    those that the generation holds. They are of the model that serves it, a version of the one that
    it asks for."""
    while outcome.handover is not None:
        resumption = Resumption(
            services, call, delivery, allowance, record, outcome.handover, routes
        )
        outcome = await resumption.run(outcome.failure)
    return outcome


class Resumption:
    """The next attempt of a generation whose replica was lost. `record`: of any attempt before.
    `routes`: those that it holds, the last of which served it until now."""

    def __init__(
        self,
        services: GenerationServices,
        call: GenerationCall,
        delivery: Delivery,
        allowance: Allowance,
        record: Attempt,
        handover: Handover,
        routes: HeldRoutes,
    ) -> None:
        self._services, self._call, self._delivery = services, call, delivery
        self._routes = routes
        self._allowance, self._handover = allowance, handover
        self._replays_left = handover.replays_left
        self._is_counted = False
        prices = prices_at(record.prices, handover.usage.prompt_tokens)
        self._record = msgspec.structs.replace(record, prices=prices)

    async def run(self, lost: Exception | None) -> Outcome:
        """Ask the replicas that are there until one takes it, as long as that makes sense. `lost`:
        what its client hears if none does."""
        until, rest_s = time.monotonic() + self._longest_s, REST_S
        while not self._delivery.abandoned:
            able = self._able()
            if not able:
                log.warning("%s: nobody runs its model any more", self._call.request_id)
                break
            outcome, may_again = await self._ask_all(able)
            if outcome is not None:
                return outcome
            left_s = until - time.monotonic()
            if left_s <= 0 or not may_again:
                break
            await self._wait_for_one(able, rest_s, left_s)
            rest_s = min(2 * rest_s, MAX_REST_S)
        return await self._give_up(lost)

    @property
    def _longest_s(self) -> float:
        given_s = self._call.timeout_s
        if given_s is None:
            return MAX_RETURN_S
        return min(MAX_RETURN_S, self._call.begun_at + given_s - time.monotonic())

    def _able(self) -> Sequence[Replica]:
        """Hold the route as it is now, and return its replicas, the best first, that run what has
        begun this: by other settings another model may have its name. None, if the name is served
        no more."""
        fleet, call, rest = self._services.fleet, self._call, self._handover.rest
        try:
            route = fleet.resolve(call.request.model, call.principal)
        except UnknownModel:
            return ()
        served_by = self._routes.route.model
        if route.model != served_by:  # its caller gets another version by now
            kept = fleet.route_of(served_by)
            if kept is None:
                return ()
            route = kept
        ordered = fleet.order(route, affinity(call.request, call.principal))
        able = [each for each in ordered if isinstance(each, ResumingReplica)]
        self._routes.move_to(route)
        return [each for each in able if each.may_go_on(rest)]

    async def _ask_all(self, able: Sequence[Replica]) -> tuple[Outcome | None, bool]:
        """Return how it went on, and otherwise whether asking again may help. Those that an engine
        took along count each other: they spread over the replicas that are left."""
        fleet, call, rest = self._services.fleet, self._call, self._handover.rest
        routed = fleet.choose(self._routes.route, able, rest, call.priority)
        if not self._is_counted and is_there(routed.replicas[0]):
            self._is_counted = True  # once, however often they are asked
            routed.send()
        for replica in routed.replicas:
            if self._delivery.abandoned:
                return None, False
            if not is_there(replica):
                continue
            attempt = ReplicaAttempt(
                self._services,
                call,
                self._delivery,
                self._allowance,
                record=msgspec.structs.replace(self._record, id=uuid7_text()),
                replica=replica,
                prepared=routed.for_first(rest),
                routes=self._routes,
                handover=self._handover,
                replays_left=self._replays_left,
                elsewhere=elsewhere(able, replica),
            )
            outcome = await attempt.run()
            if attempt.usage is not None:
                fleet.report(replica, ok=not outcome.lost_its_replica)
                return outcome, False
            failure = outcome.failure
            if not isinstance(failure, ReplicaUnavailable) or isinstance(failure, NoSlot):
                log.warning("%s: cannot be resumed: %s", call.request_id, failure)
                return None, False
            fleet.report(replica, ok=False)
            log.warning("replica %s is unavailable: %s", replica.name, failure)
            if isinstance(failure, ReplicaStepFailed):
                if not self._replays_left:
                    return None, False
                self._replays_left -= 1
        return None, True

    async def _wait_for_one(
        self, replicas: Sequence[Replica], rest_s: float, longest_s: float
    ) -> None:
        """Wait until one that is away is back; where others are there and took nothing, no longer
        than `rest_s`."""
        loop = asyncio.get_running_loop()
        gone = [each for each in replicas if not each.health().available]
        away = [each for each in gone if isinstance(each, ReturningReplica)]
        if len(away) < len(replicas):
            longest_s = min(rest_s, longest_s)
        try:
            async with asyncio.timeout(longest_s) as limit:
                with self._delivery.on_abandon(lambda: limit.reschedule(loop.time())):
                    await first_back(away, longest_s)
        except TimeoutError:
            return

    async def _give_up(self, lost: Exception | None) -> Outcome:
        """End it with what was delivered; what was held of its bill is decided now."""
        call, delivery, handover = self._call, self._delivery, self._handover
        call.meter.resumed("left" if delivery.was_left else "no_replica")
        failure = None if delivery.was_left else lost
        if not handover.held:
            return Outcome(usage=handover.usage, failure=failure)
        is_loss = is_our_loss(call, delivery, failure)
        events = as_waste(handover.held) if is_loss else list(handover.held)
        try:
            await book(self._services, call, delivery, events)
            await acknowledge(call.account, handover.unacknowledged)
        except Exception as error:
            is_loss = is_our_loss(call, delivery, error)
            return Outcome(usage=None if is_loss else handover.usage, failure=error)
        note_billed(call, delivery, events)
        return Outcome(usage=None if is_loss else handover.usage, failure=failure)


async def first_back(
    replicas: Sequence[ReturningReplica], timeout_s: float
) -> ReturningReplica | None:
    """Wait until one of them can be asked, and return it; of none, for ever. None: none can."""
    if not replicas:
        await asyncio.Event().wait()
    waits = {asyncio.ensure_future(each.wait_until_back(timeout_s)): each for each in replicas}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return next((waits[wait] for wait in done if wait.result()), None)
