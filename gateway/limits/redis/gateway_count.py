"""Counts the gateways that share the limits."""

from __future__ import annotations

from redis.exceptions import RedisError

from gateway.ids import uuid7
from gateway.limits.redis.keys import GATEWAYS
from gateway.limits.redis.pipeline import Pipeline, QueueFull
from gateway.limits.redis.scripts import LimiterUnavailable


class GatewayCount:
    """The number of gateways; one per process. `at_least`: so many there are, heard of or not."""

    def __init__(self, pipeline: Pipeline, *, at_least: int) -> None:
        self._pipeline, self._at_least = pipeline, at_least
        self._id = uuid7().hex

    async def count(self, *, heard_within_s: float) -> int:
        """Count the gateways that were heard of, this one included. Raises: LimiterUnavailable."""
        call = self._pipeline.call
        try:
            now = int((await call(("TIME",)))[0])
            await call(("ZADD", GATEWAYS, str(now), self._id))
            await call(("ZREMRANGEBYSCORE", GATEWAYS, "-inf", str(now - heard_within_s)))
            counted: int = await call(("ZCARD", GATEWAYS))
        except (RedisError, OSError, QueueFull) as error:
            raise LimiterUnavailable(f"count gateways: {type(error).__name__}") from error
        return max(self._at_least, counted)
