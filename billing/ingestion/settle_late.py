"""Put right what could not be booked in full at first: usage without a price, and tokens that were
generated and never billed because the gateway vanished.

Knows no engine: it gets quantities.

How an orphan finds its attempt: recovery books every attempt that was left open, at its last
checkpoint, or with quantities of zero where there was none, so the event's row names its org, model
and prices. What is missing to the generated quantities is waste. An attempt that was voided, or
opened in the last instant before a power cut, has no row and never will: after ORPHAN_WAIT_S all of
it is waste of nobody in particular. Should the row come all the same (its spool lay on a machine
that was away for longer), that waste is reversed, and only what is missing is booked: whichever of
the two is booked last sees the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec
import sqlalchemy as sa
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
    COMPONENTS,
    INPUTS,
    Attempt,
    Component,
    Price,
    PriceSet,
    Quantities,
    UsageEvent,
    stop_waste_id,
)
from billing.ingestion.ingest import ingest
from billing.ledger.accounts import POST_LEGS, transfers_of
from billing.pricing.price_book import PriceBook
from billing.pricing.rating import price_of, rate
from billing.tables import priced_events, usage_events

log = logging.getLogger(__name__)

ORPHAN_WAIT_S = 60.0
"""Longer than a restart or an adoption takes to bring the attempt's own event to Postgres."""
ORPHAN_RETRY_S = 1.0
REPRICE_BATCH = 500
HOUSE = "house"


class WastedTokens(msgspec.Struct, frozen=True):
    """Tokens that the house pays for: generated and not billed. All zero when the bill was
    complete."""

    quantities: Quantities


async def settle_orphan(
    db: AsyncEngine,
    attempt_id: str,
    generated: Quantities,
    *,
    model: str,
    book: PriceBook,
    wait_s: float = ORPHAN_WAIT_S,
) -> WastedTokens:
    """Post an orphan's waste, waiting up to `wait_s` for the attempt's own event.

    Raises: what SQLAlchemy and asyncpg raise when Postgres is away; safe to repeat.
    """
    deadline = time.monotonic() + wait_s
    while True:
        posted = await post_waste(db, attempt_id, generated)
        if posted is not None:
            return posted
        if time.monotonic() >= deadline:
            log.warning("no event for attempt %s: all of it is waste", attempt_id)
            attempt = nobodys_attempt(attempt_id, model, book)
            posted = await _post(db, attempt, nobodys_waste_id(attempt_id), generated)
            # Who booked the event meanwhile saw no waste yet.
            return await _take_back(db, attempt_id, generated) or posted
        await asyncio.sleep(min(ORPHAN_RETRY_S, wait_s))


async def post_waste(
    db: AsyncEngine, attempt_id: str, generated: Quantities
) -> WastedTokens | None:
    """Book generated - billed of one attempt to the house. None: its event is not here yet.

    Idempotent: the waste has an id of its own, made from the attempt's.
    """
    async with db.connect() as connection:
        query = sa.select(priced_events).where(priced_events.c.id == attempt_id)
        row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        behind_stop = await connection.scalar(
            sa.select(usage_events.c.output).where(usage_events.c.id == stop_waste_id(attempt_id))
        )
    billed = Quantities(**{component: row._mapping[component] for component in COMPONENTS})
    missing = missing_of(attempt_id, generated, billed, behind_stop or 0)
    waste_id = str(uuid5(NAMESPACE_OID, f"{attempt_id}:waste"))
    return await _post(db, _attempt_of(row), waste_id, missing)


def missing_of(
    attempt_id: str, generated: Quantities, billed: Quantities, behind_stop: int
) -> Quantities:
    """Return what was generated and not billed. How the tokens on either side were split is the
    bill's to say: a cache contract may count fewer as read than the engine reused, and the engine
    does not tell reasoning from the rest. `behind_stop`: tokens of output that are booked as waste.
    """
    unread = generated.input_total - billed.input_total
    unwritten = generated.output_total - behind_stop - billed.output_total
    for name, difference in (("input", unread), ("output", unwritten)):
        if difference < 0:
            log.error("attempt %s: %d %s over-billed", attempt_id, -difference, name)
    missing: dict[Component, int] = {"output": max(0, unwritten)}
    for component in INPUTS if unread > 0 else ():
        missing[component] = max(0, getattr(generated, component) - getattr(billed, component))
    return Quantities(**missing)


