"""THE main path: a request becomes tokens becomes money.

    prepare -> reserve -> (attempt: open -> stream -> close -> deliver the end) -> settle

A replica that is lost amid an attempt is followed by another attempt (`resuming`).
It knows no HTTP; a disconnect reaches it as `Delivery.abandon`. Each generation runs in a task that
the application owns, so that no client's leaving can cancel its settling.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from functools import partial

import msgspec

from billing.events import Attempt
from gateway.fleet.errors import (
    DeadlinePassed,
    NoSlot,
    ReplicaDied,
    ReplicaLost,
    ReplicaOverloaded,
    ReplicaStepFailed,
    ReplicaUnavailable,
)
from gateway.fleet.moving.engine_stay import HeldRoutes
from gateway.fleet.replica import PreparedRequest, Replica
from gateway.fleet.router import Route, RoutedRequest, affinity
from gateway.fleet.routing import explain
from gateway.generate_request import under_a_cap
from gateway.generation_events import MeteredUsage
from gateway.ids import uuid7_text
from gateway.inference.attempt import ABORT_TIMEOUT_S, MAX_REPLAYS, Outcome, ReplicaAttempt
from gateway.inference.calls import GenerationCall
from gateway.inference.compared_answer import ComparedAnswer
from gateway.inference.delivery import Delivery
from gateway.inference.metering import new_attempt, rated, to_units
from gateway.inference.moving import run_first
from gateway.inference.resuming import elsewhere, first_to_return, go_on
from gateway.inference.services import GenerationServices
from gateway.lanes import latest_first_token_s, promised_first_token_s
from gateway.limits.allowance import Allowance
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal
from gateway.limits.spending import to_nano

log = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60.0
MAX_WAKE_S = 120.0
"""How long a request without a deadline waits."""
LOOK_S = 0.05
UNKNOWN_START_S = 30.0
"""The `Retry-After` where no start was ever timed."""
NOTHING_RAN = Outcome()


class RateLimited(Exception):
    """The limiter said no; nothing was reserved."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.scope} {refusal.kind}")
        self.refusal = refusal


class NotAccepting(Exception):
    """Says that this gateway cannot take work it could account for (its spool is full or
    broken)."""


def start(services: GenerationServices, call: GenerationCall) -> Delivery:
    """Run `generate` in a task of the application's own; the caller reads what it delivers."""
    delivery = Delivery(services.stalled_reader_s)
    run_in_task(services, call, delivery, drive(services, call, delivery))
    return delivery


async def drive(services: GenerationServices, call: GenerationCall, delivery: Delivery) -> None:
    """Run `generate`, whose end the reader hears of. Raises nothing."""
    try:
        await generate(services, call, delivery)
    except Exception as error:
        delivery.fail(error)
    else:
        delivery.end()


def run_in_task(
    services: GenerationServices,
    call: GenerationCall,
    delivery: Delivery,
    work: Coroutine[None, None, None],
) -> None:
    """Run what fills `delivery`, known to `drain`, for as long as the client gives it."""
    task = asyncio.create_task(work, name=f"generate {call.request_id}")
    services.open_calls[task] = delivery
    delivery.ignored = call.ignored
    task.add_done_callback(services.open_calls.pop)
    if call.timeout_s is not None:
        late = DeadlinePassed(f"not done in {call.timeout_s:.3f} s")
        timer = task.get_loop().call_later(call.timeout_s, delivery.expire, late)
        task.add_done_callback(lambda _: timer.cancel())


