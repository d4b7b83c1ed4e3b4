"""THE main path: a request becomes tokens becomes money.

    prepare -> reserve -> open -> stream -> close -> deliver the end -> settle

It knows no HTTP; a disconnect reaches it as `Delivery.abandon`. Each generation runs in a task that
the application owns, so that no client's leaving can cancel its settling.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

import msgspec

from billing.events import Attempt, Quantities, Tags, UsageEvent
from billing.pricing.price_book import PriceBook
from billing.pricing.rating import RatedUsage
from billing.spool.spool import Spool
from foundation.tasks import TaskSet
from gateway.fleet.errors import (
    DeadlinePassed,
    NoPlace,
    ReplicaLost,
    ReplicaOverloaded,
    ReplicaUnavailable,
)
from gateway.fleet.replica import PreparedRequest, Replica
from gateway.fleet.router import Fleet, affinity
from gateway.generate_request import GenerateRequest, under_a_cap
from gateway.generation_events import CacheOutcome, MeteredUsage, ReplicaEvent
from gateway.inference.cache_notes import OnCached, note_of, unnoted
from gateway.inference.delivery import Delivery
from gateway.inference.metering import Terms, new_attempt, to_events, to_quantities, to_units
from gateway.lanes import LaneDeadlines, Priority, later
from gateway.limits.allowance import Allowance
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal
from gateway.limits.spending import to_nano
from gateway.pauses import PauseReasons, Rest
from gateway.principal import Principal
from gateway.telemetry import RequestMeter
from gateway.wire.surfaces import Encoder

log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL_S = 0.5
CHECKPOINT_TOKENS = 32
"""Whichever comes first, of what was sent by then. Of what a stream had sent a kill -9 leaves this
off its bill and what went out while the checkpoint was on its way to the file, 64 tokens in all;
the house pays it as waste, and all that was not sent."""
ABORT_TIMEOUT_S = 2.0
"""How long an abandoned attempt may take to say what it used."""
MAX_ATTEMPT_S = 3600.0
MAX_RETRY_AFTER_S = 60.0


class RateLimited(Exception):
    """The limiter said no; nothing was reserved."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.scope} {refusal.kind}")
        self.refusal = refusal


class NotAccepting(Exception):
    """Says that this gateway cannot take work it could account for (its spool is full or
    broken)."""


class Account(Protocol):
    """Stands in the place of the spool, where what is used comes to the books together with
    something else. It forgets what a crash cuts off."""

    def attempt_opened(self, attempt: Attempt) -> None: ...

    def checkpoint(self, attempt_id: str, quantities: Quantities, estimated: bool) -> None: ...

    async def close(self, *events: UsageEvent) -> None: ...

    async def void(self, attempt_id: str) -> None: ...

    async def once_kept(self, told: Callable[[], Awaitable[None]]) -> None:
        """Call `told` once what was closed is in the books."""
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt: what it used and was billed, and what went wrong, if anything did."""

    usage: MeteredUsage | None = None
    """None: nothing ran, nothing is billed."""
    failure: Exception | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A client request, understood and authenticated."""

    request_id: str
    principal: Principal
    request: GenerateRequest
    turn: Priority
    encoder: Encoder
    opening: Callable[[MeteredUsage], bytes] | None = None
    meter: RequestMeter
    shows_cost: bool = False
    tags: Tags = {}
    account: Account | None = None
    """None: the spool."""
    timeout_s: float | None = None
    """Of the whole, as the client gave it; what is not there by then is cut off."""
    before_end: Callable[[], Awaitable[None]] | None = None
    """Once it is billed, and before its end goes out: never raises, and takes a bounded time."""
    round: int = 0
    """Of a loop of tools: each reserves for itself."""
    begun_at: float = msgspec.field(default_factory=time.monotonic)
    """Monotonic seconds."""

    @property
    def lease_id(self) -> str:
        return f"{self.request_id}.{self.round}" if self.round else self.request_id

    @property
    def turn_now(self) -> Priority:
        """Return its turn with what is left until its deadline: preparing it and waiting for its
        limits took some.

        Raises: NoPlace.
        """
        turn = later(self.turn, time.monotonic() - self.begun_at)
        if turn.deadline_s is not None and turn.deadline_s <= 0:
            raise NoPlace("its deadline passed before anybody was asked")
        return turn


CacheSalts = Callable[[str], str]
"""org id -> prefix-cache namespace that no tenant can guess."""


