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

from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.tasks import SharedTasks
from gateway.db import DATABASE_ERRORS
from gateway.tenancy.keys.origins import all_origins

log = logging.getLogger(__name__)

REFRESH_S = 1.0
MAX_AGE_S = 10.0
READ_TIMEOUT_S = 5.0


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
