"""A worker takes slices, uses them and gives them back: on a real Valkey, in a time that the test
moves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import redis.asyncio

from gateway.limits.counters import free_nano
from gateway.limits.limiter import LEASE_TTL_S, STEP_TOKENS
from gateway.limits.outcomes import Admission, Refusal, Settlement, Units, burst, scopes_of
from gateway.limits.redis.keys import org_keys
from gateway.limits.slices import slices
from gateway.limits.slices.ledger import IDLE_S, TTL_S, YOUNG_S
from gateway.limits.spending import counter_of
from gateway.principal import UNLIMITED, Plan, Principal, SpendCap
from tests.gateway.limits.limiter_oracle import move_clock
from tests.gateway.limits.money.money_books import PRICES
from tests.gateway.limits.slices.virtual_workers import (
    MAX_BACK_S,
    ORG,
    Worker,
    World,
    be_busy_at_once,
    caller,
)

TPM = 60_000
ORG_KEY = f"tollgate:{{{ORG}}}:org:{ORG}"
LEASES = f"tollgate:{{{ORG}}}:leases"


def who(plan: Plan | None = None, key: Plan = UNLIMITED) -> Principal:
    org = plan or Plan(name="p", tokens_per_minute=TPM, requests_per_minute=TPM)
    return caller("key_a", key=key, project=UNLIMITED, org=org)


@pytest.fixture
async def world(redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> World:
    move_clock(monkeypatch)
    be_busy_at_once(monkeypatch)
    monkeypatch.setattr(slices, "LONGEST_TICK_S", 0.0)  # each tick exchanges
    made = World(redis, 2)
    await made.begin()
    return made


async def admitted(
    world: World, worker: Worker, tokens: int = 10, asks: Principal | None = None, output: int = 0
) -> Admission:
    verdict = await world.ask(worker, asks or who(), tokens, output)
    assert isinstance(verdict, Admission), verdict
    return verdict


async def until_it_has_slices(world: World, worker: Worker, asks: Principal | None = None) -> None:
    for _ in range(20):
        await admitted(world, worker, asks=asks)
        await world.settle(world.requests[-1], 10)
    await world.live(0.15)
    assert (await admitted(world, worker, asks=asks)).is_of_slices
    await world.settle(world.requests[-1], 10)


async def slices_of(world: World, key: str = ORG_KEY) -> dict[str, Any]:
    found: dict[str, Any] = (await world.scope(key)).get("h") or {}
    return found


async def deficit(world: World) -> float:
    """Tokens that are used and have not refilled."""
    bucket = dict((await world.scope(ORG_KEY)).get("b") or {}).get("t") or {"f": 0}
    return max(0.0, (bucket["f"] - world.now_us) * TPM / 60_000_000)


async def test_a_busy_worker_asks_redis_for_few_of_its_requests(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    worker, probe = world.workers[0], world.workers[0].limiter._scripts.probe

    async def counted(name: str, keys: Any, asked: Any) -> Any:
        calls[name] += 1
        return await probe(name, keys, asked)

    monkeypatch.setattr(worker.limiter._scripts, "probe", counted)
    for _ in range(300):
        await admitted(world, worker)
        await world.settle(world.requests[-1], 8)
        await world.live(0.005)
    assert sum(calls.values()) <= 0.1 * 300 + 20, calls
    await world.live(IDLE_S + 0.3)
    refilled = (world.now_us - world.requests[0].at_us) * TPM / 60_000_000
    assert await deficit(world) == pytest.approx(300 * 8 - refilled, abs=0.7 * TPM / 60)


async def test_an_idle_worker_gives_all_back_within_a_second(world: World) -> None:
    worker = world.workers[0]
    await until_it_has_slices(world, worker)
    assert await slices_of(world)
    await world.live(0.95)
    assert await slices_of(world) == {} and not worker.slices._orgs


async def test_what_another_worker_lacks_is_given_back_before_it_is_refused(world: World) -> None:
    """A whole burst fits only if nobody holds a slice."""
    one, other = world.workers
    await until_it_has_slices(world, one)
    full = burst(TPM) - 400
    held = [await admitted(world, one, 1) for _ in range(3)]
    assert all(each.is_of_slices for each in held) and await slices_of(world)
    before_us = world.now_us
    assert not (await admitted(world, other, full)).is_of_slices
    assert world.now_us - before_us < 300_000, "it waited for a tick or two"
    assert (await world.scope(ORG_KEY))["z"] > world.now_us, "for a while nobody gets any"
    refusal = await world.ask(other, who(), burst(TPM))
    assert isinstance(refusal, Refusal), "and the limit is what it was"


async def test_what_died_with_a_worker_is_there_again_in_time(world: World) -> None:
    one, other = world.workers
    await until_it_has_slices(world, one)
    for _ in range(5):
        await admitted(world, one, 100)
    world.kill(one)
    await world.live(MAX_BACK_S)
    assert await slices_of(world) == {} or await deficit(world) == 0
    await admitted(world, other, burst(TPM))


async def test_a_request_that_lasts_becomes_a_lease_and_is_settled_with_others(
    world: World, redis: redis.asyncio.Redis
) -> None:
    worker = world.workers[0]
    await until_it_has_slices(world, worker)
    verdict = await admitted(world, worker, 100)
    assert verdict.is_of_slices and await redis.zcard(LEASES) == 0
    for _ in range(15):
        await admitted(world, worker, 1)
        await world.settle(world.requests[-1], 1)
        await world.live(YOUNG_S / 10)
    assert await redis.zcard(LEASES) == 1 and not worker.young()
    settle = worker.limiter.settle
    assert await settle(verdict, Units(input_tokens=40)) is Settlement.SETTLED
    assert await settle(verdict, Units(input_tokens=40)) is Settlement.REPLAYED
    await world.live(0.2)
    assert await redis.zcard(LEASES) == 0


async def test_a_request_of_no_tokens_becomes_a_lease_in_scopes_that_count_nothing_else(
    world: World, redis: redis.asyncio.Redis
) -> None:
    """It takes nothing of its key's slice, and is admitted and registered between two exchanges."""
    worker, asks = world.workers[0], who(key=Plan(name="k", tokens_per_minute=TPM))
    await until_it_has_slices(world, worker, asks)
    verdict = await admitted(world, worker, 0, asks)
    assert verdict.is_of_slices
    org = worker.slices._orgs[ORG]
    org.ledger.register([verdict.lease_id])
    await worker.slices.exchange(ORG)
    assert not worker.young() and await redis.zcard(LEASES) == 1
    assert await worker.limiter.void(verdict) is Settlement.SETTLED


