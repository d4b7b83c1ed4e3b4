"""Take back what was billed for requests that were made once more because their answer was lost
with their gateway.

A request that holds an `Idempotency-Key` and whose gateway died is superseded by the one that takes
its key over (`supersede`, in that transaction). Whatever is booked for it, before that or after,
such as its last checkpoint once its spool was found, is rated anew, at nothing: a reversal that
names the original. No later rating of such an event charges it again (`event_ratings.rate_event`).

Knows no key.
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
"""Longer than a request takes, from its claim to its admission to its end."""
LOOKED_FOR = "7 days"
"""From when it was superseded: so long its spool may take to be found."""
_SUPERSEDE = sa.text("""
    INSERT INTO superseded_requests (request_id, org_id, superseded_by, claimed_at)
    VALUES (:request_id, :org_id, :superseded_by, :claimed_at) ON CONFLICT DO NOTHING
""")
_TOTAL = f"({' + '.join(f'coalesce(r.{name}, u.{name})' for name in AMOUNTS)})"
_STANDING = sa.text(f"""
    {select_rated_events(UNKEPT)}
    JOIN superseded_requests s ON s.org_id = u.org AND s.request_id = u.request_id
        AND u.admitted_at BETWEEN s.claimed_at - interval '{RUNS_FOR}'
            AND s.superseded_at + interval '{RUNS_FOR}'
    WHERE s.superseded_at > now() - interval '{LOOKED_FOR}' AND u.kind = 'usage'
        AND {_TOTAL} > 0 AND NOT ({WAITS})
    ORDER BY u.id LIMIT {MAX_BATCH}
""")


async def supersede(
    conn: AsyncConnection, *, org_id: str, request_id: str, superseded_by: str, claimed_at: datetime
) -> None:
    """Note that a request is superseded; safe to repeat. `claimed_at`: when its gateway last said
    that it runs."""
    named = {"request_id": request_id, "org_id": org_id, "superseded_by": superseded_by}
    await conn.execute(_SUPERSEDE, {**named, "claimed_at": claimed_at})


async def take_back(db: AsyncEngine, announce: Announce = announce_to_nobody) -> int:
    """Take back what superseded requests were billed; return for how many events."""
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