class GenerationServices(msgspec.Struct, frozen=True, kw_only=True):
    """The services that a generation needs of the process, wired once in `app`."""

    fleet: Fleet
    limiter: Limiter
    spool: Spool
    price_book: PriceBook
    tasks: TaskSet
    cache_salts: CacheSalts
    stalled_reader_s: float
    deadlines: LaneDeadlines = LaneDeadlines()
    on_cached: OnCached = unnoted
    """Hears what was read from caches of each prompt that is on a bill."""
    open_calls: dict[asyncio.Task[None], Delivery] = msgspec.field(default_factory=dict)

    def sells_priority(self, model: str) -> bool:
        return self.price_book.sells(model, time.time(), "priority")


def start(desk: GenerationServices, call: Call) -> Delivery:
    """Run `generate` in a task of the application's own; the caller reads what it delivers."""
    delivery = Delivery(desk.stalled_reader_s)
    watched(desk, call, delivery, drive(desk, call, delivery))
    return delivery


async def drive(desk: GenerationServices, call: Call, delivery: Delivery) -> None:
    """Run `generate`, whose end the reader hears of. Raises nothing."""
    try:
        await generate(desk, call, delivery)
    except Exception as error:
        delivery.fail(error)
    else:
        delivery.end()


def watched(
    desk: GenerationServices, call: Call, delivery: Delivery, work: Coroutine[None, None, None]
) -> None:
    """Run what fills `delivery`, known to `drain`, for as long as the client gives it."""
    task = asyncio.create_task(work, name=f"generate {call.request_id}")
    desk.open_calls[task] = delivery
    task.add_done_callback(desk.open_calls.pop)
    if call.timeout_s is not None:
        late = DeadlinePassed(f"not done in {call.timeout_s:.3f} s")
        timer = task.get_loop().call_later(call.timeout_s, delivery.expire, late)
        task.add_done_callback(lambda _: timer.cancel())


async def generate(desk: GenerationServices, call: Call, delivery: Delivery) -> None:
    """Admit, run on the first replica that can, settle what was used."""
    call.principal.check_served()
    if not desk.spool.healthy:
        raise NotAccepting
    if call.principal.spend_caps:
        call = msgspec.structs.replace(call, request=under_a_cap(call.request))
    route = desk.fleet.resolve(call.request.model, call.principal)
    replicas = desk.fleet.order(route, affinity(call.request, call.principal))
    prepared = await replicas[0].prepare(call.request, call.turn)
    if delivery.abandoned:
        return
    predicted_s = replicas[0].predicted_ttft_s(prepared, call.turn)
    if predicted_s is not None:
        refuse_what_comes_too_late(call.turn_now, predicted_s)
    terms = Terms.of_now(desk.price_book, call.principal, call.request.model, call.turn)
    verdict = await desk.limiter.admit(
        call.principal,
        call.request.model,
        input_tokens=prepared.input_tokens,
        most_input_tokens=prepared.most_input_tokens,
        max_output_tokens=prepared.max_output_tokens,
        lease_id=call.lease_id,
        lane=call.turn.lane,
        prices=terms.prices,
        min_output_tokens=0 if prepared.max_tokens_given else call.request.n,
        admitted_at=terms.admitted_at,
    )
    if isinstance(verdict, Refusal):
        raise RateLimited(verdict)
    delivery.admitted(verdict.state)
    allowance = Allowance(desk.limiter, verdict, desk.tasks, sleep=asyncio.sleep)
    outcome = Outcome()
    try:
        if verdict.max_output_tokens < prepared.max_output_tokens:
            prepared = replicas[0].bounded(prepared, verdict.max_output_tokens)
            call = msgspec.structs.replace(call, request=prepared.request)
        outcome = await Generation(desk, call, delivery, allowance, terms).run(replicas, prepared)
    finally:
        allowance.end()
        await settle(desk.limiter, verdict, outcome.usage, terms)
    if outcome.failure is not None:
        raise outcome.failure


def refuse_what_comes_too_late(turn: Priority, predicted_s: float | None) -> None:
    """Refuse a request that would come too late, before anything is reserved. Raises:
    ReplicaOverloaded."""
    if turn.deadline_s is None or predicted_s is None or predicted_s <= turn.deadline_s:
        return
    late_s = min(predicted_s - turn.deadline_s, MAX_RETRY_AFTER_S)
    raise ReplicaOverloaded(
        f"the first token would come in {predicted_s:.1f} s", retry_after_s=max(1.0, late_s)
    )