async def test_a_stream_takes_its_steps_from_the_slice_and_then_from_redis(
    world: World, redis: redis.asyncio.Redis
) -> None:
    worker = world.workers[0]
    await until_it_has_slices(world, worker)
    verdict = await admitted(world, worker, 1)
    org = worker.slices._orgs[ORG]
    left = org.ledger.slices[ORG_KEY].held["t"].left
    steps, extend = 0, worker.limiter.extend
    while worker.young():
        given = await extend(verdict, output_tokens=STEP_TOKENS, used=Units(), resting=False)
        assert given.is_open and given.rest_s == 0
        steps += 1
    assert steps == left // STEP_TOKENS + 1 and await redis.zcard(LEASES) == 1
    used = Units(input_tokens=1, output_tokens=steps * STEP_TOKENS)
    assert await worker.limiter.settle(verdict, used) is Settlement.SETTLED
    await world.live(0.2)
    assert await deficit(world) >= used.tokens - 0.4 * TPM / 60


async def test_use_beyond_a_reservation_is_taken_all_the_same(world: World) -> None:
    worker = world.workers[0]
    await until_it_has_slices(world, worker)
    before = await deficit(world)
    verdict = await admitted(world, worker, 10)
    await worker.limiter.settle(verdict, Units(input_tokens=3_000))
    await world.live(0.15)
    assert await deficit(world) >= before + 3_000 - 0.2 * TPM / 60


async def test_dropped_slices_are_paid_and_their_requests_are_not_charged_again(
    world: World,
) -> None:
    """Redis goes away with an answer on its way, and comes back with all it knew."""
    worker = world.workers[0]
    await until_it_has_slices(world, worker)
    held = [await admitted(world, worker, 20) for _ in range(3)]
    assert all(each.is_of_slices for each in held)
    worker.mute = True
    await world.live(0.2)
    assert not worker.slices._orgs and len(worker.slices._covered) == 3
    for each in held:
        assert await worker.limiter.settle(each, Units(input_tokens=20)) is Settlement.DEFERRED
    await worker.join_again()
    await world.live(3.0)
    assert not worker.slices._covered
    taken = await deficit(world)
    assert taken <= burst(TPM) / 4, "what the slice was, and nothing beside it"


async def test_a_request_that_became_a_lease_unheard_is_charged_what_it_used(world: World) -> None:
    """The exchange that opened its lease was run, and its answer lost: what it reserved is in the
    lease, and not in the slice that counts as used."""
    worker = world.workers[0]
    await until_it_has_slices(world, worker)
    held = await admitted(world, worker, 200)
    worker.slices._orgs[ORG].ledger.register([held.lease_id])
    worker.mute = True
    await world.live(0.15)
    assert await world.store.zcard(LEASES) == 1
    assert await worker.limiter.settle(held, Units(input_tokens=200)) is Settlement.DEFERRED
    before = await deficit(world)
    await worker.join_again()
    assert await deficit(world) >= before + 200 - 1
    assert await world.store.zcard(LEASES) == 0


