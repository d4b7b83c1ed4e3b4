"""Runs the first attempt of a request, which may move to another engine while it waits.

The engine at which it waits gives it back if nothing of it has run, and only then: its attempt is
void, and another one begins elsewhere. A request moves once.
"""

from __future__ import annotations

import msgspec

from gateway.fleet.errors import RequestTakenBack
from gateway.fleet.replica import is_viewed
from gateway.fleet.router import RoutedRequest
from gateway.ids import uuid7_text
from gateway.inference.attempt import Outcome, ReplicaAttempt
from gateway.inference.hedging import run_hedged
from gateway.inference.request_mover import MovableRequest, RequestMover, Waiting, explain_move
from gateway.inference.resuming import elsewhere
from gateway.inference.services import GenerationServices


async def run_first(
    services: GenerationServices, routed: RoutedRequest, attempt: ReplicaAttempt
) -> tuple[ReplicaAttempt, Outcome]:
    """Run an attempt, hedged where that is due, and again elsewhere if it moves. Return the one
    that went on, and how it ended."""
    mover, call = services.mover, attempt.call
    waiting = None
    if mover is not None:
        route, attempt_id = attempt.routes.route, attempt.record.id
        waiting = mover.watch(route, routed, attempt_id, attempt.prepared, call.priority)
        del route  # `attempt` holds what is needed of it
    if mover is None or waiting is None:
        return await run_hedged(services, routed, attempt)
    forget_once_begun(mover, waiting, attempt)
    try:
        attempt, outcome = await run_hedged(services, routed, attempt)
    finally:
        mover.forget(waiting)
    request = waiting.key
    if request.target is None or attempt.record.id != request.attempt_id:
        return attempt, outcome  # nobody wants it elsewhere, or it is there by now: it was hedged
    if request.route is None or not isinstance(outcome.failure, RequestTakenBack):
        call.meter.moved("begun")
        return attempt, outcome
    if attempt.delivery.abandoned:
        return attempt, Outcome()
    attempt.routes.settle_in(request.route)
    request.route = None
    return await go_there(services, request.target, request, attempt)


def forget_once_begun(mover: RequestMover, waiting: Waiting, attempt: ReplicaAttempt) -> None:
    """Let nobody look out for it any more once its first token is here."""
    meter = attempt.call.meter
    came = meter.on_first_token

    def begun(took_s: float) -> float | None:
        mover.forget(waiting)
        waiting.key.route = None
        return None if came is None else came(took_s)

    meter.on_first_token = begun


async def go_there(
    services: GenerationServices,
    routed: RoutedRequest,
    request: MovableRequest,
    before: ReplicaAttempt,
) -> tuple[ReplicaAttempt, Outcome]:
    """Run a request elsewhere that was given back. `before`: its void attempt."""
    call, first = before.call, routed.replicas[0]
    if is_viewed(first) and first.view.heard_at_s > request.asked_at_s:
        routed.send()  # what it has said since knows nothing of this one
    call.meter.stages.begin("route", explain_move(before.replica.name, request)).end()
    call.meter.on_first_token = routed.came
    attempt = ReplicaAttempt(
        services,
        call,
        before.delivery,
        before.allowance,
        record=msgspec.structs.replace(before.record, id=uuid7_text()),
        replica=first,
        prepared=routed.for_first(before.prepared),
        routes=before.routes,
        replays_left=before.replays_left,
        elsewhere=elsewhere([*routed.replicas, before.replica], first),
    )
    attempt.has_moved = True
    attempt, outcome = await run_hedged(services, routed, attempt)
    call.meter.moved("failed" if attempt.usage is None else "moved")
    return attempt, outcome
