"""Complete what could not be booked in full at first: usage without a price, and tokens that were
generated but not billed because the gateway died (orphans).

Recovery books every attempt that was left open, at its last checkpoint or with zero quantities, so
the event names its org, model and prices. The difference to the generated quantities is waste. An
attempt that was voided, or opened just before a power failure, never has an event: after
ORPHAN_WAIT_S all of it is waste of the house. If the event comes after that (its spool was on a
machine that was away for longer), that waste is reversed and only the difference is booked:
whichever of the two is booked last sees the other.

Knows no engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec
import sqlalchemy as sa
from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.corrections.event_ratings import (
    CORRECTION_LOCK,
    UNKEPT,
    Announce,
    RatedEvent,
    Rating,
    announce_to_nobody,
    hold_corrections,
    post_ratings,
    select_rated_events,
    to_rated_event,
    to_rating,
)
from billing.events import (
    INPUTS,
    Attempt,
    Component,
    Price,
    PriceSet,
    Quantities,
    UsageEvent,
    failover_waste_id,
    stop_waste_id,
)
from billing.ingestion.ingest import ingest
from billing.ledger.accounts import POST_LEGS, transfers_of
from billing.pricing.price_book import PriceBook
from billing.pricing.rating import price_of, rate
from billing.tables import priced_events, read_quantities, read_struct, usage_events

log = logging.getLogger(__name__)

ORPHAN_WAIT_S = 60.0
"""A restart or an adoption takes less to book the attempt's own event."""
ORPHAN_RETRY_S = 1.0
REPRICE_BATCH = 500
HOUSE = "house"


async def settle_orphan(
    db: AsyncEngine,
    attempt_id: str,
    generated: Quantities,
    *,
    model: str,
    book: PriceBook,
    wait_s: float = ORPHAN_WAIT_S,
) -> Quantities:
    """Book an orphan's waste, after waiting up to `wait_s` for the attempt's own event. Return the
    waste, which is zero if the bill was complete. Idempotent.

    Raises: SQLAlchemyError and asyncpg's errors when Postgres is away.
    """
    deadline = time.monotonic() + wait_s
    while True:
        wasted = await post_waste(db, attempt_id, generated)
        if wasted is not None:
            return wasted
        if time.monotonic() >= deadline:
            log.warning("no event for attempt %s: all of it is waste", attempt_id)
            attempt = house_attempt(attempt_id, model, book)
            await _post(db, attempt, house_waste_id(attempt_id), generated)
            # An event that was booked meanwhile did not see this waste.
            return await _take_back(db, attempt_id, generated) or generated
        await asyncio.sleep(min(ORPHAN_RETRY_S, wait_s))


async def post_waste(db: AsyncEngine, attempt_id: str, generated: Quantities) -> Quantities | None:
    """Book the generated and not billed tokens of an attempt to the house, and return them. None:
    its event is not booked yet. Idempotent: the id of the waste is made from the attempt's."""
    async with db.connect() as connection:
        query = sa.select(priced_events).where(priced_events.c.id == attempt_id)
        row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        ids = [stop_waste_id(attempt_id), failover_waste_id(attempt_id)]
        beside = sa.select(usage_events).where(usage_events.c.id.in_(ids))
        wasted = [read_quantities(each) for each in await connection.execute(beside)]
    missing = missing_of(attempt_id, generated, [read_quantities(row), *wasted])
    await _post(db, _attempt_of(row), waste_id(attempt_id), missing)
    return missing


def missing_of(attempt_id: str, generated: Quantities, booked: Sequence[Quantities]) -> Quantities:
    """Return what was generated and not booked. The totals of input and output are compared, since
    a cache contract may bill fewer tokens as read than the engine reused, and the engine does not
    count reasoning. `booked`: the bill, and the waste that the gateway booked beside it."""
    unread = generated.input_total - sum(each.input_total for each in booked)
    unwritten = generated.output_total - sum(each.output_total for each in booked)
    for name, difference in (("input", unread), ("output", unwritten)):
        if difference < 0:
            log.error("attempt %s: %d %s over-billed", attempt_id, -difference, name)
    missing: dict[Component, int] = {"output": max(0, unwritten)}
    for component in INPUTS if unread > 0 else ():
        known = sum(getattr(each, component) for each in booked)
        missing[component] = max(0, getattr(generated, component) - known)
    return Quantities(**missing)


async def settle_late(db: AsyncEngine, events: Sequence[UsageEvent]) -> None:
    """Reverse waste of the house that belongs to these events, which were booked later. Idempotent.

    Raises: as `settle_orphan`.
    """
    latest = time.time() - ORPHAN_WAIT_S / 2  # clocks differ
    late = {house_waste_id(it.id): it.id for it in events if it.attempt.admitted_at < latest}
    if not late:
        return
    query = sa.select(usage_events).where(usage_events.c.id.in_(list(late)))
    async with db.connect() as connection:
        rows = (await connection.execute(query)).all()
    for row in rows:
        await _take_back(db, late[row.id], read_quantities(row))


