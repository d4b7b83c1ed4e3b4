"""Usage events into Postgres, each exactly once, in one statement: event, transfers, balances and
hourly rollup stand together or not at all; and in its transaction the alerts of what was spent.

The event's id is the primary key, and only rows that the insert returned reach the ledger: a batch
may come twice, or from two places at once. Above: `worker`, `reconcile`. Below: `ledger`, `rating`,
`alerts`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.alerts import raise_for_spend
from billing.events import COMPONENTS, UsageEvent
from billing.ledger import CREDIT, DEBIT, POST_LEGS, SUSPENSE, roll_up
from billing.rating import rate
from billing.spent import hold_booking
from billing.tables import AMOUNTS, to_moment, usage_conflicts, usage_events

log = logging.getLogger(__name__)

MAX_BATCH = 1000
_canonical = msgspec.msgpack.Encoder(order="deterministic")

_ARRAYS = {
    **dict.fromkeys(
        ("id", "request_id", "org", "project", "key", "model", "lane", "tier", "kind", "finish"),
        "text[]",
    ),
    "estimated": "boolean[]",
    **dict.fromkeys(COMPONENTS, "bigint[]"),
    **dict.fromkeys(AMOUNTS, "numeric[]"),
    "suspended": "boolean[]",
    "prices": "jsonb[]",
    "digest": "bytea[]",
    "admitted_at": "timestamptz[]",
    "occurred_at": "timestamptz[]",
}
_COLUMNS = ", ".join(_ARRAYS)
_TOKENS = " + ".join(COMPONENTS)
_AMOUNT = " + ".join(AMOUNTS)

_INGEST = sa.text(f"""
    WITH incoming AS (
        SELECT * FROM unnest({", ".join(f"CAST(:{n} AS {t})" for n, t in _ARRAYS.items())})
            AS t({_COLUMNS})
    ),
    fresh AS (
        INSERT INTO usage_events ({_COLUMNS}, ingested_at)
        SELECT {_COLUMNS}, clock_timestamp() FROM incoming ORDER BY id
        ON CONFLICT (id) DO NOTHING RETURNING *
    ),
    used AS (SELECT * FROM fresh WHERE {_TOKENS} > 0),
    legs AS (
        SELECT id, id AS event_id, {DEBIT} AS debit, {CREDIT} AS credit,
            {_AMOUNT} AS amount_pico, kind, NULL AS corrects, admitted_at
        FROM used WHERE NOT suspended OR {_AMOUNT} > 0
        UNION ALL
        SELECT id || '.suspense', id, {DEBIT}, '{SUSPENSE}', 0, 'suspense', NULL, admitted_at
        FROM used WHERE suspended
    ),
    {POST_LEGS},
    {roll_up("used", "count(*)")}
    SELECT id FROM fresh
""")


class Ingested(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a batch; the three add up to its length."""

    inserted: int
    duplicates: int
    """There already, the same: that is success."""
    conflicts: tuple[str, ...]
    """Ids that came with other content than what stands; kept in usage_conflicts."""


async def ingest(db: AsyncEngine, events: Sequence[UsageEvent]) -> Ingested:
    """Book `events` (at most MAX_BATCH) in one transaction.

    Raises: ValueError, OverflowError, sqlalchemy.exc.DBAPIError for content that no table holds;
    connection errors of SQLAlchemy and asyncpg. Nothing is booked then.
    """
    assert len(events) <= MAX_BATCH
    if not events:
        return Ingested(inserted=0, duplicates=0, conflicts=())
    rows = [_row(event) for event in events]
    columns = {name: [row[name] for row in rows] for name in _ARRAYS}
    async with db.begin() as connection:
        await hold_booking(connection)
        fresh = list(await connection.scalars(_INGEST, columns))
        if fresh:
            await raise_for_spend(connection, fresh)
        inserted = len(fresh)
        complete = inserted == len(events)
        conflicts = () if complete else await _keep_conflicts(connection, events)
    if conflicts:
        log.error("usage events came again with other content: %s", ", ".join(conflicts))
    return Ingested(
        inserted=inserted,
        duplicates=len(events) - inserted - len(conflicts),
        conflicts=conflicts,
    )


def digest(event: UsageEvent) -> bytes:
    """SHA-256 over the whole content."""
    return hashlib.sha256(_canonical.encode(event)).digest()


def _row(event: UsageEvent) -> dict[str, Any]:
    """One event as the columns of _ARRAYS, rated."""
    attempt, quantities = event.attempt, event.quantities
    rated = rate(quantities, attempt.prices)
    row: dict[str, Any] = {name: getattr(quantities, name) for name in COMPONENTS}
    for component, amount in zip(COMPONENTS, AMOUNTS, strict=True):
        row[amount] = rated.amount_of(component)
    for name in ("id", "request_id", "org", "project", "key", "model", "lane", "tier"):
        row[name] = getattr(attempt, name)
    row |= {
        "kind": event.kind,
        "finish": event.finish,
        "estimated": event.estimated,
        "suspended": bool(rated.unpriced),
        "prices": msgspec.json.encode(attempt.prices).decode(),
        "digest": digest(event),
        "admitted_at": to_moment(attempt.admitted_at),
        "occurred_at": to_moment(event.occurred_at),
    }
    return row


async def _keep_conflicts(
    connection: AsyncConnection, events: Sequence[UsageEvent]
) -> tuple[str, ...]:
    """Compare what was not inserted with what stands; the rows are read after the insert, so that
    those of a concurrent batch are seen."""
    wanted = usage_events.c.id.in_([event.id for event in events])
    query = sa.select(usage_events.c.id, usage_events.c.digest).where(wanted)
    standing = {row.id: row.digest for row in await connection.execute(query)}
    others = [event for event in events if standing[event.id] != digest(event)]
    if others:
        rows = [
            {"event_id": event.id, "digest": digest(event), "event": msgspec.to_builtins(event)}
            for event in others
        ]
        await connection.execute(insert(usage_conflicts).on_conflict_do_nothing(), rows)
    return tuple(event.id for event in others)
