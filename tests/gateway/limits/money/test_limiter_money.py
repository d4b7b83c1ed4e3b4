"""Hard caps on spending in a real Valkey: the worst case is held, the actual settled, and what
Redis forgets comes back from the books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis.asyncio

from gateway.http_errors.table import to_http_error
from gateway.inference.generate import RateLimited
from gateway.limits import counters
from gateway.limits.counters import SpentUnknown
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Settlement, Units
from gateway.limits.redis.outage_spending import COMFORT, HEARD_S, OutageSpending
from gateway.limits.spending import UnpricedModel, counter_of
from gateway.principal import Plan, Principal, SpendCap
from tests.gateway.limits.limiter_oracle import CLOCK_KEY, move_clock
from tests.gateway.limits.money.money_books import ORG, PRICES, PROJECT, BooksOfATest, who

NOON = 2_110_708_800.0
"""2036-11-19 12:00:00 UTC."""
DAY_KEY = f"tollgate:{{{ORG}}}:spent:org:{ORG}:day:2036-11-19"
number = iter(range(1_000_000))


def cap(amount_nano: int, scope: Any = "org", owner: str = ORG, period: Any = "day") -> SpendCap:
    return SpendCap(scope, owner, period, amount_nano)


class LimitedGateway:
    """One gateway, at NOON."""

    def __init__(self, store: redis.asyncio.Redis, books: BooksOfATest, **options: Any) -> None:
        self.store, self.books = store, books
        self.limiter = Limiter(store, books=books, grace_s=0, clock=lambda: NOON, **options)

    async def ask(
        self,
        principal: Principal,
        input_tokens: int,
        output_tokens: int,
        *,
        given: bool = True,
        choices: int = 1,
        prices: Any = PRICES,
    ) -> Admission | Refusal:
        return await self.limiter.admit(
            principal,
            "m",
            input_tokens=input_tokens,
            max_output_tokens=output_tokens,
            lease_id=f"lease-{next(number)}",
            prices=prices,
            min_output_tokens=0 if given else choices,
            admitted_at=NOON,
        )

    async def admitted(self, *args: Any, **options: Any) -> Admission:
        verdict = await self.ask(*args, **options)
        assert isinstance(verdict, Admission)
        return verdict

    async def refused(self, *args: Any, **options: Any) -> Refusal:
        verdict = await self.ask(*args, **options)
        assert isinstance(verdict, Refusal)
        return verdict

    async def counted(self, key: str = DAY_KEY) -> int:
        return int(await self.store.hget(key, "n") or -1)


@pytest.fixture
def books() -> BooksOfATest:
    return BooksOfATest()


@pytest.fixture
def desk(redis: redis.asyncio.Redis, books: BooksOfATest) -> LimitedGateway:
    return LimitedGateway(redis, books)


async def test_the_worst_case_is_held_and_what_it_cost_is_settled(desk: LimitedGateway) -> None:
    """100 tokens at the dearest input and 20 at the output's price: 300 + 210 nano."""
    caller = who(cap(1000))
    first = await desk.admitted(caller, 100, 20)
    assert await desk.counted() == 510
    refused = await desk.refused(caller, 100, 20)
    assert (refused.kind, refused.limit, refused.retry_after_s) == ("money", 1000, None)
    assert (refused.scope, refused.period) == ("org", "day")
    assert await desk.counted() == 510, "a refusal consumes nothing"
    await desk.admitted(caller, 100, 18)
    assert await desk.limiter.settle(first, Units(output_tokens=3, cost_nano=32)) is (
        Settlement.SETTLED
    )
    assert await desk.counted() == 489 + 32
    assert await desk.limiter.settle(first, Units(cost_nano=500)) is Settlement.REPLAYED
    assert await desk.counted() == 489 + 32
    voided = await desk.admitted(caller, 1, 1)
    await desk.limiter.void(voided)
    assert await desk.counted() == 489 + 32