async def generate(services: GenerationServices, call: GenerationCall, delivery: Delivery) -> None:
    """Admit, run, settle what was used; where a rollout compares it, count how it ended."""
    call.principal.check_served()
    if not services.spool.healthy:
        raise NotAccepting
    if call.principal.stores_content:
        call.meter.capture(call.request)
    if call.principal.spend_caps:
        call = msgspec.structs.replace(call, request=under_a_cap(call.request))
    fleet, model = services.fleet, call.request.model
    route = fleet.resolve(model, call.principal)
    compared = fleet.compared(model, call.principal, route)
    work = generate_on(services, call, delivery, route)
    del route  # what is needed of it `work` holds, for as long as that is
    if compared is None:
        await work
        return
    answer = ComparedAnswer(compared, call)
    call.meter.on_event = answer.received
    try:
        await work
    except Exception as error:
        answer.end(error, delivery)
        raise
    else:
        answer.end(delivery.failure, delivery)
    finally:
        call.meter.on_event = None


async def generate_on(
    services: GenerationServices, call: GenerationCall, delivery: Delivery, route: Route
) -> None:
    """Run a generation on a route of its model: on the first replica that can."""
    if route.is_asleep:
        route = await awake(services, call, delivery, route)
    delivery.version = call.meter.version = services.fleet.version_of(call.request.model, route)
    key = affinity(call.request, call.principal)
    replicas = services.fleet.order(route, key)
    stages = call.meter.stages
    with stages.begin("prepare", replicas[0].name):
        prepared = await replicas[0].prepare(
            call.request, call.priority, services.cache_salts(call.principal.org_id)
        )
    if delivery.abandoned:
        return
    routed = services.fleet.choose(
        route, replicas, prepared, call.priority, key, partial(promised_s, call)
    )
    note_asked(call, route, routed)
    refuse_what_comes_too_late(call, routed, prepared.input_tokens)
    replicas = routed.replicas
    record = new_attempt(call, services.price_book)
    with stages.begin("admit"):
        admission = await reserve(services.limiter, call, prepared, record)
    delivery.admitted(admission.state)
    send_where_routed(call, routed)
    routes = HeldRoutes(route)
    del route  # it is held there, for as long as it is needed
    allowance = Allowance(services.limiter, admission, services.tasks, sleep=asyncio.sleep)
    outcome = NOTHING_RAN
    try:
        if admission.max_output_tokens < prepared.max_output_tokens:
            prepared = replicas[0].bounded(prepared, admission.max_output_tokens)
            call = msgspec.structs.replace(call, request=prepared.request)
        outcome = await attempt_in_order(
            services, call, delivery, allowance, record, routes, routed, prepared
        )
        outcome = await go_on(services, call, delivery, allowance, record, outcome, routes)
    finally:
        with stages.begin("settle"):
            allowance.end()
            await settle(services.limiter, admission, outcome.usage, record)
    if outcome.failure is not None:
        raise outcome.failure


async def awake(
    services: GenerationServices, call: GenerationCall, delivery: Delivery, route: Route
) -> Route:
    """Have a model started, wait for it as long as the request's first token may take, and return
    its route as it is then.

    Raises: ReplicaUnavailable, at once where the start is known to take longer than that; its
    `Retry-After` is what is left of the start as far as is known. UnknownModel, NoSlot.
    """
    assert route.asked is not None, "a model that sleeps is counted"
    route.asked.note(call.priority.lane)
    deadline_s, start_s = call.current_priority.deadline_s, route.wakes_in_s
    longest_s = MAX_WAKE_S if deadline_s is None else min(deadline_s, MAX_WAKE_S)
    if start_s is not None and start_s > longest_s:
        raise asleep(route, start_s)
    began_s = time.monotonic()
    while not delivery.abandoned and (route.is_asleep or not may_answer(route)):
        waited_s = time.monotonic() - began_s
        if waited_s >= longest_s:
            raise asleep(route, (UNKNOWN_START_S if start_s is None else start_s) - waited_s)
        await asyncio.sleep(LOOK_S)
        route = services.fleet.resolve(call.request.model, call.principal)
    return route


def may_answer(route: Route) -> bool:
    """Tell whether any replica can be reached: a worker may not have met one that just began."""
    return any(each.health().available for each in route.replicas)


def asleep(route: Route, left_s: float) -> ReplicaUnavailable:
    what = f"{route.model} is asleep, and is being started"
    return ReplicaUnavailable(what, retry_after_s=max(1.0, left_s))


