"""Records when each API key was last used: in memory at each use, and in Postgres by one statement
every `FLUSH_INTERVAL_S`.

A kill -9 loses what was not yet written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Flusher
from gateway.db import DATABASE_ERRORS

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 15.0
FLUSH_TIMEOUT_S = 5.0
MAX_NOTED = 65_536
"""The maximum of keys between two flushes, 100 bytes each; uses of further keys are dropped."""
FLUSH_BATCH = 1_000
"""Keys of one statement: to make it ready keeps nobody waiting."""
FLUSH = sa.text(
    # Rows are locked in the order of their ids: processes that flush at once do not deadlock.
    """
    WITH later AS (
        SELECT api_keys.id, noted.at
        FROM api_keys JOIN unnest(:ids, :moments) AS noted (id, at) ON api_keys.id = noted.id
        WHERE api_keys.last_used_at IS NULL OR api_keys.last_used_at < noted.at
        ORDER BY api_keys.id FOR NO KEY UPDATE OF api_keys
    )
    UPDATE api_keys SET last_used_at = later.at FROM later WHERE api_keys.id = later.id
    """
).bindparams(
    sa.bindparam("ids", type_=ARRAY(sa.Text)),
    sa.bindparam("moments", type_=ARRAY(sa.TIMESTAMP(timezone=True))),
)


class LastUsed(Flusher):
    """The last uses that one process noted. `wall_clock`: Unix seconds."""

    def __init__(
        self,
        db: AsyncEngine,
        *,
        interval_s: float = FLUSH_INTERVAL_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("last used", interval_s)
        self._db = db
        self._wall_clock = wall_clock
        self._noted: dict[str, float] = {}

    def note(self, key_id: str) -> None:
        noted = self._noted
        if key_id in noted or len(noted) < MAX_NOTED:
            noted[key_id] = self._wall_clock()

    async def flush(self) -> None:
        noted, self._noted = self._noted, {}
        while noted:
            ids = list(islice(noted, FLUSH_BATCH))
            moments = [datetime.fromtimestamp(noted[each], tz=UTC) for each in ids]
            try:
                async with asyncio.timeout(FLUSH_TIMEOUT_S), self._db.begin() as conn:
                    await conn.execute(FLUSH, {"ids": ids, "moments": moments})
            except DATABASE_ERRORS as error:
                log.warning(
                    "last use of %d keys not written (%s)", len(noted), type(error).__name__
                )
                later = [key_id for key_id in noted if key_id not in self._noted]
                for key_id in later[: MAX_NOTED - len(self._noted)]:
                    self._noted[key_id] = noted[key_id]
                return
            for each in ids:
                del noted[each]
