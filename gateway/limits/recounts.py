"""Recounts the orgs of which the books change what was spent, and whose counters have yet to hear
of it.

An org is announced before its change is committed and taken off the list after its counters began
anew, each while the corrections are held: so whoever finds it on the list sees the change in the
books or knows that it never will be, and a process that dies in between leaves the rest to the next
one. Where Redis loses the list it has lost the counters too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections.event_ratings import Announce, hold_corrections
from gateway.limits.counters import begin_anew

ANNOUNCED = "tollgate:recounts"


@asynccontextmanager
async def recounting(db: AsyncEngine, redis: Redis) -> AsyncIterator[Announce]:
    """Let a correction announce the orgs that it changes, and recount them at its end. Whoever
    corrects within it announces by this, and counters know behind it; where it fails, whoever
    recounts next tells them of what was committed before. Raises: as `recount`."""
    yield partial(_announce, redis)
    await recount(db, redis)


async def _announce(redis: Redis, org_ids: Collection[str]) -> None:
    """Raises: RedisError, OSError."""
    if org_ids:
        await redis.sadd(ANNOUNCED, *sorted(org_ids))


async def recount(db: AsyncEngine, redis: Redis) -> None:
    """Raises: RedisError, and what Postgres raises."""
    if not await redis.exists(ANNOUNCED):
        return
    async with db.begin() as conn:
        await hold_corrections(conn)
        for member in await cast(Awaitable[set[bytes]], redis.smembers(ANNOUNCED)):
            await begin_anew(redis, member.decode())
            await redis.srem(ANNOUNCED, member)