def note_asked(call: GenerationCall, route: Route, routed: RoutedRequest) -> None:
    """Count a request for the planner, before it may be refused."""
    if route.asked is None:
        return
    slo, is_late = call.meter.slo, False
    if slo is not None and routed.predicted_s is not None and routed.error is not None:
        limit_s = slo.first_token_limit_s(routed.idle_prefill_s)
        is_late = routed.predicted_s * routed.error.factor > limit_s
    tokens = 0 if routed.prompt is None else routed.prompt.missing
    route.asked.note(call.priority.lane, routed.prompt_s, tokens=tokens, is_late=is_late)


def refuse_what_comes_too_late(
    call: GenerationCall, routed: RoutedRequest, num_tokens: int
) -> None:
    """Refuse a request that would come too late wherever it went, before anything is reserved.
    `num_tokens`: of its prompt. Raises: ReplicaOverloaded, NoSlot."""
    meter, soonest_s = call.meter, routed.soonest_s
    if meter.slo is not None and meter.slo.ttft_per_prefill is not None:
        meter.idle_prefill_s = routed.idle_prefill_s
    if soonest_s is None:
        return
    spent_s = time.monotonic() - call.begun_at
    latest_s = latest_first_token_s(call.current_priority, meter.slo, meter.idle_prefill_s, spent_s)
    if latest_s is None or soonest_s <= latest_s or routed.is_one_free:
        return
    meter.refused_early(num_tokens)
    check_in_time(soonest_s, latest_s)


def promised_s(call: GenerationCall, idle_prefill_s: float | None) -> float | None:
    """Return the seconds from now within which its first token keeps what is promised of it."""
    spent_s = time.perf_counter() - call.meter.received_at
    return promised_first_token_s(call.current_priority, call.meter.slo, idle_prefill_s, spent_s)


def check_in_time(predicted_s: float, latest_s: float | None) -> None:
    """Raises ReplicaOverloaded where a first token would come too late."""
    if latest_s is not None and predicted_s > latest_s:
        late_s = min(predicted_s - latest_s, MAX_RETRY_AFTER_S)
        raise ReplicaOverloaded(
            f"the first token would come in {predicted_s:.1f} s", retry_after_s=max(1.0, late_s)
        )


def send_where_routed(call: GenerationCall, routed: RoutedRequest) -> None:
    """Let all workers count the request, which is admitted, and note why it goes where it goes."""
    routed.send()
    meter = call.meter
    meter.on_first_token = routed.came
    if routed.choice is not None:
        names = [each.name for each in routed.replicas]
        meter.stages.begin("route", explain(routed.choice, names)).end()
        meter.chose(routed.choice.reason, routed.status_age_s)


async def reserve(
    limiter: Limiter, call: GenerationCall, prepared: PreparedRequest, record: Attempt
) -> Admission:
    """Reserve what the request may use, at the prices of its record. Raises: RateLimited, what
    `Limiter.admit` raises."""
    verdict = await limiter.admit(
        call.principal,
        record.model,
        input_tokens=prepared.input_tokens,
        most_input_tokens=prepared.most_input_tokens,
        max_output_tokens=prepared.max_output_tokens,
        lease_id=call.lease_id,
        lane=call.priority.lane,
        prices=record.prices,
        min_output_tokens=0 if prepared.max_tokens_given else call.request.n,
        admitted_at=record.admitted_at,
    )
    if isinstance(verdict, Refusal):
        raise RateLimited(verdict)
    return verdict