async def test_a_refusal_by_another_limit_holds_no_money(desk: LimitedGateway) -> None:
    caller = who(cap(10_000), cap(5_000, "key", "key_a", "total"))
    limited = msgspec.structs.replace(caller, key_plan=Plan(name="p", requests_per_minute=1))
    await desk.admitted(limited, 10, 10)
    held = await desk.counted()
    assert (await desk.refused(limited, 10, 10)).kind == "requests"
    assert await desk.counted() == held
    too_much = await desk.refused(caller, 10, 1000)
    assert (too_much.kind, too_much.scope, too_much.period) == ("money", "key", "total")


async def test_who_does_not_say_how_much_may_write_what_is_left(desk: LimitedGateway) -> None:
    """The input is 300 of 1000 nano; 66 tokens cost 693, one more would not fit."""
    caller = who(cap(1000))
    admission = await desk.admitted(caller, 100, 5000, given=False)
    assert admission.max_output_tokens == 66 and await desk.counted() == 993
    assert (await desk.refused(caller, 1, 5000, given=False)).kind == "money"
    await desk.limiter.settle(admission, Units(cost_nano=400))
    three = await desk.admitted(caller, 100, 5000, given=False, choices=3)
    assert three.max_output_tokens == 27 and 27 * 10.5 <= 300 < 30 * 10.5
    await desk.limiter.void(three)
    assert (await desk.refused(caller, 190, 5000, given=False, choices=3)).kind == "money", (
        "not a token for each choice"
    )
    whole = await desk.admitted(caller, 100, 20, given=False)
    assert whole.max_output_tokens == 20, "all of it fits"


async def test_without_a_price_nobody_could_bound_it(desk: LimitedGateway) -> None:
    for prices in ({}, {"output": PRICES["output"]}):
        with pytest.raises(UnpricedModel) as raised:
            await desk.ask(who(cap(1000)), 1, 1, prices=prices)
        http_error = to_http_error(raised.value)
        assert (http_error.status, http_error.body.code, http_error.body.param) == (
            400,
            "model_without_price",
            "model",
        )
    assert isinstance(await desk.ask(who(), 1, 1, prices={}), Admission)


async def test_what_was_overspent_reads_as_a_quota_that_waiting_does_not_refill(
    desk: LimitedGateway,
) -> None:
    http_error = to_http_error(RateLimited(await desk.refused(who(cap(1_500_000_000)), 1, 10**9)))
    assert (http_error.status, http_error.body.type, http_error.body.code) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
    )
    assert (
        "retry-after" not in http_error.headers and http_error.headers["x-should-retry"] == "false"
    )
    assert http_error.body.message == (
        "What this org may spend today (UTC) does not allow this request: 1.5 USD, of which 1.5 USD"
        " are neither spent nor held by requests that run. The period ends at 2036-11-20T00:00:00Z."
        " With a lower max_tokens it may fit."
    )


async def test_a_refusal_says_what_is_left_and_whether_less_would_fit(desk: LimitedGateway) -> None:
    async def said(caller: Principal, *args: Any, **options: Any) -> str:
        return to_http_error(RateLimited(await desk.refused(caller, *args, **options))).body.message

    month, total = who(cap(1000, period="month")), who(cap(1000, "key", "key_a", "total"))
    await desk.admitted(month, 100, 20)
    told = await said(month, 100, 20)
    assert "in this month (UTC)" in told and "0.000001 USD, of which 0.00000049 USD" in told
    assert "ends at 2036-12-01T00:00:00Z. With a lower max_tokens" in told
    for asked in (
        (160, 1, {}),
        (160, 50, {"given": False}),
        (150, 50, {"given": False, "choices": 4}),
    ):
        *counts, options = asked
        assert "max_tokens" not in await said(month, *counts, **options), (
            "the input alone is too much"
        )
    told = await said(total, 400, 1)
    assert "this key may spend in all" in told and "ends at" not in told


async def test_a_counter_begins_with_what_the_books_say(
    desk: LimitedGateway, books: BooksOfATest
) -> None:
    books.ingest("old", "key_b", 700, NOON)
    books.ingest("yesterday", "key_b", 9000, NOON - 86_400)
    caller = who(cap(1000), cap(10_000, period="month"))
    assert isinstance(await desk.ask(caller, 100, 1), Refusal)
    await desk.admitted(caller, 50, 1)
    assert await desk.counted() == 700 + 161
    month = f"tollgate:{{{ORG}}}:spent:org:{ORG}:month:2036-11-01"
    assert await desk.counted(month) == 9700 + 161
    assert books.asked == 1
    left = await desk.store.pexpiretime(DAY_KEY) / 1000
    assert left == NOON + 12 * 3600 + 2 * 86_400, "it outlives its day"
    assert await desk.store.pexpiretime(month) / 1000 == NOON + 11.5 * 86_400 + 2 * 86_400