async def test_streams_of_a_worker_that_is_cut_off_keep_their_slots(world: World) -> None:
    """As they do when each has a lease; when it is back, each has one slot again."""
    one, other = world.workers
    asks = who(Plan(name="p", tokens_per_minute=TPM, max_concurrent_streams=40))
    await until_it_has_slices(world, one, asks)
    running = [await admitted(world, one, 1, asks) for _ in range(2)]
    assert all(each.is_of_slices for each in running)
    one.cut = True
    await world.live(TTL_S + 1.5)

    async def free_slots() -> int:
        found = []
        while isinstance(verdict := await world.ask(other, asks, 0), Admission):
            found.append(verdict)
        for each in found:
            await other.limiter.void(each)
        await world.live(0.2)
        return len(found)

    assert await free_slots() <= 38
    await one.join_again()
    assert await free_slots() == 38
    for each in running:
        await one.limiter.settle(each, Units())
    await world.live(0.2)
    assert await free_slots() == 40


async def test_it_says_why_slices_do_not_admit(world: World) -> None:
    worker, said = world.workers[0], list[str]()
    worker.limiter._on_slices = said.append
    await until_it_has_slices(world, worker)
    await admitted(world, worker, burst(TPM) // 2)
    smaller = who(Plan(name="q", tokens_per_minute=TPM // 2, requests_per_minute=TPM))
    await admitted(world, worker, asks=smaller)
    assert said[0] == "quiet" and said[-3:] == ["admitted", "short", "changed"]


async def test_headers_count_what_is_held_here_as_there(world: World) -> None:
    worker = world.workers[0]
    await until_it_has_slices(world, worker)
    first = await admitted(world, worker, 100)
    second = await admitted(world, worker, 200)
    assert first.is_of_slices and second.is_of_slices
    told = [each.state["tokens"].remaining for each in (first, second)]
    assert told[0] - told[1] == pytest.approx(200, abs=1)
    assert burst(TPM) - 800 < told[1] <= burst(TPM) - 300


async def test_people_see_what_runs_on_slices(world: World) -> None:
    worker = world.workers[0]
    plan = Plan(name="p", tokens_per_minute=TPM, max_concurrent_streams=80)
    await until_it_has_slices(world, worker, who(plan))
    for _ in range(3):
        await admitted(world, worker, 100, who(plan))
    await world.live(0.11)
    use = await worker.limiter.use_now(ORG, scopes_of(who(plan), "m", "interactive"))
    by_letter = {each.limit.letter: each for each in use.limits}
    assert use.num_running == by_letter["s"].used == 3
    assert by_letter["t"].held >= 300
    assert by_letter["t"].left + by_letter["t"].held <= burst(TPM)


async def test_a_changed_limit_is_decided_by_redis_until_slices_are_of_it(world: World) -> None:
    worker = world.workers[0]
    await until_it_has_slices(world, worker)
    smaller = who(Plan(name="q", tokens_per_minute=TPM // 2, requests_per_minute=TPM))
    assert not (await admitted(world, worker, asks=smaller)).is_of_slices
    for _ in range(30):
        await admitted(world, worker, 1, smaller)
        await world.settle(world.requests[-1], 1)
        await world.live(0.1)
    assert (await admitted(world, worker, 1, smaller)).is_of_slices


def capped(amount_nano: int, **named: Any) -> Principal:
    cap = SpendCap("key", "key_a", "total", amount_nano, **named)
    return msgspec.structs.replace(who(), spend_caps=(cap,))


COUNTER = counter_of("key", "key_a", "total", 0)
HOLD = 10 * 3 + -(-5 * 10_500 // 1000)
"""Nano-USD that each request may cost."""


async def spends(world: World, worker: Worker, asks: Principal, times: int = 1) -> Any:
    """Ask for what costs HOLD at most, `times` as much of it at once."""
    world.number += 1
    return await worker.limiter.admit(
        asks,
        "m",
        input_tokens=10 * times,
        max_output_tokens=5 * times,
        lease_id=f"paid-{world.number}",
        prices=PRICES,
    )


async def until_it_has_money(world: World, worker: Worker, asks: Principal) -> None:
    for _ in range(20):
        verdict = await spends(world, worker, asks)
        await worker.limiter.settle(verdict, Units(input_tokens=10, cost_nano=0))
    await world.live(0.15)
    verdict = await spends(world, worker, asks)
    assert verdict.is_of_slices
    await worker.limiter.settle(verdict, Units(input_tokens=10, cost_nano=0))


async def counted(world: World) -> int:
    return int(await world.store.hget(COUNTER.key(ORG), "n") or -1)


async def test_what_spends_under_a_cap_runs_on_slices_and_is_counted_once(world: World) -> None:
    worker, asks, of_slices = world.workers[0], capped(10**9), 0
    for number in range(40):
        verdict = await spends(world, worker, asks)
        of_slices += verdict.is_of_slices
        used = Units(input_tokens=10, cost_nano=40 + number)
        assert await worker.limiter.settle(verdict, used) is Settlement.SETTLED
        assert await worker.limiter.settle(verdict, used) is Settlement.REPLAYED
        await world.live(0.03)
    assert of_slices > 25
    free = free_nano(await world.store.hget(COUNTER.key(ORG), "h"), world.now_us)
    shown = await counted(world) - free
    await world.live(IDLE_S + 0.5)
    spent = sum(40 + each for each in range(40))
    assert await counted(world) == spent and shown <= spent + HOLD
    assert await world.store.zcard(LEASES) == 0, "nothing is held any more"


async def test_what_another_worker_holds_of_money_is_given_back_before_it_is_refused(
    world: World,
) -> None:
    """All that is left fits only if nobody holds a slice."""
    one, other = world.workers
    asks = capped(100 * HOLD)
    await until_it_has_money(world, one, asks)
    assert await counted(world) > 0 and await world.store.zcard(LEASES) == 1
    assert isinstance(await spends(world, other, asks, 97), Admission)
    assert isinstance(await spends(world, other, asks, 5), Refusal)
    assert await counted(world) <= 100 * HOLD


async def test_near_a_cap_each_request_is_asked_for_and_settled_at_once(world: World) -> None:
    worker, asks = world.workers[0], capped(20 * HOLD)
    await until_it_has_money(world, worker, asks)
    held = [await spends(world, worker, asks) for _ in range(18)]
    assert all(isinstance(each, Admission) for each in held)
    await world.live(0.15)
    last = [await spends(world, worker, asks) for _ in range(2)]
    assert not any(each.is_of_slices for each in last)
    assert isinstance(await spends(world, worker, asks), Refusal)
    await worker.limiter.settle(last[0], Units(cost_nano=0))
    assert isinstance(await spends(world, worker, asks), Admission), "what it left is there"


async def test_money_that_died_with_a_worker_is_held_as_long_as_a_lease(world: World) -> None:
    one, other = world.workers
    asks = capped(100 * HOLD)
    await until_it_has_money(world, one, asks)
    running = [await spends(world, one, asks) for _ in range(3)]
    assert any(each.is_of_slices for each in running)
    world.kill(one)
    await world.live(TTL_S + 1)
    assert await counted(world) >= 3 * HOLD
    assert isinstance(await spends(world, other, asks, 50), Admission), "below half all is there"
    await world.move(round(LEASE_TTL_S * 1_000_000))
    assert isinstance(await spends(world, other, asks, 100), Admission), "its lease expired, too"


async def test_a_booking_that_comes_first_is_counted_once(world: World) -> None:
    """The books know of a request before its worker has told Redis."""
    worker, asks = world.workers[0], capped(10**9)
    await until_it_has_money(world, worker, asks)
    verdict = await spends(world, worker, asks)
    assert verdict.is_of_slices
    await worker.limiter.settle(verdict, Units(input_tokens=10, cost_nano=50))
    posts = (verdict.lease_id, 50, world.now_us, world.now_us, [COUNTER.key(ORG)])
    await worker.limiter._scripts.call("book", org_keys(ORG), [posts])
    await world.live(IDLE_S + 0.5)
    assert await counted(world) == 50


async def test_money_of_a_balance_is_no_longer_used_than_it_is_leased(world: World) -> None:
    worker, asks = world.workers[0], capped(10**9, is_funded=True)
    key, served = COUNTER.key(ORG), list[bool]()
    worker.limiter.funds.serves = lambda of, *, is_low: served.append(is_low)  # type: ignore[method-assign]
    world.number += 1
    await worker.limiter.counters.build(ORG, [COUNTER], worker.limiter.renew)
    told = (1, 1000 * HOLD, 60_000_000, 900 * HOLD, {})
    await worker.limiter._scripts.call("fund", [*org_keys(ORG), key], told)
    await until_it_has_money(world, worker, asks)
    served.clear()
    held = await spends(world, worker, asks, 150)
    await world.live(0.15)
    assert True in served, "less is left than a top-up is due at"
    await worker.limiter.settle(held, Units(cost_nano=0))
    await worker.limiter._scripts.call("fund", [*org_keys(ORG), key], (2, 1000 * HOLD, 0, 0, {}))
    await spends(world, worker, asks)
    await world.live(0.15)
    assert not worker.slices._orgs[ORG].ledger.are_usable([key])
