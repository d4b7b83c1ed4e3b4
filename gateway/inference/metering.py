"""Turns usage into billing events, here and nowhere else in the gateway.

Pure but for clock and ids: it books nothing, and knows neither spool nor limiter.
"""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET

from billing.events import (
    Attempt,
    Finish,
    Kind,
    PriceSet,
    Quantities,
    Tags,
    UsageEvent,
    stop_waste_id,
)
from billing.pricing.price_book import PriceBook
from billing.pricing.rating import RatedUsage, rate
from engine.protocol import Usage
from gateway.generation_events import MeteredUsage
from gateway.ids import uuid7_text
from gateway.lanes import Priority
from gateway.limits.outcomes import Units
from gateway.principal import Principal

TOOL_CALL = Priority(lane="agentic")
ONE_CALL = Quantities(tool_call=1)


class Terms(msgspec.Struct, frozen=True):
    """The terms that are chosen at admission, and never again: the moment, and the prices of that
    moment."""

    admitted_at: float
    """Unix seconds."""
    prices: PriceSet
    batch_queue: int = 0
    """1 where it comes from the queue of batches and that has a price."""

    @classmethod
    def of_now(cls, book: PriceBook, principal: Principal, model: str, turn: Priority) -> Terms:
        now = time.time()
        prices = book.at(model, now, turn.tier, principal.price_list)
        return cls(now, prices, int(turn.lane == "batch" and "batch_queue" in prices))

    def rated(self, usage: MeteredUsage) -> RatedUsage:
        """Rate usage as it is booked."""
        return rate(to_quantities(usage, self), self.prices)


def new_attempt(
    request_id: str, principal: Principal, model: str, turn: Priority, tags: Tags, terms: Terms
) -> Attempt:
    return Attempt(
        id=uuid7_text(),
        request_id=request_id,
        org=principal.org_id,
        project=principal.project_id,
        key=principal.key_id,
        model=model,
        lane=turn.lane,
        tier=turn.tier,
        price_list=principal.price_list,
        prices=terms.prices,
        admitted_at=terms.admitted_at,
        tags=tags or UNSET,
    )


def new_tool_call(
    call_id: str, principal: Principal, model: str, terms: Terms, part_of: str | None
) -> Attempt:
    """Make the attempt of a tool call. `call_id`: a UUIDv7, made by the server for this call alone;
    it names its lease, too. `part_of`: the request in which a model calls, by whose id it is found
    on the bill."""
    return Attempt(
        id=call_id,
        request_id=part_of or call_id,
        org=principal.org_id,
        project=principal.project_id,
        key=principal.key_id,
        model=model,
        lane=TOOL_CALL.lane,
        tier=TOOL_CALL.tier,
        price_list=principal.price_list,
        prices=terms.prices,
        admitted_at=terms.admitted_at,
    )


def to_call_event(attempt: Attempt, finish: Finish) -> UsageEvent:
    return UsageEvent(attempt=attempt, quantities=ONE_CALL, occurred_at=time.time(), finish=finish)


def to_events(
    attempt: Attempt, usage: MeteredUsage, terms: Terms, *, kind: Kind, finish: Finish
) -> list[UsageEvent]:
    """Return what ends the attempt, and beside it what the house pays whoever pays that."""
    event = UsageEvent(
        attempt=attempt,
        quantities=to_quantities(usage, terms),
        occurred_at=time.time(),
        estimated=usage.estimated,
        finish=finish,
        kind=kind,
    )
    return [event, to_waste(event, usage.wasted_output)] if usage.wasted_output else [event]


def to_waste(event: UsageEvent, tokens: int) -> UsageEvent:
    """Make an event of tokens behind a stop string: the house pays."""
    return msgspec.structs.replace(
        event,
        attempt=msgspec.structs.replace(event.attempt, id=stop_waste_id(event.id)),
        quantities=Quantities(output=tokens),
        kind="waste",
    )


def to_quantities(usage: MeteredUsage, terms: Terms) -> Quantities:
    return Quantities(
        uncached_input=usage.uncached_input,
        cache_read=usage.cache_read,
        cache_write_5m=usage.cache_write,
        cache_write_1h=usage.cache_write_1h,
        output=usage.output - usage.reasoning_output,
        reasoning_output=usage.reasoning_output,
        embedding_input=usage.embedding_input,
        batch_queue=terms.batch_queue,
    )


def to_units(usage: MeteredUsage) -> Units:
    """Count usage as limits count it."""
    return Units(input_tokens=usage.prompt_tokens, output_tokens=usage.output)


def from_engine(usage: Usage) -> Quantities:
    """An orphan's usage, straight from the engine."""
    return Quantities(
        uncached_input=usage.prompt_tokens - usage.cached_tokens,
        cache_read=usage.cached_tokens,
        output=usage.generated_tokens,
    )
