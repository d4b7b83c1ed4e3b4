"""From a body of some vendor's surface to a `Call` that can be started.

Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from billing.events import Tags
from gateway.generate_request import GenerateRequest, Heading
from gateway.generation_events import MeteredUsage
from gateway.inference.generate import Call, Desk, Encoder
from gateway.lanes import turn_of
from gateway.principal import Principal
from gateway.telemetry import RequestMeter
from gateway.wire.openai.from_chat import ModelKind

REQUEST_PREFIX = "req_"
Opening = Callable[[MeteredUsage], bytes]
"""What an answer begins with, once it is known what its prompt was."""


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """One vendor's way to answer."""

    id_prefix: str
    """Of what an answer is called: `chatcmpl-`."""
    encoder: Callable[[GenerateRequest, Heading], Encoder]
    opening: Callable[[GenerateRequest, Heading], Opening | None] | None = None
    """What a stream begins with that says what its prompt was; None: nothing."""
    knows_batches: bool = False
    """A batch is a tier that its answers name."""


class Surface(Voice, frozen=True, kw_only=True):
    """And to ask for tokens, where a body alone says what is asked."""

    read: Callable[[bytes, ModelKind], GenerateRequest]
    """Raises BadField."""


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
