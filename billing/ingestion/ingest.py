"""Book usage events in Postgres, each exactly once. One statement writes event, transfers, balances
and rollups; alerts for spending follow in its transaction.

The event's id is the primary key, and only rows that the insert returned reach the ledger, so a
batch may come twice, or from two gateways at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import sqlalchemy as sa
from msgspec.structs import astuple
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.alerts.alerts import raise_for_spend, sum_up
from billing.alerts.disputed_usage import note_disputed
from billing.events import COMPONENTS, PriceSet, Quantities, UsageEvent
from billing.ledger.accounts import CREDIT, DEBIT, SUSPENSE, USES, charge, post_legs, roll_up
from billing.ledger.spend_totals import hold_booking
from billing.ledger.tags import book_tagged
from billing.money import Pico
from billing.pricing.rating import rate
from billing.tables import (
    AMOUNTS,
    TOTAL_PICO,
    TOTAL_QUANTITY,
    sums_of,
    to_microseconds,
    usage_conflicts,
    usage_events,
)

log = logging.getLogger(__name__)

MAX_BATCH = 2500
"""A batch updates balances and hours, and commits, once for all its events."""
PREPARED_AT_ONCE = 100
"""Rows of more events are made in a thread, off the event loop."""
_canonical = msgspec.msgpack.Encoder(order="deterministic")
_content = msgspec.json.Encoder(order="deterministic")

_KEPT = (
    *("id", "org", "project", "key", "model", "lane", "tier", "kind"),
    *(*COMPONENTS, *AMOUNTS, "suspended", "price_set", "band", "admitted_at"),
)
"""The columns that the rest of the statement reads."""
GIVEN = (
    *("id", "request_id", "org", "project", "key", "model", "lane", "tier", "kind", "finish"),
    *("price_list", "estimated", *COMPONENTS, *AMOUNTS),
    *("suspended", "price_set", "band", "digest", "admitted_at", "occurred_at"),
)
"""The columns of the type `usage_row`, in its order."""
_MOMENTS = ("admitted_at", "occurred_at")


def _column(name: str) -> str:
    """Return SQL of a column of an incoming row. Money comes as text, since it may exceed 64 bits;
    moments as microseconds, which takes a tenth of the time of a timestamp."""
    if name in AMOUNTS:
        return f"coalesce(CAST({name} AS numeric), 0)"
    if name in _MOMENTS:
        return f"TIMESTAMPTZ 'epoch' + {name} * INTERVAL '1 microsecond'"
    return name


_INGEST = sa.text(f"""
    WITH drafted AS MATERIALIZED (
        SELECT org_id, max(period_end) AS drafted_until FROM invoices
        WHERE org_id = ANY(CAST(:orgs AS text[])) GROUP BY org_id
    ),
    fresh AS (
        INSERT INTO usage_events ({", ".join(GIVEN)}, late, seq, ingested_at)
        SELECT {", ".join(map(_column, GIVEN))},
            coalesce({_column("admitted_at")} < drafted_until, false),
            (SELECT nextval('posting_seq')), (SELECT clock_timestamp())
        FROM unnest(CAST(:batch AS usage_row[])) LEFT JOIN drafted ON org_id = org ORDER BY id
        ON CONFLICT (id) DO NOTHING RETURNING {", ".join(_KEPT)}, late
    ),
    used AS (SELECT * FROM fresh WHERE {TOTAL_QUANTITY} > 0),
    legs AS (
        SELECT id, id AS event_id, {DEBIT} AS debit, {CREDIT} AS credit,
            {TOTAL_PICO} AS amount_pico, kind, NULL AS corrects, admitted_at
        FROM used WHERE NOT suspended OR {TOTAL_PICO} > 0
        UNION ALL
        SELECT id || '.suspense', id, {DEBIT}, '{SUSPENSE}', 0, 'suspense', NULL, admitted_at
        FROM used WHERE suspended
    ),
    hours AS (
        SELECT org, date_trunc('hour', admitted_at, 'UTC') AS admitted_at, project, key, model,
            tier, CASE lane WHEN 'batch' THEN lane ELSE '' END AS lane, kind, price_set, band, late,
            {sums_of((*COMPONENTS, *AMOUNTS))}, {USES}, count(*) AS num_requests,
            count(*) FILTER (WHERE embedding_input > 0) AS num_embeddings
        FROM used WHERE kind = 'usage' GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
    ),
    {post_legs(roll_up("hours"), charge("hours"))},
    priced AS (
        INSERT INTO price_sets
        SELECT id, CAST(prices AS jsonb)
        FROM unnest(CAST(:price_sets AS uuid[]), CAST(:prices AS text[])) AS s(id, prices)
        ORDER BY id ON CONFLICT DO NOTHING
    )
    SELECT count(*) AS num_fresh,
        CASE WHEN count(*) < :num_given THEN coalesce(array_agg(id), ARRAY[]::text[])
        END AS fresh,
        (SELECT array_agg(DISTINCT org_id) FROM spend_caps
            WHERE org_id = ANY(CAST(:orgs AS text[]))) AS capped
    FROM fresh
