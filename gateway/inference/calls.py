"""From a body of some vendor's surface to a `Call` that can be started.

Knows no HTTP.
"""

from __future__ import annotations

import time

import msgspec

from billing.events import Tags
from gateway.generate_request import GenerateRequest, Heading
from gateway.inference.generate import Call, Desk
from gateway.lanes import turn_of
from gateway.principal import Principal
from gateway.telemetry import RequestMeter
from gateway.wire.surfaces import Voice

REQUEST_PREFIX = "req_"


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and what is said beside the body."""

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


def to_call(desk: Desk, voice: Voice, asker: Asker, generate: GenerateRequest) -> Call:
    turn = turn_of(
        asker.principal,
        desk.deadlines,
        generate,
        deadline_s=asker.deadline_s,
        sells_priority=desk.sells_priority,
        is_batch=asker.is_batch,
    )
    heading = Heading(
        id=voice.id_prefix + asker.request_id.removeprefix(REQUEST_PREFIX),
        created=int(time.time()),
        service_tier="default" if turn.tier == "batch" and not voice.knows_batches else turn.tier,
    )
    return Call(
        request_id=asker.request_id,
        principal=asker.principal,
        request=generate,
        turn=turn,
        encoder=voice.encoder(generate, heading),
        opening=None if voice.opening is None else voice.opening(generate, heading),
        meter=asker.meter,
        timeout_s=asker.deadline_s,
        shows_cost=asker.shows_cost,
        tags=asker.tags,
    )
