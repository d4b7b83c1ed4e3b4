"""Keeps in Redis how much of each MCP server differs from what an organization approved of it, as
whoever asked the server last has seen: for the console, which asks no server by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from foundation.periodic import Flusher
from mcp_bridge.pinning import Change

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 2.0
FLUSH_TIMEOUT_S = 5.0
MAX_NOTED = 4_096
"""Servers between two flushes; of more, those that came last wait until they change again."""
KEPT_S = 90 * 86_400
DIFFERS = ("changed", "renamed", "removed")
"""The states that are counted: a new thing was never approved, and may never be."""


class ChangedOffers(Flusher):
    """The changes that this process saw; one per process. `redis` must not decode responses."""

    def __init__(self, redis: Redis, *, interval_s: float = FLUSH_INTERVAL_S) -> None:
        super().__init__("changed MCP servers", interval_s)
        self._redis = redis
        self._noted: dict[tuple[str, str], int] = {}

    def note(self, org_id: str, server: str, changes: Iterable[Change]) -> None:
        """Note all that differs from what is approved; nothing waits."""
        key = (org_id, server)
        if key in self._noted or len(self._noted) < MAX_NOTED:
            self._noted[key] = sum(each.state in DIFFERS for each in changes)

    async def flush(self) -> None:
        noted, self._noted = self._noted, {}
        if not noted:
            return
        pipeline = self._redis.pipeline(transaction=False)
        for (org_id, server), number in noted.items():
            key = key_of(org_id)
            if number:
                pipeline.hset(key, server, str(number))
                pipeline.expire(key, KEPT_S)
            else:
                pipeline.hdel(key, server)
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await pipeline.execute()
        except (RedisError, OSError) as error:
            self._noted = noted | self._noted
            log.warning("changed MCP servers not written (%s)", type(error).__name__)


async def read_changed(redis: Redis, org_id: str) -> dict[str, int]:
    """Return the number of things that differ, by server; nothing while Redis is away."""
    try:
        found = await cast(Awaitable[dict[bytes, bytes]], redis.hgetall(key_of(org_id)))
    except (RedisError, OSError):
        return {}
    return {server.decode(): int(number) for server, number in found.items()}


def key_of(org_id: str) -> str:
    return f"tollgate:{{{org_id}}}:mcp_changed"
