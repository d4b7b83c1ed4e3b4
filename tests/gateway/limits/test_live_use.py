"""People see of a limit what the limiter goes by: used, held, left, and when it is full."""

from __future__ import annotations

import pytest
import redis.asyncio

from gateway.limits import live_use
from gateway.limits.live_use import LimitUse
from gateway.limits.outcomes import Units, scopes_of
from gateway.principal import Principal
from tests.gateway.limits.test_limiter import Caller, Clock, clock, limits, principal

__all__ = ["clock"]


async def seen(caller: Caller, who: Principal) -> dict[tuple[str, str], LimitUse]:
    use = await caller.limiter.use_now("org_a", scopes_of(who, "m", "interactive"))
    return {(each.scope.scope, each.limit.letter): each for each in use.limits}


def parts(use: LimitUse) -> tuple[int, int, int]:
    return use.used, use.held, use.left


async def test_what_runs_is_held_and_what_ran_is_used(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    who = principal(key=limits(6_000, 600, 2), org=limits(60_000))
    caller = Caller(redis, who)
    idle = await seen(caller, who)
    assert parts(idle["key", "t"]) == (0, 0, 1_000) and idle["key", "t"].full_in_s == 0
    first, second = await caller.admitted(400), await caller.admitted(300)
    running = await seen(caller, who)
    assert parts(running["key", "t"]) == (0, 700, 300)
    assert parts(running["org", "t"]) == (0, 700, 9_300)
    assert parts(running["key", "s"]) == (2, 0, 0) and running["key", "s"].full_in_s is None
    assert running["key", "t"].left == second.state["tokens"].remaining
    assert running["key", "t"].full_in_s == 7.0
    await caller.limiter.settle(first, Units(input_tokens=100))
    assert parts((await seen(caller, who))["key", "t"]) == (100, 300, 600)
    await clock.set(2)  # 200 tokens have refilled: who used is served before who holds
    assert parts((await seen(caller, who))["key", "t"]) == (0, 200, 800)
    await caller.limiter.settle(second, Units(input_tokens=300))
    await clock.set(60)
    assert parts((await seen(caller, who))["key", "t"]) == (0, 0, 1_000)


async def test_looking_changes_nothing_and_reads_so_many_leases(
    redis: redis.asyncio.Redis, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_use, "MAX_LEASES", 3)
    who = principal(key=limits(60_000))
    caller = Caller(redis, who)
    for _ in range(5):
        await caller.admitted(100)
    before = {key: await redis.dump(key) for key in sorted(await redis.keys("*"))}
    use = await caller.limiter.use_now("org_a", scopes_of(who, "m", "interactive"))
    (of_key,) = use.limits
    assert (use.num_running, parts(of_key)) == (5, (200, 300, 9_500))
    assert {key: await redis.dump(key) for key in sorted(await redis.keys("*"))} == before


async def test_more_scopes_than_a_page_shows_are_left_out(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    who = principal(key=limits(60_000), project=limits(10, 10))
    caller = Caller(redis, who)
    many = scopes_of(who, "m", "interactive") * 40
    use = await caller.limiter.use_now("org_a", many)
    assert len({id(each) for each in use.limits}) == 96, "64 scopes: of each pair one and two"