class Generation(msgspec.Struct, frozen=True):
    """A call that was admitted: what each of its attempts needs."""

    desk: GenerationServices
    call: Call
    delivery: Delivery
    allowance: Allowance
    terms: Terms

    async def run(self, replicas: Sequence[Replica], prepared: PreparedRequest) -> Outcome:
        """Try replicas in order until one has begun; after its first event there is no other."""
        outcome = Outcome()
        for position, replica in enumerate(replicas):
            if self.delivery.abandoned:
                return Outcome()
            try:
                if position:
                    prepared = await replica.prepare(self.call.request, self.call.turn)
                outcome = await Run(self, replica, prepared).relay()
            except ReplicaUnavailable as error:
                outcome = Outcome(failure=error)
            if isinstance(outcome.failure, NoPlace):
                break
            turned_away = isinstance(outcome.failure, ReplicaUnavailable) and outcome.usage is None
            if not turned_away and not self.delivery.abandoned:
                self.desk.fleet.report(replica, ok=True)
            if not turned_away:
                break
            self.desk.fleet.report(replica, ok=False)
            log.warning("replica %s is unavailable: %s", replica.name, outcome.failure)
        return outcome


async def settle(
    limiter: Limiter, admission: Admission, usage: MeteredUsage | None, terms: Terms
) -> None:
    """Give back what was reserved and not used."""
    if usage is None:
        await limiter.void(admission)
        return
    used = to_units(usage)
    if admission.spending is not None:
        cost = to_nano(terms.rated(usage).amount_pico)
        used = msgspec.structs.replace(used, cost_nano=cost)
    await limiter.settle(admission, used)


