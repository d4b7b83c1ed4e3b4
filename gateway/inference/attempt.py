"""One try of a call on one replica: its records in the spool, its stream, its usage and its bill.

open -> stream -> write the end -> close -> deliver the end

One whose replica is lost amid it hands over to the next one: what was said, and how it is billed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import msgspec
from msgspec import UNSET

from billing.errors import SpoolFull
from billing.events import Attempt, Finish, Kind, Quantities, UsageEvent, as_waste
from billing.pricing.rating import RatedUsage
from billing.spool.spool import Spool
from foundation.stages import CURRENT_ATTEMPT
from gateway.fleet.errors import NoSlot, PromptComputed, ReplicaLost, RequestTakenBack
from gateway.fleet.moving.engine_stay import EngineStay, HeldRoutes
from gateway.fleet.replica import (
    EventTaker,
    HeardReplica,
    PreparedRequest,
    Replica,
    cell_of,
    is_observed,
    is_viewed,
)
from gateway.generation_events import CacheOutcome, MeteredUsage, ReplicaEvent
from gateway.inference.cache_notes import note_of
from gateway.inference.calls import Account, GenerationCall
from gateway.inference.delivery import Delivery
from gateway.inference.metering import (
    NOTHING_USED,
    rated,
    to_disputed,
    to_events,
    to_quantities_since,
    to_units,
)
from gateway.inference.services import GenerationServices
from gateway.lanes import Priority
from gateway.limits.allowance import Allowance, PauseReasons, SetPaused
from gateway.wire.surfaces import CountingEncoder

CHECKPOINT_INTERVAL_S = 0.5
CHECKPOINT_TOKENS = 32
"""Whichever comes first, of what was sent by then. Of what a stream had sent a kill -9 leaves this
off its bill and what went out while the checkpoint was on its way to the file, 64 tokens in all;
the house pays it as waste, and all that was not sent."""
ABORT_TIMEOUT_S = 2.0
"""How long an abandoned attempt may take to say what it used."""
MAX_REPLAYS = 1
"""How often a generation is tried once more after a step of an engine that failed: the next one
would fail as well where it is the cause."""
LOOK_S = 1.0
"""Between two looks at the replica."""
UNHEARD = nullcontext()
"""Stands for listening to a replica that is no engine of ours."""
RESUMED = b": resumed\n\n"
"""A comment of an event stream where another replica went on; no event, as clients read it."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt: what it used and was billed, and what went wrong, if anything did."""

    usage: MeteredUsage | None = None
    """None: nothing ran, nothing is billed."""
    failure: Exception | None = None
    handover: Handover | None = None
    """Goes to another attempt, which decides what this one left open."""

    @property
    def lost_its_replica(self) -> bool:
        handover = self.handover
        return handover is not None and not (handover.is_planned or handover.is_drained)


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what an attempt whose replica was lost leaves to the one that goes on."""

    rest: PreparedRequest
    usage: MeteredUsage
    """Over all attempts of the generation by now."""
    held: tuple[UsageEvent, ...]
    """The bills of what nobody has got yet: who pays for that is known at the end."""
    opening: Callable[[MeteredUsage], bytes] | None
    """Makes the bytes before the first chunk; None: they were sent, or there are none."""
    pauses: PauseReasons
    resumes_left: int
    """After this one."""
    replays_left: int
    lost_at: float
    """Monotonic seconds."""
    is_planned: bool = False
    """No replica was lost: it computed the prompt for another one."""
    is_drained: bool = False
    """No replica was lost: it is to be taken away, and was given up after its time."""
    unacknowledged: tuple[tuple[Replica, str], ...] = ()
    """The replicas, with the ids of their attempts, that are to hear when `held` is booked."""


class ReplicaAttempt:
    """A try of an admitted call on one replica. `record`: the attempt as the books know it.
    `handover`: of the attempt that it goes on with; None: it begins. `replays_left`: how often it
    may be tried once more after a step that failed. `elsewhere`: whether another replica could go
    on with it now. `routes`: those that the generation holds."""

    def __init__(
        self,
        services: GenerationServices,
        call: GenerationCall,
        delivery: Delivery,
        allowance: Allowance,
        *,
        record: Attempt,
        replica: Replica,
        prepared: PreparedRequest,
        routes: HeldRoutes,
        handover: Handover | None = None,
        replays_left: int = MAX_REPLAYS,
        elsewhere: Callable[[], bool] | None = None,
    ) -> None:
        self.services, self.call = services, call
        self.delivery, self.allowance = delivery, allowance
        self.record, self.replica, self.prepared = record, replica, prepared
        self.account: Account | Spool = call.account or services.spool
        self.handover, self.elsewhere, self.routes = handover, elsewhere, routes
        self.replays_left = replays_left
        self.before = NOTHING_USED if handover is None else handover.usage
        self.held = () if handover is None else handover.held
        self.unacknowledged = () if handover is None else handover.unacknowledged
        if handover is None:
            self.resumes_left = services.max_resumes
            self.pauses = PauseReasons(pausing(replica, record.id))
            self.opening = call.opening
        else:
            self.resumes_left = handover.resumes_left
            self.pauses, self.opening = handover.pauses, handover.opening
            if self.opening is None and call.request.stream and not handover.is_planned:
                self.opening = to_comment
        self.usage: MeteredUsage | None = None
        self.cache: CacheOutcome | None = None
        self.counting: CountingEncoder | None = None
        """Hears of the usage before each chunk, where the client wants it there."""
        if call.request.continuous_usage and isinstance(call.encoder, CountingEncoder):
            self.counting = call.encoder
        self.checkpoint_due_s, self.checkpoint_due_output = 0.0, 0
        self.sent: MeteredUsage | None = None
        """The usage of what had been sent at the last checkpoint."""
        self.closing = False
        self.is_overtaken = False
        """Another attempt of the same prompt has said something first."""
        self.next_look: asyncio.TimerHandle | None = None
        self.gives_way = False
        """Its replica is given up, as it is to be taken away."""
        self.has_moved = False
        """Another replica had it before, and gave it back."""
        self.begun: AsyncGenerator[ReplicaEvent, None] | None = None
        """Its stream, where that was opened before; None: it is opened here."""

    async def run(self) -> Outcome:
        """Stream until the end, whatever ends it, and bill it; a stage of the request."""
        with self.call.meter.begin_attempt(
            self.replica.name, self.record.id, is_upstream=is_observed(self.replica)
        ) as stage:
            CURRENT_ATTEMPT.set(stage)  # of this task, which the application owns
            if (cell := cell_of(self.replica)) is not None:
                self.call.meter.went_to_cell(cell)
            outcome = await self._run()
            if self.cache is not None:
                self.call.meter.found_cached(stage, self.cache)
            if self.delivery.was_left:
                stage.outcome = "left"
            elif self.is_overtaken and outcome.usage is None:
                stage.outcome = "overtaken"
            elif outcome.handover is not None and outcome.handover.is_planned:
                stage.outcome = "moved"
            elif isinstance(outcome.failure, RequestTakenBack):
                stage.outcome = "taken_back"
            elif outcome.failure is not None:
                stage.outcome = type(outcome.failure).__name__
            return outcome

    async def _run(self) -> Outcome:
        failure: Exception | None = None
        last: ReplicaEvent | None = None
        try:
            if self.begun is None:
                self.account.attempt_opened(self.record)
            last = await self.stream()
        except TimeoutError:
            failure = ReplicaLost("the replica did not finish in time")
        except Exception as error:
            # Nothing may pass here unbilled, a bug least of all: `generate` raises it again.
            failure = error
        if self.usage is None:
            await self.account.void(self.record.id)
            return Outcome(failure=failure)
        if (rest := self.rest_after(failure)) is not None:
            return await self.hand_over(rest, self.usage, failure)
        if has_moved := isinstance(failure, PromptComputed):
            failure = None  # whoever wanted the rest of it is gone
        end: bytes | None = None
        if last is not None and not self.delivery.abandoned:
            try:
                end = await self.write_end(last, self.usage)
            except Exception as error:
                failure = error  # before the bill, which it decides
        try:
            await self.close(self.usage, failure)
            if last is not None or has_moved:
                await acknowledge(self.call.account, [(self.replica, self.record.id)])
            if end is not None:
                self.delivery.put_last(self.opened(end))
                self.time_first_write()
        except Exception as error:
            failure = failure or error
        charged = None if self.is_our_loss(failure) else self.usage
        return Outcome(usage=charged, failure=failure)

    def rest_after(self, failure: Exception | None) -> PreparedRequest | None:
        """Return what another replica may go on with; None: the generation ends here."""
        if not isinstance(failure, ReplicaLost) or self.delivery.abandoned:
            return None
        if isinstance(failure, PromptComputed):
            return failure.rest
        may_again = self.resumes_left > 0 and (self.replays_left > 0 or not failure.by_step)
        if failure.rest is not None and not may_again and self.services.max_resumes:
            self.call.meter.resumed("exhausted")
        return failure.rest if may_again else None

    async def hand_over(
        self, rest: PreparedRequest, usage: MeteredUsage, failure: Exception | None
    ) -> Outcome:
        """Bill what was delivered, before another attempt begins. Of what nobody has got yet the
        bill is handed on."""
        self.closing = True
        is_planned = isinstance(failure, PromptComputed)
        finish: Finish = "moved" if is_planned else "failover"
        held = (*self.held, *self.events(usage, kind="usage", finish=finish))
        if is_planned:
            self.unacknowledged = ((self.replica, self.record.id),)
        try:
            if self.call.request.stream and self.delivery.begun:
                await self.account.close(*held)
                self.note_billed(held)
                held = ()
                await acknowledge(self.call.account, self.unacknowledged)
                self.unacknowledged = ()
        except Exception as error:
            return Outcome(usage=usage, failure=error)
        handover = Handover(
            rest=rest,
            usage=usage,
            held=held,
            opening=self.opening,
            pauses=self.pauses,
            resumes_left=self.resumes_left - (not is_planned and not self.gives_way),
            replays_left=self.replays_left - (isinstance(failure, ReplicaLost) and failure.by_step),
            lost_at=time.monotonic(),
            is_planned=is_planned,
            is_drained=self.gives_way and not is_planned,
            unacknowledged=self.unacknowledged,
        )
        return Outcome(usage=usage, failure=failure, handover=handover)

    async def stream(self) -> ReplicaEvent | None:
        """Pass events on as they come; returns the last one, undelivered: it may only go out once
        it is billed."""
        async with asyncio.timeout(None) as deadline:
            self.services.attempt_deadline.begin(deadline)
            try:
                with self.delivery.on_abandon(lambda: self.abort(deadline)), self.heard():
                    if (last := await self.pass_on()) is not None:
                        return last
            finally:
                self.services.attempt_deadline.end(deadline)
        if not self.delivery.abandoned:
            raise ReplicaLost("the stream ended without a last event")
        return None

    async def pass_on(self) -> ReplicaEvent | None:
        """Pass events on until the last one; None: none came."""
        events = self.begun or self.open_stream(self)
        try:
            async for event in events:
                chunk = self.receive(event)
                if event.finished:
                    return event
                if chunk:
                    await self.delivery.put(chunk, self.pauses.for_reader)
                    self.note_put()
        finally:
            await events.aclose()
        return None

    def open_stream(self, taker: EventTaker | None = None) -> AsyncGenerator[ReplicaEvent, None]:
        """Return the stream of its replica. `taker`: as `Replica.stream` is given it."""
        return self.replica.stream(
            self.prepared,
            attempt_id=self.record.id,
            cache_salt=self.services.cache_salts(self.record.org),
            priority=self.priority,
            taker=taker,
        )

    def overtake(self) -> None:
        """End it for another attempt that has said something, unless it has itself."""
        if self.usage is None and isinstance(self.replica, HeardReplica):
            self.is_overtaken = True
            self.replica.leave(self.record.id)

    @property
    def is_ready(self) -> bool:
        return self.delivery.has_room

    def take(self, event: ReplicaEvent) -> None:
        """Pass an event on at once, which is not the last."""
        if chunk := self.receive(event):
            self.delivery.put_at_once(chunk)
            self.note_put()

    def receive(self, event: ReplicaEvent) -> bytes:
        """Count an event, and return what of it may go out now: nothing of the last one."""
        if self.usage is None and self.handover is not None:
            self.go_on(self.handover)
        self.note(event)
        self.call.meter.received(event, streams=self.call.request.stream)
        if event.finished:
            return b""
        chunk = self.call.encoder.encode(event.items)
        return self.opened(chunk) if chunk else b""

    def note_put(self) -> None:
        self.time_first_write()
        self.checkpoint_once_sent()

    @property
    def priority(self) -> Priority:
        """Return what is left of its time. What has begun has met the deadline of its first token:
        it has as long as its client gives it.

        Raises: NoSlot.
        """
        if self.handover is None:
            return self.call.current_priority
        given_s = self.call.timeout_s
        left_s = None if given_s is None else self.call.begun_at + given_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise NoSlot("its time was over before anybody went on")
        return msgspec.structs.replace(self.call.priority, deadline_s=left_s)

    def go_on(self, handover: Handover) -> None:
        """Note that the first token is here behind those of the attempt before."""
        gap_s = time.monotonic() - handover.lost_at
        if handover.is_planned:
            self.call.meter.handed_over(gap_s)
        else:
            self.call.meter.resumed("drained" if handover.is_drained else "resumed", gap_s)
        if handover.pauses.move_to(pausing(self.replica, self.record.id)):
            paused = self.replica.set_paused(self.record.id, paused=True)
            self.services.tasks.spawn(paused, name="pause")

    def heard(self) -> AbstractContextManager[object]:
        """Give the replica up when another one could go on and it is silent, or is to be taken away
        and has had its time."""
        replica = self.replica
        if not is_viewed(replica) or not isinstance(replica, HeardReplica):
            return UNHEARD
        services, lane = self.services, self.call.priority.lane
        stay = EngineStay(services.fleet, self.routes, replica, lane, services.drain_timeout_s)
        return self.listening(replica, stay)

    @contextmanager
    def listening(self, replica: HeardReplica, stay: EngineStay) -> Iterator[None]:
        """Look now and then at the replica."""
        self.look_later(replica, stay)
        try:
            yield
        finally:
            if self.next_look is not None:
                self.next_look.cancel()
            self.next_look = None  # it leads back here

    def look_later(self, replica: HeardReplica, stay: EngineStay) -> None:
        loop = asyncio.get_running_loop()
        self.next_look = loop.call_later(LOOK_S, self.look, replica, stay)

    def look(self, replica: HeardReplica, stay: EngineStay) -> None:
        is_over = stay.look() and self.usage is not None and self.resumes_left
        if replica.is_silent and self.resumes_left and self.elsewhere and self.elsewhere():
            replica.leave(self.record.id)
        elif is_over and self.call.request.embedding is None:
            self.gives_way = True
            replica.leave(self.record.id)
        else:
            self.look_later(replica, stay)

    def opened(self, chunk: bytes) -> bytes:
        """Return the chunk with what comes before the first of them."""
        opening, self.opening = self.opening, None
        return chunk if opening is None else opening(self.usage or MeteredUsage()) + chunk

    def abort(self, deadline: asyncio.Timeout) -> None:
        """The client left: the replica stops, and the stream still yields its final usage."""
        deadline.reschedule(asyncio.get_running_loop().time() + ABORT_TIMEOUT_S)
        self.services.tasks.spawn(self.replica.abort(self.record.id), name="abort")

    def note(self, event: ReplicaEvent) -> None:
        usage = event.usage
        if usage is None:
            return
        self.usage = usage
        if self.counting is not None:
            self.counting.note_usage(usage)
        if event.finished:
            self.cache = event.cache
            if usage.is_disputed:
                self.write_checkpoint()
            return  # nothing more will be written, and what was is closed and settled at once
        self.allowance.note(to_units(usage), self.pauses.for_limits)

    def time_first_write(self) -> None:
        """Let what was queued last tell when it is written, if it is the first to show a token."""
        meter = self.call.meter
        if meter.awaits_write:
            meter.awaits_write = False
            self.delivery.once_sent(meter.wrote_first)

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
            for event in self.held:
                if event.kind == "usage":
                    self.account.checkpoint(event.id, event.quantities, event.estimated)
            self.sent = usage
            self.write_checkpoint()

    def write_checkpoint(self) -> None:
        """Note what was sent, and what is disputed of all that was claimed by now: what is claimed
        last is said once, and keeping the answer may take a while from then to the close."""
        quantities, estimated = Quantities(), False
        if self.sent is not None:
            quantities = to_quantities_since(self.sent, self.before, self.record)
            estimated = self.sent.estimated
        disputed = UNSET if self.usage is None else to_disputed(self.usage, self.replica.name)
        self.account.checkpoint(self.record.id, quantities, estimated, disputed)

    async def close(self, usage: MeteredUsage, failure: Exception | None) -> None:
        """The usage event is on disk when this returns."""
        self.closing = True
        is_loss = self.is_our_loss(failure)
        ended = failure or self.delivery.failure
        held = as_waste(self.held) if is_loss else self.held
        own = self.events(
            usage,
            kind="waste" if is_loss else "usage",
            finish="disconnect" if self.delivery.was_left else "error" if ended else "done",
        )
        events = [*held, *own]
        await book(self.services, self.call, self.delivery, events)
        await acknowledge(self.call.account, self.unacknowledged)
        if usage.is_disputed:
            self.call.meter.disputed(self.replica.name, usage)
        if not is_loss:
            self.note_billed(events)
            self.note_cached(usage)

    def events(self, usage: MeteredUsage, *, kind: Kind, finish: Finish) -> list[UsageEvent]:
        return to_events(
            self.record,
            usage,
            before=self.before,
            replica=self.replica.name,
            kind=kind,
            finish=finish,
            again="moved" if self.handover is not None and self.handover.is_planned else "failover",
        )

    def note_billed(self, events: Sequence[UsageEvent]) -> None:
        note_billed(self.call, self.delivery, events)

    def is_our_loss(self, failure: Exception | None) -> bool:
        return is_our_loss(self.call, self.delivery, failure)

    def note_cached(self, usage: MeteredUsage) -> None:
        """Note the cache's part behind the answer: what goes wrong there is no matter of this
        request."""
        self.call.meter.cache = self.cache
        salt = self.services.cache_salts(self.record.org)
        parts = (self.record, usage, self.cache, self.replica, self.prepared, self.call.priority)
        asyncio.get_running_loop().call_soon(
            lambda: self.services.on_cached(note_of(*parts, salt=salt))
        )

    async def write_end(self, last: ReplicaEvent, usage: MeteredUsage) -> bytes:
        """Return the last chunk, with the usage and, if the call shows it, the cost; what is to be
        kept of the answer is kept by then."""
        cost: RatedUsage | None = rated(usage, self.record) if self.call.shows_cost else None
        self.delivery.cost = cost
        chunk = self.call.encoder.encode(last.items) + self.call.encoder.finish(usage, cost)
        if self.call.before_end is not None:
            await self.call.before_end()
        return chunk


async def acknowledge(account: Account | None, attempts: Iterable[tuple[Replica, str]]) -> None:
    """Tell replicas that the usage of these attempts is in the books, once it is."""
    for replica, attempt_id in attempts:
        if account is None:
            await replica.acknowledge(attempt_id)
        else:
            await account.once_kept(partial(replica.acknowledge, attempt_id))


def to_comment(_: MeteredUsage) -> bytes:
    return RESUMED


def is_our_loss(call: GenerationCall, delivery: Delivery, failure: Exception | None) -> bool:
    """Tell whether nobody is billed for a generation: we failed to finish it and nobody got a byte
    of it, as of a whole answer. What a stream had begun to deliver is billed, and so is what was
    generated for a client that left, or whose time was over."""
    given_up = delivery.abandoned and not delivery.was_left
    ended_by_us = failure is not None or given_up
    return ended_by_us and not (call.request.stream and delivery.begun)


async def book(
    services: GenerationServices,
    call: GenerationCall,
    delivery: Delivery,
    events: Sequence[UsageEvent],
) -> None:
    """Close what ends a generation or a part of it. What only a full spool makes our loss is
    nobody's bill. Raises what the account raises."""
    try:
        await (call.account or services.spool).close(*events)
    except SpoolFull as full:
        if is_our_loss(call, delivery, full):
            services.spool.replace_queued(events, as_waste(events))
        raise


def note_billed(call: GenerationCall, delivery: Delivery, events: Sequence[UsageEvent]) -> None:
    for event in events:
        if event.kind == "usage":
            call.meter.used(event)
            delivery.is_billed = True


def pausing(replica: Replica, attempt_id: str) -> SetPaused:
    """Return what pauses an attempt without a reference to it: an attempt in a cycle of references
    would keep its prompt until the collector comes by."""

    async def set_paused(paused: bool) -> None:
        await replica.set_paused(attempt_id, paused=paused)

    return set_paused
