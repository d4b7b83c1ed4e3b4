"""What tool calls have been, in Redis, so that all workers count the same.

Above: `wiring`. Below: Redis. Of one org everything has one hash tag. A Redis that does not answer
lets no call go out that a rate rule is about.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from redis.asyncio import Redis

from mcp_bridge.caller import Caller
from mcp_bridge.policy import ToolRule

TAINT_S = 3600
MAX_TAINTS = 64

TAKE = """
local now, id, full = tonumber(ARGV[1]), ARGV[2], {}
for i, key in ipairs(KEYS) do
  local window, limit = tonumber(ARGV[1 + 2 * i]), tonumber(ARGV[2 + 2 * i])
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now - window)
  local count = redis.call('ZCARD', key)
  if count >= limit then
    full[#full + 1] = i
    full[#full + 1] = count
  end
end
if #full == 0 then
  for i, key in ipairs(KEYS) do
    redis.call('ZADD', key, now, id)
    redis.call('EXPIRE', key, tonumber(ARGV[1 + 2 * i]) + 1)
  end
end
return full
"""


class RedisCalls:
    """A CallMemory. `now_s`: seconds since the epoch."""

    def __init__(self, redis: Redis, now_s: Callable[[], float] = time.time) -> None:
        self._redis, self._now_s = redis, now_s
        self._take = redis.register_script(TAKE)

    async def take(
        self, org_id: str, rules: Iterable[ToolRule], call_id: str
    ) -> Mapping[str, int] | None:
        rated = [(rule.id, rule.rate) for rule in rules if rule.rate is not None]
        if not rated:
            return None
        keys = [f"mcp:{{{org_id}}}:rate:{rule_id}" for rule_id, _ in rated]
        given: list[Any] = [self._now_s(), call_id]
        for _, rate in rated:
            given += [rate.window_s, rate.calls]
        full = await self._take(keys=keys, args=given)
        found = zip(full[::2], full[1::2], strict=True)
        return {rated[place - 1][0]: count for place, count in found} or None

    async def tainted_by(self, caller: Caller) -> tuple[str, ...]:
        found = await self._redis.smembers(taint_key(caller))
        return tuple(
            sorted(str(each, "utf-8") if isinstance(each, bytes) else each for each in found)
        )

    async def taint(self, caller: Caller, server: str) -> None:
        key = taint_key(caller)
        async with self._redis.pipeline() as pipeline:
            pipeline.sadd(key, server)
            pipeline.expire(key, TAINT_S)
            await pipeline.execute()

    async def once(self, org_id: str, key: str, ttl_s: float) -> bool:
        name = f"mcp:{{{org_id}}}:once:{key}"
        return bool(await self._redis.set(name, b"1", nx=True, ex=int(ttl_s)))


def taint_key(caller: Caller) -> str:
    who = hashlib.sha256(caller.principal.encode()).hexdigest()
    return f"mcp:{{{caller.org_id}}}:taint:{who}"
