"""Whether anything was ever used here: for a limiter whose Redis came back empty, or was never
filled.

When that was is not asked: what runs, and what lies in the spools of others, may be later than
anything that is booked. One event is enough, and only a new installation has none. It waits no
longer than somebody else may; who gets no answer must take it that something was.
"""

from __future__ import annotations

import asyncio

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.spool.spool import Spool
from billing.tables import usage_events

TIMEOUT_S = 2.0


async def ever_used(db: AsyncEngine, spool: Spool) -> bool:
    """`db`: of a role that sees every org's rows.

    Raises: TimeoutError, and what SQLAlchemy raises where Postgres is away.
    """
    if spool.backlog:
        return True
    async with asyncio.timeout(TIMEOUT_S), db.connect() as conn:
        found = await conn.scalar(sa.select(sa.exists().select_from(usage_events)))
    return bool(found)