async def _take_back(db: AsyncEngine, attempt_id: str, generated: Quantities) -> Quantities | None:
    """Book the attempt's own waste and reverse that of the house. None: its event is not booked."""
    wasted = await post_waste(db, attempt_id, generated)
    if wasted is not None:
        async with db.begin() as connection:
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(CORRECTION_LOCK)))
            await connection.execute(_REVERSE, {"event_id": house_waste_id(attempt_id)})
    return wasted


def waste_id(attempt_id: str) -> str:
    """Return the id of the event for the waste of an attempt whose own event is booked."""
    return str(uuid5(NAMESPACE_OID, f"{attempt_id}:waste"))


def house_waste_id(attempt_id: str) -> str:
    """Return the id of the event for the waste of an attempt without an event."""
    return str(uuid5(NAMESPACE_OID, f"{attempt_id}:nobody"))


def house_attempt(attempt_id: str, model: str, book: PriceBook) -> Attempt:
    """Make an attempt of the house for one without an event. Each gateway makes the same one: its
    time is that in the UUIDv7 (RFC 9562, section 5.7)."""
    admitted_at = (UUID(attempt_id).int >> 80) / 1000
    return Attempt(
        id=attempt_id,
        request_id="",
        org=HOUSE,
        project=HOUSE,
        key=HOUSE,
        model=model,
        prices=book.at(model, admitted_at),
        admitted_at=admitted_at,
    )


async def _post(db: AsyncEngine, attempt: Attempt, event_id: str, missing: Quantities) -> None:
    if missing.total:
        event = UsageEvent(
            attempt=msgspec.structs.replace(attempt, id=event_id),
            quantities=missing,
            occurred_at=attempt.admitted_at,
            kind="waste",
            finish="recovered",
        )
        await ingest(db, [event])


def _attempt_of(row: sa.Row[Any]) -> Attempt:
    return read_struct(
        Attempt,
        row,
        prices=msgspec.convert(row.prices, PriceSet),
        admitted_at=row.admitted_at.timestamp(),
        tags=UNSET,
    )


_REVERSE = sa.text(f"""
    WITH legs AS (
        SELECT t.id || '.reversed' AS id, t.event_id, t.credit AS debit, t.debit AS credit,
            t.amount_pico, 'reversed' AS kind, t.id AS corrects, t.admitted_at
        FROM transfers t
        WHERE {transfers_of(":event_id")} AND t.kind <> 'reversed'
            AND NOT EXISTS (SELECT FROM transfers c WHERE c.corrects = t.id)
    ),
    {POST_LEGS}
    SELECT count(*) FROM legs
""")

_SUSPENDED = sa.text(f"""
    {select_rated_events(UNKEPT)} JOIN transfers s ON s.event_id = u.id
    WHERE s.kind = 'suspense' AND u.id > :after
        AND NOT EXISTS (SELECT FROM transfers c WHERE c.corrects = s.id)
    ORDER BY u.id LIMIT :limit
""")


async def reprice_suspense(
    db: AsyncEngine, book: PriceBook, announce: Announce = announce_to_nobody
) -> int:
    """Post suspended usage whose components all have a price now, at the prices of its admission.
    Return the number of events that left suspense; the others stay there."""
    repriced, after = 0, ""
    while True:
        async with db.begin() as connection:
            # The events are read and posted under one lock.
            await hold_corrections(connection)
            waiting = await _suspended(connection, after)
            rated = (_rate_suspended(each, book) for each in waiting)
            priced = [each for each in rated if each is not None]
            await post_ratings(connection, priced, reverses=False, announce=announce)
        repriced += len(priced)
        if len(waiting) < REPRICE_BATCH:
            return repriced
        after = waiting[-1].id


async def _suspended(connection: AsyncConnection, after: str) -> list[RatedEvent]:
    """Return the next events in suspense by id, behind `after`."""
    rows = await connection.execute(_SUSPENDED, {"after": after, "limit": REPRICE_BATCH})
    return [to_rated_event(row) for row in rows]


def _rate_suspended(event: RatedEvent, book: PriceBook) -> Rating | None:
    """Price the components that had no price at admission; the others are booked, as if all cache
    writes had been kept, and are refunded when the event has left suspense. None: a component has
    no price."""
    found = book.at(event.model, event.admitted_at.timestamp(), event.tier, event.price_list)
    chosen: dict[Component, Price | None] = {
        name: price_of(name, event.prices) or price_of(name, found) for name in event.used
    }
    prices = {name: price for name, price in chosen.items() if price is not None}
    rated = rate(event.quantities, prices)
    return None if rated.unpriced else to_rating(event, rated, prices)
