"""The limiter on a real Valkey: floods, leases, replays, outages."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits import limiter
from gateway.limits import output_forecast as expected_output
from gateway.limits.headers import to_headers
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import (
    MAX_TOKENS,
    Admission,
    Refusal,
    Settlement,
    Units,
    burst,
)
from gateway.limits.output_forecast import UNKNOWN_OUTPUT_TOKENS
from gateway.principal import UNLIMITED, Plan, Principal
from tests.gateway.limits.limiter_oracle import CLOCK_KEY, move_clock

EPOCHS = ("tollgate:epoch", "tollgate:{org_a}:epoch")
START_US = 1_700_000_000_000_000


def principal(
    *,
    key: Plan = UNLIMITED,
    project: Plan = UNLIMITED,
    org: Plan = UNLIMITED,
    key_id: str = "key_a",
) -> Principal:
    return Principal(
        org_id="org_a",
        project_id="proj_a",
        key_id=key_id,
        key_hint="",
        scopes=frozenset(),
        key_plan=key,
        project_plan=project,
        org_plan=org,
    )


def limits(
    tokens: int | None = None, requests: int | None = None, streams: int | None = None
) -> Plan:
    return Plan(
        name="test",
        tokens_per_minute=tokens,
        requests_per_minute=requests,
        max_concurrent_streams=streams,
    )


def of(tokens: int) -> Units:
    return Units(output_tokens=tokens)


class Clock:
    """The scripts' time, in seconds since the test began."""

    def __init__(self, store: redis.asyncio.Redis) -> None:
        self.store = store
        self.now_s = 0.0

    async def set(self, seconds: float) -> None:
        self.now_s = seconds
        await self.store.set(CLOCK_KEY, START_US + round(seconds * 1_000_000))


