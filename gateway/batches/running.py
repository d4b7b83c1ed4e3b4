"""Runs one line: its call, its answer, and what it used. A line runs as its batch's key would have
asked, in the lane and at the price of batches. What it uses is not in the spool: it is booked in
the transaction that keeps its answer (`lines.end`), and until then nothing is billed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import msgspec
from msgspec import UNSET, UnsetType

from billing.events import Attempt, DisputedUsage, Quantities, UsageEvent
from gateway.batches.endpoints import LineEndpoint
from gateway.batches.lines import EndedLine, LeasedLine
from gateway.fleet.errors import ReplicaDied, ReplicaStepFailed, ReplicaUnreadable
from gateway.http_errors.table import HttpError
from gateway.inference.calls import RequestContext
from gateway.inference.delivery import Delivery
from gateway.inference.generate import RateLimited, generate
from gateway.inference.services import GenerationServices
from gateway.principal import OrgSuspended, Principal
from gateway.request_errors import BadField
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from gateway.wire.openai.from_chat import peek

MAX_LOSSES = 3
"""Attempts of a line that began and came to nothing: its replica was lost with it, or its upstream
answered what cannot be read. Then it fails."""
UNAVAILABLE_S = 5.0
"""The wait after the first of them; four times as long after the next."""
MAX_DELAY_S = 600.0
SUSPENDED_S = 60.0
OVERLOADED = 503
Kept = Callable[[], Awaitable[None]]


class GivenUp(Exception):
    """This gateway leaves, and another one runs the line."""


class PutOff(msgspec.Struct, frozen=True):
    """The line is tried again, so much later."""

    delay_s: float
    is_loss: bool = False
    is_away: bool = False
    """Nothing was asked: what it asks is not there. For that it waits as long as its batch has."""


class LineAccount:
    """A stand-in for the spool that holds what an attempt used until its line is ended with it."""

    def __init__(self) -> None:
        self.events: list[UsageEvent] = []
        self.kept: list[Kept] = []
        """To be told once they are in the books."""

    def attempt_opened(self, attempt: Attempt) -> None:
        """Ignore the begin of an attempt: a crashed one is void."""

    def checkpoint(
        self,
        attempt_id: str,
        quantities: Quantities,
        estimated: bool,
        disputed: DisputedUsage | UnsetType = UNSET,
    ) -> None:
        """Ignore a checkpoint of an attempt that may yet be void."""

    async def void(self, attempt_id: str) -> None:
        """Drop an attempt: nothing of it is held."""

    async def close(self, *events: UsageEvent) -> None:
        self.events += events

    async def once_kept(self, callback: Kept) -> None:
        self.kept.append(callback)


class LineRun(msgspec.Struct, frozen=True):
    """A line that ran. `account`: what was used, whatever became of it. `meter`: of its times."""

    outcome: EndedLine | PutOff
    account: LineAccount
    meter: RequestMeter | None = None


async def run(
    services: GenerationServices,
    telemetry: Telemetry,
    endpoint: LineEndpoint,
    principal: Principal,
    line: LeasedLine,
) -> LineRun:
    """Run a line; never raises unless it is cancelled."""
    account = LineAccount()
    meter = RequestMeter(telemetry, model_of(line))
    try:
        answer = await _answer(services, meter, endpoint, principal, line, account)
    except Exception as error:
        outcome = _failed(endpoint, line, error)
        if isinstance(outcome, EndedLine):
            meter.judge(outcome.status)
        return LineRun(outcome, account, meter)
    meter.judge(200)
    ended = EndedLine(
        line=line,
        state="done",
        request_id=line.request_id,
        status=200,
        answer=answer,
        events=tuple(account.events),
    )
    return LineRun(ended, account, meter)


async def _answer(
    services: GenerationServices,
    meter: RequestMeter,
    endpoint: LineEndpoint,
    principal: Principal,
    line: LeasedLine,
    account: LineAccount,
) -> bytes:
    model = peek(line.body).model
    context = RequestContext(
        request_id=line.request_id,
        principal=principal,
        meter=meter,
        body=line.body,
        route=services.fleet.resolve(model, principal),
        tags=line.tags or {},
        is_batch=True,
    )
    call = await endpoint.to_call(context)
    delivery = Delivery(services.stalled_reader_s)
    with being_drained(services, delivery):
        await generate(services, msgspec.structs.replace(call, account=account), delivery)
    body = await delivery.next()
    if body is None:
        raise GivenUp
    return body


@contextmanager
def being_drained(services: GenerationServices, delivery: Delivery) -> Iterator[None]:
    """Let a gateway that leaves end the line, as it ends any generation."""
    task = asyncio.current_task()
    assert task is not None
    services.open_calls[task] = delivery
    try:
        yield
    except Exception:
        if not delivery.abandoned:
            raise
    finally:
        del services.open_calls[task]
    if delivery.abandoned:
        raise GivenUp


def _failed(endpoint: LineEndpoint, line: LeasedLine, error: Exception) -> EndedLine | PutOff:
    """Return what a failure means: waiting where that helps, else the error is its answer."""
    if isinstance(error, RateLimited) and error.refusal.retry_after_s is not None:
        return PutOff(min(error.refusal.retry_after_s, MAX_DELAY_S))
    if isinstance(error, GivenUp):
        return PutOff(0.0)
    if isinstance(error, OrgSuspended):
        return PutOff(SUSPENDED_S)
    found = endpoint.to_http_error(error)
    had_it = isinstance(error, ReplicaDied | ReplicaStepFailed | ReplicaUnreadable)
    if found.status == OVERLOADED and not had_it:
        return PutOff(getattr(error, "retry_after_s", 0.0), is_away=True)
    if found.status >= 500 and line.losses + 1 < MAX_LOSSES:
        return PutOff(UNAVAILABLE_S * 4**line.losses, is_loss=True)
    return refused(endpoint, line, found)


def refused(endpoint: LineEndpoint, line: LeasedLine, found: HttpError) -> EndedLine:
    return EndedLine(
        line=line,
        state="failed",
        request_id=line.request_id,
        status=found.status,
        answer=endpoint.encode(found, line.request_id),
        error_code=endpoint.code_of(found),
    )


def model_of(line: LeasedLine) -> str:
    """Return the model; empty if the line names none."""
    try:
        return peek(line.body).model
    except BadField:
        return ""