""")


class IngestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a batch; the three counts add up to its length."""

    inserted: int
    duplicates: int
    """Events that were booked before with the same content, which is a success."""
    conflicts: tuple[str, ...]
    """Ids of events that were booked before with other content; kept in usage_conflicts."""


NOTHING = IngestResult(inserted=0, duplicates=0, conflicts=())


class _PriceSet(NamedTuple):
    id: UUID
    bands: set[int]
    """The least input of each size band of any component."""

    def band_of(self, quantities: Quantities) -> int:
        """Return the largest size band that a request reaches."""
        total = quantities.input_total
        return max((least for least in self.bands if least <= total), default=0)


class _BatchRows(msgspec.Struct):
    """The rows that a batch inserts."""

    rows: list[tuple[Any, ...]] = []
    billed: list[tuple[UsageEvent, Pico]] = []
    """The billed events and their amounts, in the order of the rows."""
    price_sets: dict[bytes, _PriceSet] = {}
    """Price sets by their content as JSON."""
    tagged: list[UsageEvent] = []
    """The events with tags."""
    disputed: list[UsageEvent] = []
    """The events of which an upstream claimed more."""


async def ingest(db: AsyncEngine, events: Sequence[UsageEvent]) -> IngestResult:
    """Book `events` (at most MAX_BATCH) in one transaction.

    Raises: ValueError, OverflowError, sqlalchemy.exc.DBAPIError for content that no table can hold;
    connection errors of SQLAlchemy and asyncpg. Nothing is booked then.
    """
    if not events:
        return NOTHING
    batch = await _prepared(events)
    async with db.begin() as connection:
        return await _book(connection, batch, events)


async def ingest_within(connection: AsyncConnection, events: Sequence[UsageEvent]) -> IngestResult:
    """Book `events` in the caller's transaction."""
    return await _book(connection, await _prepared(events), events) if events else NOTHING


async def _prepared(events: Sequence[UsageEvent]) -> _BatchRows:
    assert len(events) <= MAX_BATCH
    if len(events) > PREPARED_AT_ONCE:
        return await asyncio.to_thread(_prepare, events)
    return _prepare(events)


