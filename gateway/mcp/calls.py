"""Counts tool calls in Redis, so that all workers count the same. Everything of one org has one
hash tag. While Redis does not answer, no call goes out that a rule with a rate or a budget is
about. Money is nano-USD, as in all of Redis: what a call costs rounded up, a budget rounded down.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.limits.spending import PICO_PER_NANO, to_nano
from gateway.tenancy.errors import NotFound
from mcp_bridge.caller import Caller
from mcp_bridge.trust.call_records import CountOutcome
from mcp_bridge.trust.policy import CallState, ToolRule

TAINT_S = 3600
"""A taint lasts this long after the last answer that taints."""
MAX_TAINTED = 10_000
"""Callers of one org that are kept by name, so that somebody can lift it: the longest tainted are
left out, and are clean within TAINT_S all the same."""
MAX_SHOWN = 1_000
PARTS = 60
"""A budget's window is counted in this many parts: spending leaves it a part at a time, at most one
part late."""

TAKE = """
local now, id, cost, rates = tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])
local full, parts = {}, tonumber(ARGV[5])
local function bound(i)
  return tonumber(ARGV[4 + 2 * i]), tonumber(ARGV[5 + 2 * i])
end
for i, key in ipairs(KEYS) do
  local window, limit = bound(i)
  if i <= rates then
    redis.call('ZREMRANGEBYSCORE', key, '-inf', now - window)
    local count = redis.call('ZCARD', key)
    if count >= limit then
      full[#full + 1] = i
      full[#full + 1] = count
    end
  else
    local oldest, spent = math.floor((now - window) / (window / parts)), 0
    local found = redis.call('HGETALL', key)
    for j = 1, #found, 2 do
      if tonumber(found[j]) < oldest then
        redis.call('HDEL', key, found[j])
      else
        spent = spent + tonumber(found[j + 1])
      end
    end
    if spent >= limit or spent + tonumber(cost) > limit then
      full[#full + 1] = i
      full[#full + 1] = 0
    end
  end
end
if #full == 0 then
  for i, key in ipairs(KEYS) do
    local window = bound(i)
    if i <= rates then
      redis.call('ZADD', key, now, id)
    else
      redis.call('HINCRBY', key, string.format('%d', math.floor(now / (window / parts))), cost)
    end
    redis.call('EXPIRE', key, 2 * window + 1)
  end
end
return full
"""


class RedisCalls:
    """A CallMemory in Redis. `taints`: whether some server taints; if none does nobody is looked
    up. `now_s`: seconds since the epoch."""

    def __init__(
        self, redis: Redis, *, taints: bool = True, now_s: Callable[[], float] = time.time
    ) -> None:
        self._redis, self.taints, self._now_s = redis, taints, now_s
        self._take = redis.register_script(TAKE)

    async def take(
        self, org_id: str, rules: Iterable[ToolRule], call_id: str, cost_pico: int
    ) -> CountOutcome:
        bound = list(rules)
        rated = [(rule.id, rule.rate) for rule in bound if rule.rate is not None]
        spent = [(rule.id, rule.budget) for rule in bound if rule.budget is not None]
        if not rated and not spent:
            return CountOutcome()
        now = self._now_s()
        keys = [f"mcp:{{{org_id}}}:rate:{rule_id}" for rule_id, _ in rated]
        keys += [spent_key(org_id, rule_id) for rule_id, _ in spent]
        given: list[Any] = [now, call_id, to_nano(cost_pico), len(rated), PARTS]
        for _, rate in rated:
            given += [rate.window_s, rate.calls]
        for _, budget in spent:
            given += [budget.window_s, budget.amount_pico // PICO_PER_NANO]
        full = await self._take(keys=keys, args=given)
        if not full:
            return CountOutcome(at_s=now)
        found = {place - 1: count for place, count in zip(full[::2], full[1::2], strict=True)}
        calls = {rated[at][0]: count for at, count in found.items() if at < len(rated)}
        gone = [spent[at - len(rated)] for at in found if at >= len(rated)]
        sums = {rule_id: budget.amount_pico for rule_id, budget in gone}
        return CountOutcome(at_s=now, full=CallState(calls, sums))

    async def give_back(
        self, org_id: str, rules: Iterable[ToolRule], cost_pico: int, taken: CountOutcome
    ) -> None:
        budgets = [(rule.id, rule.budget) for rule in rules if rule.budget is not None]
        if not budgets or not cost_pico:
            return
        async with self._redis.pipeline() as pipeline:
            for rule_id, budget in budgets:
                part = math.floor(taken.at_s / (budget.window_s / PARTS))
                key = spent_key(org_id, rule_id)
                pipeline.hincrby(key, str(part), -to_nano(cost_pico))
                pipeline.expire(key, 2 * budget.window_s + 1)
            await pipeline.execute()

    async def tainted_by(self, caller: Caller) -> tuple[str, ...]:
        return tuple(sorted(map(text, await self._redis.smembers(taint_key(caller)))))

    async def taint(self, caller: Caller, server: str) -> None:
        key, index, now = taint_key(caller), tainted_key(caller.org_id), self._now_s()
        async with self._redis.pipeline() as pipeline:
            pipeline.sadd(key, server)
            pipeline.expire(key, TAINT_S)
            pipeline.zadd(index, {caller.principal: now + TAINT_S})
            pipeline.zremrangebyscore(index, "-inf", now)
            pipeline.zremrangebyrank(index, 0, -MAX_TAINTED - 1)
            pipeline.expire(index, TAINT_S)
            await pipeline.execute()

    async def once(self, org_id: str, key: str, ttl_s: float) -> bool:
        name = f"mcp:{{{org_id}}}:once:{key}"
        return bool(await self._redis.set(name, b"1", nx=True, ex=int(ttl_s)))


class Taint(msgspec.Struct, frozen=True, kw_only=True):
    """A client whose calls with side effects ask a person first, and which servers' answers caused
    it. `until_s`: since the epoch, if those servers say nothing more."""

    caller: Caller
    servers: tuple[str, ...]
    until_s: float


async def taints_of(
    redis: Redis, *, org_id: str, client: str | None = None, now_s: float
) -> list[Taint]:
    """Return the newest MAX_SHOWN taints. `client`: of this key or OAuth client alone."""
    found: Any = await redis.zrange(tainted_key(org_id), 0, -1, desc=True, withscores=True)
    known = [(Caller.of(text(who)), until_s) for who, until_s in found if until_s > now_s]
    known = [each for each in known if client in (None, each[0].client)][:MAX_SHOWN]
    async with redis.pipeline(transaction=False) as pipeline:
        for caller, _ in known:
            pipeline.smembers(taint_key(caller))
        servers: list[Any] = await pipeline.execute()
    return [
        Taint(caller=caller, servers=tuple(sorted(map(text, names))), until_s=until_s)
        for (caller, until_s), names in zip(known, servers, strict=True)
        if names
    ]


async def lifting(
    conn: AsyncConnection, redis: Redis, *, org_id: str, client: str, actor: Actor
) -> list[Taint]:
    """Record what `calls.lift` is about to lift. A failure in between leaves an audit entry too
    many, and nobody clean without one. Raises: NotFound."""
    found = await taints_of(redis, org_id=org_id, client=client, now_s=time.time())
    if not found:
        raise NotFound("client_id", f"nobody who uses {client} is tainted")
    servers = sorted({name for each in found for name in each.servers})
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="mcp.taint_lifted",
        target=client,
        before={"callers": len(found), "servers": servers},
    )
    return found


async def lift(redis: Redis, *, org_id: str, taints: Iterable[Taint]) -> None:
    callers = [each.caller for each in taints]
    if callers:
        async with redis.pipeline() as pipeline:
            pipeline.delete(*map(taint_key, callers))
            pipeline.zrem(tainted_key(org_id), *(each.principal for each in callers))
            await pipeline.execute()


def text(said: bytes | str) -> str:
    return said.decode() if isinstance(said, bytes) else said


def spent_key(org_id: str, rule_id: str) -> str:
    return f"mcp:{{{org_id}}}:spent:{rule_id}"


def taint_key(caller: Caller) -> str:
    who = hashlib.sha256(caller.principal.encode()).hexdigest()
    return f"mcp:{{{caller.org_id}}}:taint:{who}"


def tainted_key(org_id: str) -> str:
    return f"mcp:{{{org_id}}}:tainted"
