"""The limiter's Lua, ready to be called.

Above: `limiter`. Below: redis-py, and the `.lua` files beside this one: `ledger.lua` is prepended
to each of the others. Scripts are known by the digest of their text, so gateways of two versions
can share a Redis while one replaces the other; a Redis that has forgotten a script is given it
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

log = logging.getLogger(__name__)

SCRIPT_TIMEOUT_S = 2.0
"""A call that takes longer, once it has a slot, counts as Redis being away. Each may be repeated:
lease ids make them idempotent."""
SLOT_TIMEOUT_S = 10.0
"""Waiting for a slot: a queue so long says nothing of Redis' connections, but its callers give
up."""

MAX_CONCURRENT_CALLS = 32
"""Well below what a pool of connections holds: beyond that redis-py would refuse, not wait."""


class LimiterUnavailable(Exception):
    """Redis did not answer, so nobody knows whether the request may pass."""


def script_text(name: str) -> str:
    folder = Path(__file__).parent
    return (folder / "ledger.lua").read_text() + (folder / f"{name}.lua").read_text()


class Scripts:
    """`admit`, `settle` and `renew` on one Redis. `redis` must not decode responses."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._failing = False
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._scripts = {
            name: redis.register_script(script_text(name)) for name in ("admit", "settle", "renew")
        }

    async def call(
        self, name: str, keys: Sequence[str], arguments: Sequence[str | int]
    ) -> list[int] | int:
        """Raises: LimiterUnavailable."""
        try:
            async with asyncio.timeout(SLOT_TIMEOUT_S):
                await self._slots.acquire()
        except TimeoutError as error:
            raise LimiterUnavailable(f"{name}: no free slot") from error
        try:
            async with asyncio.timeout(SCRIPT_TIMEOUT_S):
                reply: list[int] | int = await self._scripts[name](keys=keys, args=arguments)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            if isinstance(error, RedisConnectionError | RedisTimeoutError | OSError):
                # The pool's idle connections are as dead: left there, each would fail a call.
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            self._note(error)
            raise LimiterUnavailable(f"{name}: {type(error).__name__}") from error
        finally:
            self._slots.release()
        self._note(None)
        return reply

    def _note(self, error: Exception | None) -> None:
        """The log hears of an outage's beginning and of its end, not of every call."""
        if error is not None and not self._failing:
            log.error("Redis runs no limiter script: %s: %s", type(error).__name__, error)
        elif error is None and self._failing:
            log.warning("Redis runs the limiter's scripts again")
        self._failing = error is not None
