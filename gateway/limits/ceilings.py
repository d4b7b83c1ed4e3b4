"""Tracks how much of their tokens per minute scopes use: noted in memory where the limiter admits
and settles, told to Postgres now and then, which raises the alerts.

A scope's use of a minute is what was reserved in it, put right at the end of each request by what
was used; over all gateways it adds up in Postgres. Noting is one entry in a bounded dict for each
limit. So as not to write what nobody will be told of, a gateway keeps to itself what is below a
twentieth of its share of a limit, and a sum may be too small by as much. What is noted and not yet
written is lost by a kill -9. A minute is the gateway's own clock's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import MINUTE_S, CeilingUse, note_ceilings
from foundation.periodic import Flusher
from gateway.db import DATABASE_ERRORS
from gateway.limits.outcomes import Units
from gateway.limits.redis.scope_limits import ScopeLimits
from gateway.principal import PLAN_LIMITS

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 15.0
FLUSH_TIMEOUT_S = 5.0
MAX_NOTED = 16_384
"""Limits of scopes, by minute, between two flushes; of more, the ones that came last are not
noted."""
FLUSH_BATCH = 1_000
QUIET_SHARE = 20
"""A use below 1/20 of a gateway's share of a limit is not written."""
MEASURES = {limit.letter: limit for limit in PLAN_LIMITS if limit.raises_alerts}

Key = tuple[str, str, str, str, int]
"""Org, scope, its id, the letter of the limit, and the minute in Unix seconds."""


class MinuteUse(msgspec.Struct, gc=False):
    tokens: int
    limit: int
    is_told: bool = False
    """Postgres knows a part of this minute already, so the rest follows however little it is."""


class Ceilings(Flusher):
    """The use of each scope's tokens per minute that this process has noted; one per process. `db`:
    of a role that sees every org's rows. `num_gateways`: how many share the limits now.
    `wall_clock`: Unix seconds."""

    def __init__(
        self,
        db: AsyncEngine,
        *,
        num_gateways: Callable[[], int] = lambda: 1,
        interval_s: float = FLUSH_INTERVAL_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("ceilings", interval_s)
        self._db = db
        self._num_gateways = num_gateways
        self._wall_clock = wall_clock
        self._noted: dict[Key, MinuteUse] = {}

    def note(
        self, org_id: str, scopes: Sequence[ScopeLimits], taken: Units, given_back: Units
    ) -> None:
        """Note `taken` from each of `scopes`, less what was `given_back`, which was taken
        before."""
        minute = int(self._wall_clock()) // MINUTE_S * MINUTE_S
        more, less = taken.counted(), given_back.counted()
        noted = self._noted
        for scope in scopes:
            for bucket in scope.of_plan.buckets:
                if (limit := MEASURES.get(bucket.letter)) is None or bucket.limit <= 0:
                    continue
                key = (org_id, scope.scope, scope.owner_id, bucket.letter, minute)
                tokens = more[limit.counts] - less[limit.counts]
                known = noted.get(key)
                if known is not None:
                    known.tokens += tokens
                    known.limit = bucket.limit
                elif len(noted) < MAX_NOTED:
                    noted[key] = MinuteUse(tokens, bucket.limit)

    async def flush(self) -> None:
        minute = int(self._wall_clock()) // MINUTE_S * MINUTE_S
        floor = QUIET_SHARE * self._num_gateways()
        told: list[tuple[Key, MinuteUse, int]] = []
        for key, each in list(self._noted.items()):
            if each.tokens and (each.is_told or each.tokens * floor >= each.limit):
                told.append((key, each, each.tokens))
            elif key[4] != minute:
                del self._noted[key]
        for start in range(0, len(told), FLUSH_BATCH):
            batch = told[start : start + FLUSH_BATCH]
            try:
                async with asyncio.timeout(FLUSH_TIMEOUT_S):
                    await note_ceilings(self._db, [_to_use(*each) for each in batch])
            except DATABASE_ERRORS as error:
                log.warning("ceilings not written (%s)", type(error).__name__)
                return
            for key, each, tokens in batch:
                # What was noted meanwhile stays.
                each.tokens -= tokens
                each.is_told = True
                if key[4] != minute and not each.tokens:
                    self._noted.pop(key, None)


def _to_use(key: Key, noted: MinuteUse, tokens: int) -> CeilingUse:
    org_id, scope, scope_id, letter, minute = key
    return CeilingUse(
        org_id=org_id,
        scope=scope,
        scope_id=scope_id,
        measure=MEASURES[letter].name,
        minute=minute,
        tokens=tokens,
        limit=noted.limit,
    )
