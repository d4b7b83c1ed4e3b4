"""When anything was last used, as far as this gateway can know: for a limiter whose Redis came back
empty.

Above: `app`. Below: `tables`, `spool`. Only the events of the last hours are looked at, and only
for as long as somebody may wait; who gets no answer must take it that it was just now.
"""

from __future__ import annotations

import asyncio
import time

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.spool import Spool
from billing.tables import usage_events

TIMEOUT_S = 2.0


async def last_use(db: AsyncEngine, spool: Spool) -> float | None:
    """Unix seconds; None: nothing ever was. `db`: of a role that sees every org's rows.

    Raises: TimeoutError, and what SQLAlchemy raises where Postgres is away.
    """
    if spool.backlog:
        return time.time()
    async with asyncio.timeout(TIMEOUT_S), db.connect() as conn:
        newest = await conn.scalar(sa.select(sa.func.max(usage_events.c.ingested_at)))
    return None if newest is None else newest.timestamp()