@pytest.fixture
async def clock(redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> Clock:
    move_clock(monkeypatch)
    moved = Clock(redis)
    await moved.set(0)
    return moved


class Caller:
    """Admits with ids of its own; `max_output_tokens` is 0, so that the reservation is the
    input."""

    def __init__(self, store: redis.asyncio.Redis, who: Principal) -> None:
        self.limiter = Limiter(store)
        self.who = who
        self.number = 0

    async def admit(self, tokens: int) -> Admission | Refusal:
        self.number += 1
        return await self.limiter.admit(
            self.who,
            "m",
            input_tokens=tokens,
            max_output_tokens=0,
            lease_id=f"{self.who.key_id}-{self.number}",
        )

    async def admitted(self, tokens: int) -> Admission:
        verdict = await self.admit(tokens)
        assert isinstance(verdict, Admission)
        return verdict

    async def refused(self, tokens: int) -> Refusal:
        verdict = await self.admit(tokens)
        assert isinstance(verdict, Refusal)
        return verdict


async def test_a_flood_of_two_hundred_passes_a_burst_and_no_more(
    redis: redis.asyncio.Redis,
) -> None:
    caller = Caller(redis, principal(key=limits(tokens=6000), org=limits(tokens=60_000)))
    started = time.monotonic()
    verdicts = await asyncio.gather(*(caller.admit(10) for _ in range(200)))
    elapsed_s = time.monotonic() - started
    passed = sum(verdict.reserved.tokens for verdict in verdicts if isinstance(verdict, Admission))
    assert 1000 <= passed <= 1000 + elapsed_s * 100
    assert all(verdict.kind == "tokens" for verdict in verdicts if isinstance(verdict, Refusal))


@pytest.mark.parametrize(("reserved_for_used", "least_share"), [(1.5, 0.95), (4.0, 0.4)])
async def test_no_minute_passes_more_than_the_bound_and_a_greedy_tenant_gets_its_rate(
    redis: redis.asyncio.Redis, clock: Clock, reserved_for_used: float, least_share: float
) -> None:
    """Five minutes of streams of up to 20 s, as many as will pass. The rate is reached as long as
    what is reserved and will not be used stays below the burst; beyond that the bound costs some
    of it.
    """
    limit = 6000
    caller = Caller(redis, principal(project=limits(tokens=limit)))
    draw = random.Random(1)
    running: list[tuple[float, Admission, int]] = []
    used: list[tuple[float, int]] = []
    for step in range(600):
        now_s = step / 2
        await clock.set(now_s)
        for ends_s, admission, tokens in list(running):
            if ends_s <= now_s:
                running.remove((ends_s, admission, tokens))
                await caller.limiter.settle(admission, of(tokens))
        while isinstance(verdict := await caller.admit(draw.randint(40, 400)), Admission):
            tokens = round(verdict.reserved.tokens / reserved_for_used)
            running.append((now_s + draw.uniform(0.5, 20), verdict, tokens))
            used.append((now_s, tokens))
        if step % 40 == 0:
            await caller.limiter.renew()
    for start_s, _ in used:
        window = [n for at_s, n in used if start_s <= at_s <= start_s + 60]
        assert sum(window) <= burst(limit) + limit
    steady = sum(n for at_s, n in used if 60 <= at_s < 300)
    assert steady >= least_share * limit * 4


async def test_reservations_cannot_be_saved_up(redis: redis.asyncio.Redis, clock: Clock) -> None:
    """A tenant that holds a reservation while the bucket refills gets back only what is missing."""
    caller = Caller(redis, principal(key=limits(tokens=600)))
    held = [await caller.admitted(50), await caller.admitted(50)]
    await clock.set(10)
    await caller.admitted(100)
    await caller.refused(1)
    for admission in held:
        await caller.limiter.settle(admission, of(0))
    refusal = await caller.refused(1)
    assert refusal.retry_after_s == pytest.approx(0.1), "the bucket is as if they had never been"


async def test_refunds_come_back_while_the_bucket_is_low(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    caller = Caller(redis, principal(key=limits(tokens=600)))
    held = await caller.admitted(80)
    await caller.admitted(20)
    await clock.set(1)
    await caller.admitted(10)
    await caller.limiter.settle(held, of(30))
    await caller.admitted(50)
    await caller.refused(1)


async def test_more_than_a_burst_needs_a_full_bucket_and_leaves_debt(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    caller = Caller(redis, principal(key=limits(tokens=600)))
    await caller.admitted(1)
    early = await caller.refused(600)
    assert early.retry_after_s == pytest.approx(0.1)
    await clock.set(0.1)
    await caller.admitted(600)
    assert (await caller.refused(1)).retry_after_s == pytest.approx(50.1)
    await clock.set(50.2)
    await caller.admitted(1)
    never = await caller.refused(601)
    assert (never.retry_after_s, never.kind, never.limit) == (None, "tokens", 600)


async def test_what_exceeds_a_reservation_becomes_debt(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    caller = Caller(redis, principal(key=limits(tokens=600)))
    admission = await caller.admitted(10)
    await caller.limiter.settle(admission, of(310))
    assert (await caller.refused(1)).retry_after_s == pytest.approx(21.1)


async def test_a_refusal_consumes_nothing_anywhere(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    """The key would let it pass; the organization, asked last, does not."""
    caller = Caller(redis, principal(key=limits(tokens=6000, requests=600), org=limits(requests=6)))
    await caller.admitted(5)
    before = {key: await redis.dump(key) for key in await redis.keys("*")}
    for _ in range(3):
        refusal = await caller.refused(5)
    assert {key: await redis.dump(key) for key in await redis.keys("*")} == before
    assert (refusal.scope, refusal.kind, refusal.limit) == ("org", "requests", 6)
    assert refusal.retry_after_s == pytest.approx(10)
    assert refusal.state["requests"].limit == 6
    assert refusal.state["tokens"].remaining == 995


async def test_keys_of_a_project_share_its_limit(redis: redis.asyncio.Redis, clock: Clock) -> None:
    plan = limits(tokens=600)
    first = Caller(redis, principal(project=plan))
    second = Caller(redis, principal(project=plan, key_id="key_b"))
    await first.admitted(60)
    assert (await second.refused(60)).scope == "project"
    await second.admitted(40)


async def test_slots_are_held_until_a_stream_ends(redis: redis.asyncio.Redis, clock: Clock) -> None:
    caller = Caller(redis, principal(org=limits(streams=2)))
    running = [await caller.admitted(1), await caller.admitted(1)]
    refusal = await caller.refused(1)
    assert (refusal.kind, refusal.limit, refusal.retry_after_s) == ("streams", 2, 1.0)
    await caller.limiter.void(running[0])
    await caller.limiter.settle(running[1], of(1))
    for _ in range(2):
        await caller.admitted(1)
    await caller.refused(1)


@pytest.mark.parametrize("plan", [limits(tokens=0), limits(requests=0), limits(streams=0)])
async def test_a_limit_of_nothing_lets_nothing_pass(redis: redis.asyncio.Redis, plan: Plan) -> None:
    assert (await Caller(redis, principal(project=plan)).refused(1)).retry_after_s is None


async def test_a_lease_is_settled_once(redis: redis.asyncio.Redis, clock: Clock) -> None:
    caller = Caller(redis, principal(key=limits(tokens=600)))
    admission = await caller.admitted(100)
    done = await asyncio.gather(
        *(caller.limiter.settle(admission, of(50)) for _ in range(20)),
        *(caller.limiter.void(admission) for _ in range(20)),
    )
    assert sorted(done, key=lambda each: each.value) == [Settlement.REPLAYED] * 39 + [
        Settlement.SETTLED
    ]
    await caller.admitted(50)
    await caller.refused(1)


async def test_what_an_upstream_claims_is_bounded(redis: redis.asyncio.Redis, clock: Clock) -> None:
    caller, much = Caller(redis, principal(key=limits(tokens=10**9))), 2**40
    first = await caller.admitted(much)
    assert first.reserved.tokens == MAX_TOKENS
    settled = await caller.limiter.settle(first, of(much))
    await clock.set(86_400)
    lease_id = (await caller.admitted(1)).lease_id
    recovered = await caller.limiter.settle_lease("org_a", lease_id, of(much))
    assert settled is recovered is Settlement.SETTLED


async def test_an_admission_may_be_asked_for_again(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    """As after an answer that was lost on its way."""
    caller = Caller(redis, principal(key=limits(tokens=600, requests=6, streams=1)))
    first = await caller.admitted(100)
    caller.number = 0
    assert (await caller.admitted(100)).lease_id == first.lease_id
    await caller.limiter.settle(first, of(0))
    caller.number = 0
    with pytest.raises(AssertionError, match="made once"):
        await caller.admit(100)


async def test_leases_that_nobody_renews_heal_themselves(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    plan = limits(tokens=600, streams=2)
    lost, living = (
        Caller(redis, principal(org=plan)),
        Caller(redis, principal(org=plan, key_id="b")),
    )
    orphan = await lost.admitted(60)
    kept = await living.admitted(40)
    await clock.set(limiter.LEASE_TTL_S - 1)
    assert await living.limiter.renew() == 1
    await living.refused(1)
    await clock.set(limiter.LEASE_TTL_S)
    await living.admitted(1)
    assert (await living.refused(1)).kind == "streams"
    # the spool's recovery comes late, and once
    settle = living.limiter.settle_lease
    assert await settle("org_a", orphan.lease_id, of(90)) == Settlement.LATE
    assert await settle("org_a", orphan.lease_id, of(90)) == Settlement.REPLAYED
    assert await settle("org_a", "nobody's", of(90)) == Settlement.UNKNOWN
    assert await living.limiter.void(kept) == Settlement.SETTLED
    assert (await living.refused(11)).retry_after_s == pytest.approx(0.2)
    assert await lost.limiter.renew() == 0


async def test_a_settle_whose_record_is_gone_is_debited_all_the_same(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    caller = Caller(redis, principal(key=limits(tokens=600)))
    admission = await caller.admitted(10)
    await redis.delete(f"tollgate:{{org_a}}:lease:{admission.lease_id}")
    done = await caller.limiter.settle(admission, of(100))
    assert done == Settlement.LATE
    assert (await caller.refused(1)).retry_after_s == pytest.approx(1.1), "beside the reservation"


async def test_hundreds_of_lost_leases_leave_no_slot_behind(
    redis: redis.asyncio.Redis, clock: Clock
) -> None:
    lost = Caller(redis, principal(org=limits(streams=600)))
    await asyncio.gather(*(lost.admitted(1) for _ in range(600)))
    await lost.refused(1)
    await clock.set(limiter.LEASE_TTL_S + 1)
    caller = Caller(redis, principal(org=limits(streams=600), key_id="key_b"))
    admissions = [await caller.admitted(1) for _ in range(3)]
    for admission in admissions:
        await caller.limiter.void(admission)
    assert await redis.keys("*:org:*") == [] and await redis.keys("*:leases") == []


async def test_an_idle_organization_is_forgotten(redis: redis.asyncio.Redis) -> None:
    caller = Caller(redis, principal(key=limits(tokens=60_000), org=limits(requests=60_000)))
    for _ in range(10):
        await caller.limiter.settle(await caller.admitted(50), of(9))
    await asyncio.sleep(0.6)
    left = await redis.keys("*:lease:*")
    assert len(await redis.keys("*")) == 10 + len(EPOCHS)
    assert len(left) == 10 and all(b"{org_a}:lease:" in key for key in left)
    ttls = [await redis.ttl(key) for key in left]
    assert all(0 < ttl <= 900 for ttl in ttls)


async def test_all_keys_of_an_organization_share_one_slot(redis: redis.asyncio.Redis) -> None:
    plan = limits(tokens=600, requests=600, streams=9)
    caller = Caller(redis, principal(key=plan, project=plan, org=plan))
    await caller.admitted(1)
    names = await redis.keys("*{*")
    assert len(names) == 6 and all(b"{org_a}" in name for name in names)


async def test_leases_are_renewed_in_the_background(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "RENEW_INTERVAL_S", 0.05)
    monkeypatch.setattr(limiter, "RENEW_BATCH", 2)
    caller = Caller(redis, principal(key=limits(streams=9)))
    await caller.limiter.start()
    for _ in range(5):
        await caller.admitted(1)
    name = "tollgate:{org_a}:leases"
    before: Any = await redis.zrangebyscore(name, "-inf", "+inf", withscores=True)
    first_s = max(expiry for _, expiry in before)
    async with asyncio.timeout(30):
        while await redis.zcount(name, "-inf", first_s) > 0:
            await asyncio.sleep(0.02)
    await caller.limiter.close()
    assert len(before) == 5


async def test_without_limits_redis_is_not_asked() -> None:
    nowhere = redis.asyncio.from_url("redis://127.0.0.1:1")
    caller = Caller(nowhere, principal())
    admission = await caller.admitted(10**6)
    assert admission.state == {} and to_headers(admission.state) == {}
    settled = await caller.limiter.settle(admission, of(5))
    assert settled == Settlement.UNLIMITED
    assert await caller.limiter.void(admission) == Settlement.UNLIMITED
    await nowhere.aclose()


async def test_a_redis_that_forgot_the_scripts_is_given_them_again(
    redis: redis.asyncio.Redis,
) -> None:
    caller = Caller(redis, principal(key=limits(tokens=600)))
    admission = await caller.admitted(1)
    await redis.script_flush()
    assert await caller.limiter.void(admission) == Settlement.SETTLED


async def test_the_reservation_follows_what_the_key_writes(redis: redis.asyncio.Redis) -> None:
    gate, who = Limiter(redis), principal(key=limits(tokens=10**7))

    async def reserved(number: int, max_output_tokens: int) -> Admission:
        verdict = await gate.admit(
            who,
            "m",
            input_tokens=100,
            max_output_tokens=max_output_tokens,
            lease_id=f"lease-{number}",
        )
        assert isinstance(verdict, Admission)
        return verdict

    assert (await reserved(-1, 10)).reserved.tokens == 110
    for number in range(20):
        admission = await reserved(number, 100_000)
        known = number >= expected_output.MIN_SAMPLES
        assert admission.reserved.tokens == 100 + (7 if known else UNKNOWN_OUTPUT_TOKENS)
        await gate.settle(admission, Units(input_tokens=100, output_tokens=7))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_what_remains_passes_and_not_one_more(redis_server_url: str, sizes: list[int]) -> None:
    async def check() -> None:
        store = redis.asyncio.from_url(redis_server_url)
        await store.flushdb()
        await store.set(CLOCK_KEY, START_US)
        caller = Caller(store, principal(key=limits(tokens=601)))
        remaining = burst(601)
        for size in sizes:
            verdict = await caller.admit(size)
            assert isinstance(verdict, Admission) == (size <= remaining)
            window = verdict.state["tokens"]
            remaining -= size if isinstance(verdict, Admission) else 0
            assert remaining - 1 <= window.remaining <= remaining, "costs are rounded up"
            remaining = window.remaining
        await store.aclose()

    with pytest.MonkeyPatch.context() as patched:
        move_clock(patched)
        asyncio.run(check())
