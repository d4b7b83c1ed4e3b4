"""Turns usage into billing events, here and nowhere else in the gateway.

Pure but for clock and ids: it books nothing, and knows neither spool nor limiter.
"""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET, UnsetType

from billing.events import (
    CALLS,
    INPUTS,
    Attempt,
    DisputedUsage,
    Finish,
    Kind,
    PriceSet,
    Quantities,
    UsageEvent,
    failover_waste_id,
    stop_waste_id,
)
from billing.pricing.price_book import PriceBook
from billing.pricing.rating import RatedUsage, rate
from engine.protocol import Usage
from gateway.generation_events import MeteredUsage
from gateway.ids import uuid7_text
from gateway.inference.calls import GenerationCall
from gateway.lanes import Priority
from gateway.limits.outcomes import Units
from gateway.principal import Principal

TOOL_CALL = Priority(lane="agentic")
ONE_CALL = Quantities(tool_call=1)
NOTHING_USED = MeteredUsage()


def new_attempt(call: GenerationCall, book: PriceBook) -> Attempt:
    """Make the record of a call's first attempt. Its moment and the prices of that moment are those
    of the admission: all attempts of the call keep them."""
    now, principal, priority = time.time(), call.principal, call.priority
    return Attempt(
        id=uuid7_text(),
        request_id=call.request_id,
        org=principal.org_id,
        project=principal.project_id,
        key=principal.key_id,
        model=call.request.model,
        lane=priority.lane,
        tier=priority.tier,
        price_list=principal.price_list,
        prices=book.at(call.request.model, now, priority.tier, principal.price_list),
        admitted_at=now,
        tags=call.tags or UNSET,
    )


def tool_call_prices(book: PriceBook, principal: Principal, model: str, now: float) -> PriceSet:
    return book.at(model, now, TOOL_CALL.tier, principal.price_list)


def new_tool_call(
    call_id: str, principal: Principal, model: str, book: PriceBook, part_of: str | None
) -> Attempt:
    """Make the attempt of a tool call, at the prices of now. `call_id`: a UUIDv7, made by the
    server for this call alone; it names its lease, too. `part_of`: the request in which a model
    calls, by whose id it is found on the bill."""
    now = time.time()
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
        prices=tool_call_prices(book, principal, model, now),
        admitted_at=now,
    )


def to_call_event(attempt: Attempt, finish: Finish) -> UsageEvent:
    return UsageEvent(attempt=attempt, quantities=ONE_CALL, occurred_at=time.time(), finish=finish)


def to_events(
    attempt: Attempt,
    usage: MeteredUsage,
    *,
    before: MeteredUsage = NOTHING_USED,
    replica: str,
    kind: Kind,
    finish: Finish,
    again: Finish = "failover",
) -> list[UsageEvent]:
    """Return what ends the attempt, and beside it what the house pays whoever pays that. `before`:
    the part of the usage that earlier attempts have booked. `replica`: the name of the one that was
    asked. `again`: why it computes what an earlier one computed."""
    event = UsageEvent(
        attempt=attempt,
        quantities=to_quantities_since(usage, before, attempt),
        occurred_at=time.time(),
        estimated=usage.estimated,
        finish=finish,
        kind=kind,
        disputed=to_disputed(usage, replica),
    )
    found = [event]
    if behind_stop := usage.wasted_output - before.wasted_output:
        wasted = Quantities(output=behind_stop)
        found.append(to_waste(event, stop_waste_id(event.id), wasted, finish))
    if usage.recomputed_input or usage.recomputed_cached:
        computed = Quantities(
            uncached_input=usage.recomputed_input, cache_read=usage.recomputed_cached
        )
        found.append(to_waste(event, failover_waste_id(event.id), computed, again))
    return found


def to_disputed(usage: MeteredUsage, replica: str) -> DisputedUsage | UnsetType:
    if not usage.is_disputed:
        return UNSET
    return DisputedUsage(replica, usage.disputed_input, usage.disputed_output)


def to_waste(
    event: UsageEvent, waste_id: str, quantities: Quantities, finish: Finish
) -> UsageEvent:
    """Make an event of what the house pays beside a bill."""
    return msgspec.structs.replace(
        event,
        attempt=msgspec.structs.replace(event.attempt, id=waste_id),
        quantities=quantities,
        kind="waste",
        finish=finish,
        disputed=UNSET,
    )


def rated(usage: MeteredUsage, attempt: Attempt) -> RatedUsage:
    """Rate usage as it is booked."""
    return rate(to_quantities(usage, attempt), attempt.prices)


def to_quantities(usage: MeteredUsage, attempt: Attempt) -> Quantities:
    """Count usage as it is priced; what comes from the queue of batches counts once more where that
    has a price."""
    return Quantities(
        uncached_input=usage.uncached_input,
        cache_read=usage.cache_read,
        cache_write_5m=usage.cache_write,
        cache_write_1h=usage.cache_write_1h,
        output=usage.output - usage.reasoning_output,
        reasoning_output=usage.reasoning_output,
        embedding_input=usage.embedding_input,
        batch_queue=int(attempt.lane == "batch" and "batch_queue" in attempt.prices),
    )


def to_quantities_since(usage: MeteredUsage, before: MeteredUsage, attempt: Attempt) -> Quantities:
    """Count as `to_quantities` what was used beyond `before`. Tokens of which only later ones tell
    that they were reasoning stay booked as what they seemed to be."""
    if before is NOTHING_USED:
        return to_quantities(usage, attempt)
    used, booked = to_quantities(usage, attempt), to_quantities(before, attempt)
    output = used.output_total - booked.output_total
    plain = min(output, max(0, used.output - booked.output))
    rest = {name: getattr(used, name) - getattr(booked, name) for name in (*INPUTS, *CALLS)}
    return Quantities(output=plain, reasoning_output=output - plain, **rest)


def to_units(usage: MeteredUsage) -> Units:
    """Count usage as limits count it."""
    return Units(input_tokens=usage.prompt_tokens, output_tokens=usage.output)


def from_engine(usage: Usage) -> Quantities:
    """An orphan's usage, straight from the engine."""
    cached = min(usage.input_tokens, usage.cached_tokens)
    return Quantities(
        uncached_input=usage.input_tokens - cached,
        cache_read=cached,
        output=usage.generated_tokens,
    )