async def test_many_who_find_it_missing_build_it_once(
    redis: redis.asyncio.Redis, books: BooksOfATest
) -> None:
    desks = [LimitedGateway(redis, books) for _ in range(3)]
    books.ingest("old", "key_a", 400, NOON)
    caller = who(cap(1000))
    asked = [each.ask(caller, 10, 2) for each in desks for _ in range(20)]
    verdicts = await asyncio.gather(*asked)
    assert sum(isinstance(each, Admission) for each in verdicts) == 600 // 51
    assert books.asked <= len(desks)


async def test_until_it_is_built_nothing_passes(
    desk: LimitedGateway, books: BooksOfATest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object) -> None:
        raise OSError("Postgres is away")

    monkeypatch.setattr(books, "spent", gone)
    with pytest.raises(SpentUnknown) as raised:
        await desk.ask(who(cap(1000)), 1, 1)
    assert to_http_error(raised.value).status == 503
    monkeypatch.undo()
    await desk.admitted(who(cap(1000)), 1, 1)


async def test_after_a_loss_it_waits_for_what_other_gateways_hold(
    redis: redis.asyncio.Redis, books: BooksOfATest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for interval in ("WATCH_S", "IDLE_WATCH_S"):
        monkeypatch.setattr(f"gateway.limits.limiter.{interval}", 0.05)

    async def it_was() -> bool:
        return True

    options: Any = {"books": books, "ever_used": it_was, "clock": lambda: NOON}
    one, other = (Limiter(redis, grace_s=0.4, **options) for _ in range(2))
    await one.start()
    await other.start()
    caller, ask = who(cap(1000)), {"input_tokens": 100, "prices": PRICES, "admitted_at": NOON}
    running = await one.admit(caller, "m", max_output_tokens=20, lease_id="running", **ask)
    assert isinstance(running, Admission)
    await redis.flushdb()
    started = time.monotonic()
    verdict = await other.admit(caller, "m", max_output_tokens=20, lease_id="second", **ask)
    assert time.monotonic() - started > 0.3
    assert isinstance(verdict, Refusal), "the first one holds half of it"
    await one.settle(running, Units(cost_nano=100))
    assert int(await redis.hget(DAY_KEY, "n")) == 100
    await one.close()
    await other.close()


async def test_an_expired_lease_gives_back_what_it_is_not_known_to_have_used(
    redis: redis.asyncio.Redis, books: BooksOfATest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway dies; what it wrote by its last renewal stays spent, a late settle takes the
    difference, and one more changes nothing."""
    move_clock(monkeypatch)
    await redis.set(CLOCK_KEY, int(NOON * 1_000_000))
    caller = who(cap(1000))
    dead, other = LimitedGateway(redis, books), LimitedGateway(redis, books)
    admission = await dead.admitted(caller, 100, 20)
    dead.limiter.progress(admission, Units(input_tokens=100, output_tokens=4))
    await dead.limiter.renew()
    assert await other.counted() == 510
    await redis.set(CLOCK_KEY, int((NOON + 61) * 1_000_000))
    await other.limiter.void(await other.admitted(caller, 0, 0))
    assert await other.counted() == 342, "300 of input and 42 of output, at the dearest"
    settle = other.limiter.settle_lease
    used = Units(input_tokens=100, output_tokens=7, cost_nano=274)
    late = await settle(ORG, admission.lease_id, used)
    assert late is Settlement.LATE and await other.counted() == 274
    again = await settle(ORG, admission.lease_id, used)
    assert again is Settlement.REPLAYED and await other.counted() == 274


async def test_what_ran_before_there_was_a_cap_counts_once_it_is_booked(
    desk: LimitedGateway, books: BooksOfATest
) -> None:
    before = await desk.admitted(who(), 100, 20)
    caller = who(cap(1000))
    await desk.limiter.void(await desk.admitted(caller, 0, 0))
    await desk.limiter.settle(before, Units())
    event = books.ingest(before.lease_id, "key_a", 333, NOON)
    for _ in range(2):
        await desk.limiter.counters.book([event])
        assert await desk.counted() == 333


async def test_what_redis_cannot_be_told_of_it_hears_later(
    desk: LimitedGateway, books: BooksOfATest, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.admitted(who(cap(1000)), 0, 0)
    scripts = desk.limiter._scripts
    scripts.is_away = True
    await desk.limiter.counters.book([books.ingest("e", "key_a", 7, NOON)])
    assert await desk.counted() == 0
    scripts.is_away = False
    await desk.limiter.counters.book_the_rest()
    assert await desk.counted() == 7
    monkeypatch.setattr(counters, "MAX_UNBOOKED", 2)
    scripts.is_away = True
    await desk.limiter.counters.book([books.ingest(f"e{n}", "key_a", 1, NOON) for n in range(5)])
    scripts.is_away = False
    await desk.limiter.counters.book_the_rest()
    assert await desk.counted() == 9


async def test_while_redis_is_away_only_what_is_comfortable_passes(
    redis: redis.asyncio.Redis, books: BooksOfATest
) -> None:
    desk = LimitedGateway(redis, books, num_gateways=2)
    rich, poor = who(cap(100_000)), who(cap(1000, "key", "key_p", "total"), key_id="key_p")
    for caller in (rich, poor):
        await desk.limiter.void(await desk.admitted(caller, 0, 0))
    desk.limiter._scripts.is_away = True
    passed = 0
    with pytest.raises(SpentUnknown):
        while True:
            verdict = await desk.admitted(rich, 100, 20)
            assert verdict.is_local
            await desk.limiter.settle(verdict, Units(cost_nano=1))
            passed += 510
    assert 100_000 / COMFORT / 2 - 510 < passed <= 100_000 / COMFORT / 2
    with pytest.raises(SpentUnknown):
        await desk.ask(poor, 100, 20)
    stranger = who(cap(10**9, "project", PROJECT), key_id="key_s")
    with pytest.raises(SpentUnknown):
        await desk.ask(stranger, 1, 1)
    assert isinstance(await desk.ask(who(), 100, 20), Admission), "nobody capped it"
    desk.limiter._scripts.is_away = False


def test_what_was_left_long_ago_is_no_comfort() -> None:
    now_s = 0.0
    comfort = OutageSpending(clock=lambda: now_s)
    comfort.note(["a", "b"], [1000, 50])
    assert comfort.allows(["a"], 100, 1) and not comfort.allows(["a"], 101, 1)
    assert not comfort.allows(["a", "b"], 100, 1) and not comfort.allows(["a"], 100, 2)
    now_s = HEARD_S + 1
    assert not comfort.allows(["a"], 1, 1)


@pytest.fixture(params=["UTC", "America/New_York", "Pacific/Apia"])
def local_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the time zone that the gateway runs in."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


def test_periods_are_of_utc_wherever_the_gateway_runs(local_time: str) -> None:
    last = counter_of("org", ORG, "month", NOON + 40 * 86_400)
    assert last.key(ORG).endswith(":month:2036-12-01")
    assert last.end is not None and (last.end.year, last.end.month, last.end.day) == (2037, 1, 1)
    assert counter_of("org", ORG, "day", NOON + 12 * 3600 - 0.001).key(ORG) == DAY_KEY
    assert counter_of("org", ORG, "day", NOON + 12 * 3600).key(ORG) != DAY_KEY


async def test_what_was_settled_and_not_yet_booked_survives_the_loss_of_its_counter(
    desk: LimitedGateway, books: BooksOfATest
) -> None:
    caller = who(cap(1000))
    settled = await desk.admitted(caller, 100, 20)
    await desk.limiter.settle(settled, Units(cost_nano=200))
    await desk.store.delete(DAY_KEY)
    await desk.admitted(caller, 0, 0)
    assert await desk.counted() == 0, "the books do not have it yet"
    event = books.ingest(settled.lease_id, "key_a", 200, NOON)
    for _ in range(2):
        await desk.limiter.counters.book([event])
        assert await desk.counted() == 200