class Run:
    """An attempt on one replica: its spool records, its usage so far and its end."""

    def __init__(self, generation: Generation, replica: Replica, prepared: PreparedRequest) -> None:
        self.desk, self.call = generation.desk, generation.call
        self.delivery, self.allowance = generation.delivery, generation.allowance
        self.replica, self.prepared = replica, prepared
        self.terms = generation.terms
        call = self.call
        self.attempt = new_attempt(
            call.request_id, call.principal, call.request.model, call.turn, call.tags, self.terms
        )
        self.account = self.call.account or self.desk.spool
        self.rests = PauseReasons(halting(replica, self.attempt.id))
        self.usage: MeteredUsage | None = None
        self.cache: CacheOutcome | None = None
        self.opening = generation.call.opening
        self.checkpoint_due_s, self.checkpoint_due_output = 0.0, 0
        self.closing = False

    async def relay(self) -> Outcome:
        """Stream until the end, whatever ends it, and bill it."""
        failure: Exception | None = None
        last: ReplicaEvent | None = None
        try:
            self.account.attempt_opened(self.attempt)
            last = await self.stream()
        except TimeoutError:
            failure = ReplicaLost("the replica did not finish in time")
        except Exception as error:
            # Nothing may pass here unbilled, a bug least of all: `generate` raises it again.
            failure = error
        if self.usage is None:
            await self.account.void(self.attempt.id)
            return Outcome(failure=failure)
        try:
            await self.close(self.usage, failure)
            if last is not None:
                await self.acknowledge()
            if last is not None and not self.delivery.abandoned:
                cost = self.delivery.cost = self.cost(self.usage)
                encoder = self.call.encoder
                rest = encoder.encode(last.items) + encoder.finish(self.usage, cost)
                if self.call.before_end is not None:
                    await self.call.before_end()
                self.delivery.put_last(self.opened(rest))
        except Exception as error:
            failure = failure or error
        charged = None if self.is_our_loss(failure) else self.usage
        return Outcome(usage=charged, failure=failure)

    async def acknowledge(self) -> None:
        if self.call.account is None:
            await self.replica.acknowledge(self.attempt.id)
        else:
            await self.call.account.once_kept(partial(self.replica.acknowledge, self.attempt.id))

    def cost(self, usage: MeteredUsage) -> RatedUsage | None:
        """Return the cost of the usage, if the call shows it: for the one who asked."""
        return self.terms.rated(usage) if self.call.shows_cost else None

    def is_our_loss(self, failure: Exception | None) -> bool:
        """Tell whether nobody is billed for the attempt: we failed to finish it and nobody got a
        byte of it, as of a whole answer. What a stream had begun to deliver is billed, and so is
        what was generated for a client that left, or whose time was over."""
        given_up = self.delivery.abandoned and not self.delivery.was_left
        ended_by_us = failure is not None or given_up
        return ended_by_us and not (self.call.request.stream and self.delivery.begun)

    async def stream(self) -> ReplicaEvent | None:
        """Pass events on as they come; returns the last one, undelivered: it may only go out once
        it is billed."""
        async with asyncio.timeout(MAX_ATTEMPT_S) as deadline:
            with self.delivery.on_abandon(lambda: self.abort(deadline)):
                events = self.replica.stream(
                    self.prepared,
                    attempt_id=self.attempt.id,
                    cache_salt=self.desk.cache_salts(self.call.principal.org_id),
                    turn=self.call.turn_now,
                )
                async with aclosing(events):
                    async for event in events:
                        self.note(event)
                        self.call.meter.received(event)
                        if event.finished:
                            return event
                        if chunk := self.call.encoder.encode(event.items):
                            await self.delivery.put(self.opened(chunk), self.rests.for_reader)
                            self.checkpoint_once_sent()
        if not self.delivery.abandoned:
            raise ReplicaLost("the stream ended without a last event")
        return None

    def opened(self, chunk: bytes) -> bytes:
        """Return the chunk with what comes before the first of them."""
        opening, self.opening = self.opening, None
        return chunk if opening is None else opening(self.usage or MeteredUsage()) + chunk

    def abort(self, deadline: asyncio.Timeout) -> None:
        """The client left: the replica stops, and the stream still yields its final usage."""
        deadline.reschedule(asyncio.get_running_loop().time() + ABORT_TIMEOUT_S)
        self.desk.tasks.spawn(self.replica.abort(self.attempt.id), name="abort")

    def note(self, event: ReplicaEvent) -> None:
        usage = event.usage
        if usage is None:
            return
        self.usage = usage
        if event.finished:
            self.cache = event.cache
            return  # nothing more will be written, and what was is closed and settled at once
        self.allowance.note(to_units(usage), self.rests.for_limits)

    def checkpoint_once_sent(self) -> None:
        """Checkpoint the usage, when it is due. What the client has is its bill, should this
        process die; what it has not is nobody's."""
        usage, now = self.usage, time.monotonic()
        if usage is None:
            return
        if now >= self.checkpoint_due_s or usage.output >= self.checkpoint_due_output:
            self.checkpoint_due_s = now + CHECKPOINT_INTERVAL_S
            self.checkpoint_due_output = usage.output + CHECKPOINT_TOKENS
            self.delivery.once_sent(lambda: self.checkpoint(usage))

    def checkpoint(self, usage: MeteredUsage) -> None:
        if not self.closing:
            quantities = to_quantities(usage, self.terms)
            self.account.checkpoint(self.attempt.id, quantities, usage.estimated)

    async def close(self, usage: MeteredUsage, failure: Exception | None) -> None:
        """The usage event is on disk when this returns."""
        self.closing = True
        is_loss = self.is_our_loss(failure)
        ended = failure or self.delivery.failure
        events = to_events(
            self.attempt,
            usage,
            self.terms,
            kind="waste" if is_loss else "usage",
            finish="disconnect" if self.delivery.was_left else "error" if ended else "done",
        )
        await self.account.close(*events)
        if not is_loss:
            self.call.meter.used(usage)
            self.delivery.is_billed = True
            self.note_cached(usage)

    def note_cached(self, usage: MeteredUsage) -> None:
        """Note the cache's part behind the answer: what goes wrong there is no matter of this
        request."""
        salt = self.desk.cache_salts(self.call.principal.org_id)
        parts = (self.attempt, usage, self.cache, self.replica, self.prepared, self.call.turn)
        asyncio.get_running_loop().call_soon(
            lambda: self.desk.on_cached(note_of(*parts, salt=salt))
        )


def halting(replica: Replica, attempt_id: str) -> Rest:
    """Return what pauses an attempt, and knows nothing of its run: a `Run` in a cycle of references
    would keep its prompt until the collector comes by."""

    async def halt(resting: bool) -> None:
        await replica.rest(attempt_id, resting=resting)

    return halt


async def drain(desk: GenerationServices, timeout_s: float) -> None:
    """Let generations finish for `timeout_s`, also those that begin meanwhile, then abandon what is
    left: aborted, billed, settled."""
    await asyncio.sleep(timeout_s)
    for delivery in list(desk.open_calls.values()):
        delivery.abandon(ReplicaLost("this gateway is shutting down"))
    if desk.open_calls:
        await asyncio.wait(desk.open_calls, timeout=2 * ABORT_TIMEOUT_S)