async def settle_late(db: AsyncEngine, events: Sequence[UsageEvent]) -> None:
    """Put right what was booked as nobody's waste before these `events`, booked by now, came.

    Raises: as `settle_orphan`; safe to repeat.
    """
    latest = time.time() - ORPHAN_WAIT_S / 2  # clocks differ
    late = {nobodys_waste_id(it.id): it.id for it in events if it.attempt.admitted_at < latest}
    if not late:
        return
    query = sa.select(usage_events).where(usage_events.c.id.in_(list(late)))
    async with db.connect() as connection:
        rows = (await connection.execute(query)).all()
    for row in rows:
        generated = {component: row._mapping[component] for component in COMPONENTS}
        await _take_back(db, late[row.id], Quantities(**generated))


async def _take_back(
    db: AsyncEngine, attempt_id: str, generated: Quantities
) -> WastedTokens | None:
    """Reverse nobody's waste for what is the attempt's own. None: its event is not here."""
    wasted = await post_waste(db, attempt_id, generated)
    if wasted is not None:
        async with db.begin() as connection:
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(CORRECTION_LOCK)))
            await connection.execute(_REVERSE, {"event_id": nobodys_waste_id(attempt_id)})
    return wasted


def nobodys_waste_id(attempt_id: str) -> str:
    return str(uuid5(NAMESPACE_OID, f"{attempt_id}:nobody"))


def nobodys_attempt(attempt_id: str, model: str, book: PriceBook) -> Attempt:
    """The house's own attempt, for one that left no trace; the same wherever it is made: its
    moment is the one inside the UUIDv7 (RFC 9562, section 5.7)."""
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


async def _post(
    db: AsyncEngine, attempt: Attempt, waste_id: str, missing: Quantities
) -> WastedTokens:
    if missing.total:
        event = UsageEvent(
            attempt=msgspec.structs.replace(attempt, id=waste_id),
            quantities=missing,
            occurred_at=attempt.admitted_at,
            kind="waste",
            finish="recovered",
        )
        await ingest(db, [event])
    return WastedTokens(missing)


def _attempt_of(row: sa.Row[tuple[object, ...]]) -> Attempt:
    columns = row._mapping
    named = {
        name: columns[name]
        for name in (
            *("id", "request_id", "org", "project", "key"),
            *("model", "lane", "tier", "price_list"),
        )
    }
    return Attempt(
        **named,
        prices=msgspec.convert(columns["prices"], PriceSet),
        admitted_at=columns["admitted_at"].timestamp(),
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
    """Post suspended usage whose components all have a price by now, at the price of the time of
    its admission; returns how many events left suspense. The rest stays and may be tried again."""
    repriced, after = 0, ""
    while True:
        async with db.begin() as connection:
            # What is still in suspense is read and posted under this lock.
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
    """Events in suspense, by id, from the one behind `after`."""
    rows = await connection.execute(_SUSPENDED, {"after": after, "limit": REPRICE_BATCH})
    return [to_rated_event(row) for row in rows]


def _rate_suspended(event: RatedEvent, book: PriceBook) -> Rating | None:
    """Only what had no price at admission; what had one is booked already, as if all that was
    written had been kept: it is refunded once the event waits no more. None: not all of it has a
    price."""
    found = book.at(event.model, event.admitted_at.timestamp(), event.tier, event.price_list)
    chosen: dict[Component, Price | None] = {
        name: price_of(name, event.prices) or price_of(name, found) for name in event.used
    }
    prices = {name: price for name, price in chosen.items() if price is not None}
    rated = rate(event.quantities, prices)
    return None if rated.unpriced else to_rating(event, rated, prices)
