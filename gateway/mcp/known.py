"""Caches approvals and rules in each worker: read once, forgotten on a change. A change reaches
every worker within a second: it is announced on Redis, and while nothing proves that no message was
missed, what is older than MAX_STALENESS_S is read anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import tenant
from gateway.lru import Lru
from gateway.mcp.pins import read_pins
from gateway.mcp.rules import read_rules
from gateway.tenancy.changes import (
    ANNOUNCE_TIMEOUT_S,
    EVERYTHING,
    ChangeListener,
    publish_change,
)
from gateway.tenancy.errors import ChangeNotAnnounced
from mcp_bridge.pinning import ApprovedPins
from mcp_bridge.trust.call_records import Rules

CHANNEL = "tollgate:mcp"
MAX_STALENESS_S = 0.9
MAX_KNOWN = 4_096
"""Servers, and orgs, in one worker."""

T = TypeVar("T")


async def announce(redis: Redis, org_id: str) -> None:
    """Announce a change of an org, after its commit. Raises: ChangeNotAnnounced."""
    try:
        async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
            await publish_change(redis, CHANNEL, org_id)
    except (RedisError, OSError) as error:
        raise ChangeNotAnnounced("redis", "the change is saved but was not announced") from error


class ChangeFeed(ChangeListener):
    """A feed of changes, between `start` and `close`."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis, self._heard, channel=CHANNEL)
        self.changes = 0
        self.forgetting: list[Callable[[str], None]] = []

    def _heard(self, org_id: str) -> None:
        self.changes += 1
        for forget in self.forgetting:
            forget(org_id)


class OrgCache(Generic[T]):
    """A cache of one kind of thing, by org and name. `read`: from Postgres. What is read twice the
    same is the same object, so it may be compared by identity."""

    def __init__(
        self, feed: ChangeFeed, read: Callable[[str, str], Awaitable[T]], clock: Callable[[], float]
    ) -> None:
        self._feed, self._read, self._clock = feed, read, clock
        self._items: Lru[tuple[str, str], tuple[float, T]] = Lru(MAX_KNOWN)
        self._good: Lru[tuple[str, str], bool] = Lru(MAX_KNOWN)
        feed.forgetting.append(self.forget)

    def forget(self, org_id: str) -> None:
        """Forget what is known of an org. EVERYTHING: of all orgs."""
        for key in [key for key, _ in self._good.items()]:
            if org_id in (EVERYTHING, key[0]):
                self._good.drop(key)

    async def get(self, org_id: str, name: str = "") -> T:
        key, now = (org_id, name), self._clock()
        found = self._items.get(key)
        if found is not None and key in self._good:
            if max(found[0], self._feed.as_of) > now - MAX_STALENESS_S:
                return found[1]
        changes = self._feed.changes
        value = await self._read(org_id, name)
        if found is not None and found[1] == value:
            value = found[1]
        self._items.put(key, (now, value))
        if self._feed.changes == changes:
            self._good.put(key, True)
        return value


class CachedTrust:
    """A PinStore and a RuleSource of the bridge, cached."""

    def __init__(self, db: AsyncEngine, feed: ChangeFeed) -> None:
        self._db = db
        self._pins: OrgCache[ApprovedPins] = OrgCache(feed, self._read_pins, time.monotonic)
        self._rules: OrgCache[Rules] = OrgCache(feed, self._read_rules, time.monotonic)

    async def approved(self, org_id: str, server: str) -> ApprovedPins:
        return await self._pins.get(org_id, server)

    async def rules(self, org_id: str) -> Rules:
        return await self._rules.get(org_id)

    async def _read_pins(self, org_id: str, server: str) -> ApprovedPins:
        async with tenant(self._db, org_id) as conn:
            return await read_pins(conn, org_id=org_id, server=server)

    async def _read_rules(self, org_id: str, _: str) -> Rules:
        async with tenant(self._db, org_id) as conn:
            return await read_rules(conn, org_id=org_id)
