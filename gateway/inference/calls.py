"""Describes what a client asks: the request as it came, and the call that is made of it once its
body is understood.

Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from billing.events import Attempt, DisputedUsage, Quantities, Tags, UsageEvent
from gateway.fleet.errors import NoSlot
from gateway.fleet.router import Route
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import MeteredUsage
from gateway.inference.services import GenerationServices
from gateway.lanes import Priority, priority_of
from gateway.principal import Principal
from gateway.request_errors import UnknownField
from gateway.telemetry.request_meter import RequestMeter
from gateway.wire.shared.unknown_fields import known_part
from gateway.wire.surfaces import AnswerFormat, Encoder

T = TypeVar("T")
REQUEST_PREFIX = "req_"
REFUSES_UNKNOWN = "This model's setting `unknown_fields` refuses what is not known here."


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """A request as far as all surfaces read it alike: who sends it, its body, and what is said
    beside that. No call keeps it: a body may be large, and an answer may take long."""

    request_id: str
    principal: Principal
    meter: RequestMeter
    """Begun when the request came."""
    body: bytes
    route: Route
    """The route of the model that the body names."""
    idempotency_key: str | None = None
    """The key under which it is answered once."""
    deadline_s: float | None = None
    """Seconds until the whole answer must be there."""
    shows_cost: bool = False
    tags: Tags = {}
    is_batch: bool = False
    """A batch asks, nobody waits."""
    ignored: tuple[str, ...] = ()
    """The paths of fields that were left out of `body`, as nobody here knows them."""


class Account(Protocol):
    """Stands in the place of the spool, where what is used comes to the books together with
    something else. It forgets what a crash cuts off."""

    def attempt_opened(self, attempt: Attempt) -> None: ...

    def checkpoint(
        self,
        attempt_id: str,
        quantities: Quantities,
        estimated: bool,
        disputed: DisputedUsage | UnsetType = UNSET,
    ) -> None: ...

    async def close(self, *events: UsageEvent) -> None: ...

    async def void(self, attempt_id: str) -> None: ...

    async def once_kept(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call `callback` once what was closed is in the books."""
        ...


class GenerationCall(msgspec.Struct, frozen=True, kw_only=True):
    """A client request, understood and authenticated."""

    request_id: str
    principal: Principal
    request: GenerateRequest
    priority: Priority
    """As of when the request came."""
    encoder: Encoder
    opening: Callable[[MeteredUsage], bytes] | None = None
    meter: RequestMeter
    shows_cost: bool = False
    tags: Tags = {}
    account: Account | None = None
    """None: the spool."""
    timeout_s: float | None = None
    """Bounds the whole answer, as the client gave it; what is not there by then is cut off."""
    before_end: Callable[[], Awaitable[None]] | None = None
    """Before it is billed and its end goes out; takes a bounded time. Of an answer in one piece for
    which it raises the house pays; of a tool loop, which runs it at its own end, the rounds are on
    the bill by then."""
    ignored: tuple[str, ...] = ()
    """As of its context; the answer's header names them."""
    round: int = 0
    """The round of a tool loop: each reserves for itself."""
    begun_at: float = msgspec.field(default_factory=time.monotonic)
    """Monotonic seconds."""

    @property
    def lease_id(self) -> str:
        return f"{self.request_id}.{self.round}" if self.round else self.request_id

    @property
    def current_priority(self) -> Priority:
        """Return its priority with what is left until its deadline: preparing it and waiting for
        its limits took some.

        Raises: NoSlot.
        """
        priority = self.priority.after(time.monotonic() - self.begun_at)
        if priority.deadline_s is not None and priority.deadline_s <= 0:
            raise NoSlot("its deadline passed before anybody was asked")
        return priority


def to_call(
    services: GenerationServices,
    answer_format: AnswerFormat,
    context: RequestContext,
    generate: GenerateRequest,
) -> GenerationCall:
    priority = priority_of(
        context.principal,
        services.deadlines,
        generate,
        deadline_s=context.deadline_s,
        sells_priority=services.sells_priority,
        is_batch=context.is_batch,
    )
    context.meter.promise(priority.lane, services.slos.of(generate.model, priority.lane))
    heading = AnswerHeader(
        id=answer_format.id_prefix + context.request_id.removeprefix(REQUEST_PREFIX),
        created=int(time.time()),
        service_tier="default"
        if priority.tier == "batch" and not answer_format.knows_batches
        else priority.tier,
    )
    return GenerationCall(
        request_id=context.request_id,
        principal=context.principal,
        request=generate,
        priority=priority,
        encoder=answer_format.encoder(generate, heading),
        opening=None if answer_format.opening is None else answer_format.opening(generate, heading),
        meter=context.meter,
        timeout_s=context.deadline_s,
        shows_cost=context.shows_cost,
        tags=context.tags,
        ignored=context.ignored,
    )


async def read_context(
    context: RequestContext, read: Callable[[bytes], T]
) -> tuple[RequestContext, T]:
    """Return the context without what was left out of its body, and what `read` makes of that.
    Raises as `read_known`."""
    found, body, ignored = await read_known(context.body, read, context.route)
    if ignored:
        context = msgspec.structs.replace(context, body=body, ignored=ignored)
    return context, found


async def read_known(
    body: bytes, read: Callable[[bytes], T], route: Route
) -> tuple[T, bytes, tuple[str, ...]]:
    """Return what `read` makes of a body, the body, and what was left out of it because nobody here
    knows it and the model's settings ignore that.

    Raises: UnknownField, and what `read` raises.
    """
    try:
        return read(body), body, ()
    except UnknownField as error:
        if not route.ignores_unknown:
            error.message = f"{error.message}. {REFUSES_UNKNOWN}"
            error.args = (error.message,)
            raise
    body, ignored = await asyncio.to_thread(known_part, body, read)
    return read(body), body, ignored