async def attempt_in_order(
    services: GenerationServices,
    call: GenerationCall,
    delivery: Delivery,
    allowance: Allowance,
    record: Attempt,
    routes: HeldRoutes,
    routed: RoutedRequest,
    prepared: PreparedRequest,
) -> Outcome:
    """Try replicas in order until one has begun. If one of them died with it before that, the first
    that is back in time is tried once more. `prepared` and `record`: for the first of them."""
    outcome, replays_left, died = NOTHING_RAN, MAX_REPLAYS, list[Replica]()
    replicas, prepared = routed.replicas, routed.for_first(prepared)
    order = list(replicas)
    for position, replica in enumerate(order):
        if delivery.abandoned:
            return NOTHING_RAN
        try:
            if position:
                call.meter.on_first_token = None  # it was about the first one
                with call.meter.stages.begin("prepare", replica.name):
                    salt = services.cache_salts(record.org)
                    other = await replica.prepare(call.request, call.priority, salt)
                prepared = within_what_is_held(replica, other, prepared)
                record = msgspec.structs.replace(record, id=uuid7_text())
            attempt = ReplicaAttempt(
                services,
                call,
                delivery,
                allowance,
                record=record,
                replica=replica,
                prepared=prepared,
                routes=routes,
                replays_left=replays_left,
                elsewhere=elsewhere(order[position + 1 :], replica),
            )
            if position:
                outcome = await attempt.run()
            else:
                attempt, outcome = await run_first(services, routed, attempt)
                replica, order[1:] = attempt.replica, left_to_ask(order, attempt)
        except ReplicaUnavailable as error:
            outcome = Outcome(failure=error)
        if isinstance(outcome.failure, NoSlot):
            break
        turned_away = isinstance(outcome.failure, ReplicaUnavailable) and outcome.usage is None
        if not turned_away and not delivery.abandoned:
            services.fleet.report(replica, ok=not outcome.lost_its_replica)
        if not turned_away:
            break
        services.fleet.report(replica, ok=False)
        log.warning("replica %s is unavailable: %s", replica.name, outcome.failure)
        replays_left -= isinstance(outcome.failure, ReplicaStepFailed)
        if replays_left < 0:
            break
        if isinstance(outcome.failure, ReplicaDied):
            died.append(replica)
        if died and position + 1 == len(order) == len(replicas):
            back = await first_to_return(replicas, died, call, delivery)
            order += [] if back is None else [back]
    return outcome


def left_to_ask(order: Sequence[Replica], first: ReplicaAttempt) -> Sequence[Replica]:
    """Return whom to ask after the first attempt, if it is turned away: one that moved was not
    refused where it waited."""
    if not first.has_moved:
        return order[1:]
    return [each for each in order if each is not first.replica]


def within_what_is_held(
    replica: Replica, prepared: PreparedRequest, held: PreparedRequest
) -> PreparedRequest:
    """Bound what another replica is asked by what was reserved for the first one, `held`: under
    its own name the model may count a few tokens more."""
    most, most_held = prepared.most_input_tokens, held.most_input_tokens
    if most is None or most_held is None or not held.request.is_capped:
        return prepared
    if prepared.max_output_tokens > held.max_output_tokens and not prepared.max_tokens_given:
        prepared = replica.bounded(prepared, held.max_output_tokens)
    return msgspec.structs.replace(prepared, most_input_tokens=min(most, most_held))


async def settle(
    limiter: Limiter, admission: Admission, usage: MeteredUsage | None, record: Attempt
) -> None:
    """Give back what was reserved and not used."""
    if usage is None:
        await limiter.void(admission)
        return
    used = to_units(usage)
    if admission.spending is not None:
        cost = to_nano(rated(usage, record).amount_pico)
        used = msgspec.structs.replace(used, cost_nano=cost)
    await limiter.settle(admission, used)


async def drain(services: GenerationServices, timeout_s: float) -> None:
    """Let generations finish for `timeout_s`, also those that begin meanwhile, then abandon what is
    left: aborted, billed, settled."""
    await asyncio.sleep(timeout_s)
    for delivery in list(services.open_calls.values()):
        delivery.abandon(ReplicaLost("this gateway is shutting down"))
    if services.open_calls:
        await asyncio.wait(services.open_calls, timeout=2 * ABORT_TIMEOUT_S)
