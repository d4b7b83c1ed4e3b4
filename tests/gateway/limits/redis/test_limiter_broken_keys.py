"""An organization whose keys in Redis are broken is refused, and nobody else."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from gateway.http_errors.table import to_http_error
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Settlement, Units
from gateway.limits.redis.scripts import (
    SAY_AGAIN_S,
    LimiterUnavailable,
    ScriptFailed,
    Scripts,
    unavailable,
)
from gateway.principal import Plan, Principal

PLAN = Plan(name="p", tokens_per_minute=60_000)


async def admit(limiter: Limiter, org: str, number: int) -> Admission | Refusal:
    who = Principal(
        org_id=org,
        project_id="proj",
        key_id=f"key_{org}",
        key_hint="",
        scopes=frozenset(),
        org_plan=PLAN,
    )
    lease = f"{org}-{number}"
    return await limiter.admit(who, "m", input_tokens=1, max_output_tokens=0, lease_id=lease)


@pytest.mark.parametrize(
    ("key", "why"),
    [("epoch", "WRONGTYPE"), ("leases", "WRONGTYPE"), ("org:org_a", "ERR user_script:")],
)
async def test_a_key_of_another_type_is_its_orgs_matter(
    key: str, why: str, redis: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter(redis)
    running = await admit(limiter, "org_a", 1), await admit(limiter, "org_b", 1)
    assert all(isinstance(each, Admission) for each in running)
    name = f"tollgate:{{org_a}}:{key}"
    assert await redis.delete(name), "there is such a key"
    await (redis.set(name, "x") if key != "epoch" else redis.rpush(name, "x"))

    with pytest.raises(ScriptFailed) as raised:
        await admit(limiter, "org_a", 2)
    assert to_http_error(raised.value).status == 503
    assert "admit fails for {org_a}" in caplog.text and why in caplog.text
    assert isinstance(await admit(limiter, "org_b", 2), Admission)
    assert not limiter._scripts.is_away

    first, second = running
    assert isinstance(first, Admission) and isinstance(second, Admission)
    assert await limiter.renew() >= 2, "org_b's are renewed whatever org_a's are"
    assert await limiter.settle(first, Units(input_tokens=1)) == Settlement.FAILED
    assert await limiter.settle(second, Units(input_tokens=1)) == Settlement.SETTLED
    await limiter.close()


async def test_what_was_granted_to_others_is_posted_and_redis_is_back(
    redis: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter(redis)
    await redis.set("tollgate:{org_a}:org:org_a", "x")
    limiter._scripts.is_away = True
    limiter._outage.begins()
    for org in ("org_a", "org_b"):
        granted = await admit(limiter, org, 1)
        assert isinstance(granted, Admission) and granted.is_local
    async with asyncio.timeout(30):
        while limiter._scripts.is_away:
            await asyncio.sleep(0.02)
    assert "debit fails for {org_a}" in caplog.text
    assert await redis.exists("tollgate:{org_b}:org:org_b"), "its debit was taken"
    await limiter.close()


async def test_counters_of_others_hear_of_what_was_booked(redis: redis.asyncio.Redis) -> None:
    limiter = Limiter(redis)
    await redis.set("tollgate:{org_a}:counters", "x")
    limiter.counters._unbooked.update({"event_a": "org_a", "event_b": "org_b"})
    await limiter.counters.book_the_rest()
    assert list(limiter.counters._unbooked) == ["event_a"], "it waits for its org's keys"
    await limiter.close()


@pytest.mark.parametrize(
    ("text", "of_an_org"),
    [
        ("WRONGTYPE Operation against a key", True),
        ("ERR user_script:3: attempt to index a nil value", True),
        ("OOM command not allowed when used memory > 'maxmemory'.", False),
        ("READONLY You can't write against a read only replica.", False),
        ("LOADING Redis is loading the dataset in memory", False),
        ("MASTERDOWN Link with MASTER is down", False),
        ("CLUSTERDOWN The cluster is down", False),
    ],
)
def test_what_says_that_redis_serves_nobody(text: str, of_an_org: bool) -> None:
    found = unavailable("admit", "tollgate:{org_a}:leases", ResponseError(text))
    assert isinstance(found, LimiterUnavailable)
    assert isinstance(found, ScriptFailed) == of_an_org


async def test_it_is_logged_once_a_minute_for_each_script_and_organization(
    redis: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    scripts = Scripts(redis, clock=lambda: now)
    error = ResponseError("WRONGTYPE Operation against a key")

    def fails(name: str, org: str) -> int:
        before = len(caplog.records)
        for _ in range(3):
            scripts.failed(name, f"tollgate:{{{org}}}:leases", error)
        return len(caplog.records) - before

    assert [fails("admit", "org_a"), fails("settle", "org_a"), fails("admit", "org_b")] == [1] * 3
    assert fails("admit", "org_a") == 0
    now += SAY_AGAIN_S
    assert fails("admit", "org_a") == 1
