"""Caches, in each process, which organizations list an origin for CORS.

All origins of the installation are one small table. It is read again in the background when a
request comes and the copy is older than `REFRESH_S`; the request waits for that only if the copy is
older than `MAX_AGE_S`. While Postgres is away the copy stays in use: an origin is no credential.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.tasks import SharedTasks
from gateway.db import DATABASE_ERRORS
from gateway.tenancy.tables import orgs

log = logging.getLogger(__name__)

REFRESH_S = 1.0
MAX_AGE_S = 10.0
READ_TIMEOUT_S = 5.0
MAX_ORGS_WITH_ORIGINS = 20_000
"""Those of more, by age, are not known to browsers."""


class CorsOrigins:
    """The cache of one process. `db` sees all organizations. `clock`: monotonic seconds."""

    def __init__(self, db: AsyncEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._clock = clock
        self._known: Mapping[str, frozenset[str]] = {}
        self._as_of = self._asked_at = -math.inf
        self._reads: SharedTasks[None, None] = SharedTasks("read cors origins")

    async def close(self) -> None:
        await self._reads.close()

    async def orgs_of(self, origin: str) -> frozenset[str]:
        """Return the ids of the organizations that list the origin; never raises."""
        now = self._clock()
        if now - max(self._as_of, self._asked_at) > REFRESH_S and None not in self._reads:
            self._asked_at = now
            self._reads.start(None, self._read)
        if now - self._as_of > MAX_AGE_S and None in self._reads:
            await self._reads.run(None, self._read)
        return self._known.get(origin, frozenset())

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                as_of = self._clock()
                async with self._db.connect() as conn:
                    self._known = await all_origins(conn)
                self._as_of = as_of
        except DATABASE_ERRORS as error:
            log.warning("CORS origins cannot be read (%s)", type(error).__name__)


async def all_origins(conn: AsyncConnection) -> dict[str, frozenset[str]]:
    """Return the origins of all live organizations: origin -> the organizations that list it."""
    listed = sa.select(orgs.c.id, orgs.c.cors_origins)
    listed = listed.where(
        orgs.c.archived_at.is_(None), sa.func.cardinality(orgs.c.cors_origins) > 0
    )
    rows = await conn.execute(listed.order_by(orgs.c.id).limit(MAX_ORGS_WITH_ORIGINS))
    found: dict[str, set[str]] = {}
    for org_id, origins in rows:
        for origin in origins:
            found.setdefault(origin, set()).add(org_id)
    return {origin: frozenset(org_ids) for origin, org_ids in found.items()}