async def _book(
    connection: AsyncConnection, batch: _BatchRows, events: Sequence[UsageEvent]
) -> IngestResult:
    named = {
        "batch": batch.rows,
        "num_given": len(batch.rows),
        "orgs": list({event.attempt.org for event, _ in batch.billed}),
        "price_sets": [priced.id for priced in batch.price_sets.values()],
        "prices": [content.decode() for content in batch.price_sets],
    }
    await hold_booking(connection)
    done = (await connection.execute(_INGEST, named)).one()
    fresh = None if done.fresh is None else {*done.fresh}  # None: all of them
    tagged = [each for each in batch.tagged if fresh is None or each.id in fresh]
    tags = await book_tagged(connection, tagged)
    await note_disputed(
        connection, [each for each in batch.disputed if fresh is None or each.id in fresh]
    )
    if done.capped:
        booked = (
            (event.attempt, amount_pico)
            for event, amount_pico in batch.billed
            if event.kind == "usage"
            and event.attempt.org in done.capped
            and (fresh is None or event.id in fresh)
        )
        await raise_for_spend(connection, sum_up(booked), tags)
    complete = done.num_fresh == len(events)
    conflicts = () if complete else await _keep_conflicts(connection, events)
    if conflicts:
        log.error("usage events came again with other content: %s", ", ".join(conflicts))
    return IngestResult(
        inserted=done.num_fresh,
        duplicates=len(events) - done.num_fresh - len(conflicts),
        conflicts=conflicts,
    )


def digest(event: UsageEvent) -> bytes:
    """Return the SHA-256 of an event's content."""
    return hashlib.sha256(_canonical.encode(event)).digest()


def _prepare(events: Iterable[UsageEvent]) -> _BatchRows:
    """Make the rows of a batch; a repeated id is left out."""
    batch, known = _BatchRows(), set[str]()
    for event in events:
        attempt = event.attempt
        if attempt.id in known:
            continue
        known.add(attempt.id)
        content = _content.encode(attempt.prices)
        priced = batch.price_sets.get(content)
        if priced is None:
            priced = batch.price_sets[content] = _to_price_set(content, attempt.prices)
        amount_pico, row = _row(event, priced)
        batch.rows.append(row)
        batch.billed.append((event, amount_pico))
        if attempt.tags:
            batch.tagged.append(event)
        if event.disputed:
            batch.disputed.append(event)
    return batch


def _to_price_set(content: bytes, prices: PriceSet) -> _PriceSet:
    least = {band.min_total_input for price in prices.values() for band in price.bands}
    return _PriceSet(UUID(bytes=hashlib.sha256(content).digest()[:16]), least)


def _row(event: UsageEvent, priced: _PriceSet) -> tuple[Pico, tuple[Any, ...]]:
    """Return the amount of an event, and its columns (GIVEN)."""
    attempt, quantities = event.attempt, event.quantities
    rated = rate(quantities, attempt.prices)
    amounts = dict.fromkeys(COMPONENTS)
    for line in rated.lines:
        amounts[line.component] = str(line.amount_pico)
    return rated.amount_pico, (
        attempt.id,
        attempt.request_id,
        attempt.org,
        attempt.project,
        attempt.key,
        attempt.model,
        attempt.lane,
        attempt.tier,
        event.kind,
        event.finish,
        attempt.price_list,
        event.estimated,
        *astuple(quantities),
        *amounts.values(),
        bool(rated.unpriced),
        priced.id,
        priced.band_of(quantities) if priced.bands else 0,
        digest(event),
        to_microseconds(attempt.admitted_at),
        to_microseconds(event.occurred_at),
    )


async def _keep_conflicts(
    connection: AsyncConnection, events: Sequence[UsageEvent]
) -> tuple[str, ...]:
    """Store events that differ from the booked ones, and return their ids. The rows are read after
    the insert, which waits for concurrent batches."""
    own, ids = usage_events.c, [event.id for event in events]
    query = sa.select(own.id, own.digest).where(own.id == sa.any_(sa.literal(ids, ARRAY(sa.Text))))
    booked = {row.id: row.digest for row in await connection.execute(query)}
    others = [event for event in events if booked[event.id] != digest(event)]
    if others:
        rows = [
            {"event_id": event.id, "digest": digest(event), "event": msgspec.to_builtins(event)}
            for event in others
        ]
        await connection.execute(insert(usage_conflicts).on_conflict_do_nothing(), rows)
    return tuple(event.id for event in others)
