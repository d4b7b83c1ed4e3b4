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
from msgspec.structs import asdict
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.alerts import raise_for_spend, sum_up
from billing.events import COMPONENTS, UsageEvent
from billing.ledger import CREDIT, DEBIT, POST_LEGS, SUSPENSE, roll_up
from billing.rating import Rated, rate
from billing.spent import hold_booking
from billing.tables import AMOUNTS, amount_column, to_moment, usage_conflicts, usage_events

log = logging.getLogger(__name__)

MAX_BATCH = 1000
_canonical = msgspec.msgpack.Encoder(order="deterministic")

_KEPT = {
    **dict.fromkeys(("id", "org", "project", "key", "model", "lane", "tier", "kind"), "text"),
    **dict.fromkeys(COMPONENTS, "bigint"),
    **dict.fromkeys(AMOUNTS, "numeric"),
    "suspended": "boolean",
    "admitted_at": "timestamptz",
}
"""What is booked of a row."""
_STORED = {
    **_KEPT,
    **dict.fromkeys(("request_id", "price_list", "finish"), "text"),
    "estimated": "boolean",
    "prices": "jsonb",
    "digest": "bytea",
    "occurred_at": "timestamptz",
}
_COLUMNS = ", ".join(_STORED)
_COUNTED = {*COMPONENTS, *AMOUNTS}
_COMPLETED = ", ".join(f"coalesce({name}, 0)" if name in _COUNTED else name for name in _STORED)
_TOKENS = " + ".join(COMPONENTS)
_AMOUNT = " + ".join(AMOUNTS)

# The batch is one JSON text: encoding and binding twenty arrays took the shipper's process twice
# the processor time that parsing it takes Postgres.
_INGEST = sa.text(f"""
    WITH incoming AS (
        SELECT * FROM json_to_recordset(CAST(:batch AS json))
            AS t({", ".join(f"{name} {kind}" for name, kind in _STORED.items())})
    ),
    fresh AS (
        INSERT INTO usage_events ({_COLUMNS}, ingested_at)
        SELECT {_COMPLETED}, clock_timestamp() FROM incoming ORDER BY id
        ON CONFLICT (id) DO NOTHING RETURNING {", ".join(_KEPT)}
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
    rated = {it.id: (it, rate(it.quantities, it.attempt.prices)) for it in reversed(events)}
    batch = msgspec.json.encode([_row(*each) for each in rated.values()]).decode()
    async with db.begin() as connection:
        await hold_booking(connection)
        fresh = list(await connection.scalars(_INGEST, {"batch": batch}))
        booked = (rated[each] for each in fresh)
        await raise_for_spend(
            connection,
            sum_up((it.attempt, its.amount_pico) for it, its in booked if it.kind == "usage"),
        )
        complete = len(fresh) == len(events)
        conflicts = () if complete else await _keep_conflicts(connection, events)
    if conflicts:
        log.error("usage events came again with other content: %s", ", ".join(conflicts))
    return Ingested(
        inserted=len(fresh),
        duplicates=len(events) - len(fresh) - len(conflicts),
        conflicts=conflicts,
    )


def digest(event: UsageEvent) -> bytes:
    """SHA-256 over the whole content."""
    return hashlib.sha256(_canonical.encode(event)).digest()


def _row(event: UsageEvent, rated: Rated) -> dict[str, Any]:
    """One event as the columns of _STORED, in JSON. Money is text there: it may exceed 64 bits.
    What was not used is not said."""
    attempt, quantities = event.attempt, event.quantities
    row: dict[str, Any] = {**asdict(attempt), **msgspec.to_builtins(quantities)}
    row.update((amount_column(line.component), str(line.amount_pico)) for line in rated.lines)
    row["kind"] = event.kind
    row["finish"] = event.finish
    row["estimated"] = event.estimated
    row["suspended"] = bool(rated.unpriced)
    row["digest"] = "\\x" + digest(event).hex()
    row["admitted_at"] = to_moment(attempt.admitted_at)
    row["occurred_at"] = to_moment(event.occurred_at)
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
