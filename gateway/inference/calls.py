"""Makes of a parsed body of any API surface a `Call` that can be started.

Knows no HTTP.
"""

from __future__ import annotations

import time

import msgspec

from billing.events import Tags
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.inference.generate import Call, GenerationServices
from gateway.lanes import priority_of
from gateway.principal import Principal
from gateway.telemetry import RequestMeter
from gateway.wire.surfaces import AnswerFormat

REQUEST_PREFIX = "req_"


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a request, and what is said beside its body."""

    request_id: str
    principal: Principal
    meter: RequestMeter
    """Begun when the request came."""
    deadline_s: float | None = None
    """Of the whole answer."""
    shows_cost: bool = False
    tags: Tags = {}
    is_batch: bool = False
    """A batch asks, nobody waits."""


def to_call(
    desk: GenerationServices,
    answer_format: AnswerFormat,
    context: RequestContext,
    generate: GenerateRequest,
) -> Call:
    turn = priority_of(
        context.principal,
        desk.deadlines,
        generate,
        deadline_s=context.deadline_s,
        sells_priority=desk.sells_priority,
        is_batch=context.is_batch,
    )
    heading = AnswerHeader(
        id=answer_format.id_prefix + context.request_id.removeprefix(REQUEST_PREFIX),
        created=int(time.time()),
        service_tier="default"
        if turn.tier == "batch" and not answer_format.knows_batches
        else turn.tier,
    )
    return Call(
        request_id=context.request_id,
        principal=context.principal,
        request=generate,
        turn=turn,
        encoder=answer_format.encoder(generate, heading),
        opening=None if answer_format.opening is None else answer_format.opening(generate, heading),
        meter=context.meter,
        timeout_s=context.deadline_s,
        shows_cost=context.shows_cost,
        tags=context.tags,
    )
