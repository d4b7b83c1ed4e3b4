"""Decides whether this worker should be sent work."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.exceptions import RedisError

from billing.spool.spool import Spool
from gateway.fleet.router import Fleet


class Readiness:
    """The readiness of one process; `begin_drain` turns it red for good."""

    def __init__(self, *, fleet: Fleet, redis: Redis, spool: Spool) -> None:
        self._fleet, self._redis, self._spool = fleet, redis, spool
        self._draining = False
        self._redis_seen = False
        self._never_seen = {
            route.model: route.replicas for route in fleet.routes if route.kind == "engine"
        }

    def begin_drain(self) -> None:
        self._draining = True

    def observe(self) -> None:
        """Note which engines are connected: each must have been so once before the start is
        over."""
        self._never_seen = {
            model: replicas
            for model, replicas in self._never_seen.items()
            if not any(replica.health().available for replica in replicas)
        }

    async def missing(self) -> list[str]:
        """Return what keeps this worker from taking, limiting, running and billing a request.

        Empty when it is ready.

        At the start every engine is waited for ("model NAME"). One that leaves afterwards takes
        only its own model away: the others go on being served while any replica is there.
        Postgres is not among it: keys are cached and usage waits in the spool. Nor is Redis once
        the start is over: it would be away for all workers, and each has its share of the limits.
        """
        found = []
        if self._draining:
            found.append("draining")
        if not self._spool.healthy:
            found.append("spool")
        self.observe()
        found += [f"model {model}" for model in self._never_seen]
        replicas = (replica for route in self._fleet.routes for replica in route.replicas)
        if not any(replica.health().available for replica in replicas):
            found.append("replicas")
        if not await self.has_seen_redis():
            found.append("redis")
        return found

    async def has_seen_redis(self) -> bool:
        """Return whether Redis answers now, or has since the start."""
        if not self._redis_seen:
            try:
                self._redis_seen = bool(await self._redis.ping())
            except (RedisError, OSError):
                return False
        return self._redis_seen
