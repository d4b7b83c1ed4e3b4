"""Reverse the charges of requests that were repeated because their gateway died with the answer.

A request with an `Idempotency-Key` whose gateway died is superseded by the one that takes its key
over (`supersede`, in that transaction). Events of it that are booked before or later, such as its
last checkpoint when its spool is found, are rated at zero: a reversal that names the original.
Later ratings of such an event do not charge it again (`event_ratings.rate_event`).
"""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.corrections.event_ratings import (
    MAX_BATCH,
    UNKEPT,
    WAITS,
    Announce,
    Rating,
    announce_to_nobody,
    hold_corrections,
    post_ratings,
    rate_event,
    select_rated_events,
    to_rated_event,
    to_rating,
)
from billing.tables import AMOUNTS

RUNS_FOR = "3 hours"
"""A request takes less, from the claim of its key to its end."""
LOOKED_FOR = "7 days"
"""The spool of a superseded request may be found until so long after."""
_SUPERSEDE = sa.text("""
    INSERT INTO superseded_requests (request_id, org_id, superseded_by, claimed_at)
    VALUES (:request_id, :org_id, :superseded_by, :claimed_at) ON CONFLICT DO NOTHING
""")
_TOTAL = f"({' + '.join(f'coalesce(r.{name}, u.{name})' for name in AMOUNTS)})"
_STOOD = f"""
    {select_rated_events(UNKEPT)}
    JOIN superseded_requests s ON s.org_id = u.org AND s.request_id = u.request_id
        AND u.admitted_at BETWEEN s.claimed_at - interval '{RUNS_FOR}'
            AND s.superseded_at + interval '{RUNS_FOR}'
    WHERE s.superseded_at > now() - interval '{LOOKED_FOR}' AND u.kind = 'usage'
        AND {_TOTAL} > 0 AND NOT ({WAITS})
    ORDER BY u.id LIMIT {MAX_BATCH}
"""
_STANDING = sa.text(_STOOD)
NEXT_DUE = f"SELECT now() WHERE EXISTS ({_STOOD})"
"""SQL: the moment at which there is something to take back, or NULL."""


async def supersede(
    conn: AsyncConnection, *, org_id: str, request_id: str, superseded_by: str, claimed_at: datetime
) -> None:
    """Record that a request is superseded; idempotent. `claimed_at`: the last sign of life of its
    gateway."""
    named = {"request_id": request_id, "org_id": org_id, "superseded_by": superseded_by}
    await conn.execute(_SUPERSEDE, {**named, "claimed_at": claimed_at})


async def take_back(db: AsyncEngine, announce: Announce = announce_to_nobody) -> int:
    """Reverse the charges of superseded requests; return the number of events."""
    async with db.connect() as conn:
        if not await _owed(conn):
            return 0
    async with db.begin() as conn:
        await hold_corrections(conn)
        ratings = await _owed(conn)
        await post_ratings(conn, ratings, reverses=True, announce=announce)
    return len(ratings)


async def _owed(conn: AsyncConnection) -> list[Rating]:
    events = [to_rated_event(row) for row in await conn.execute(_STANDING)]
    ratings = [to_rating(each, rate_event(each, each.prices), each.prices) for each in events]
    return [each for each in ratings if not each.changes_nothing]
