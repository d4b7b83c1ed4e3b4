"""A Redis that is killed, with its data and without: nobody is refused for it, nobody gets more
than is stated, and what was used meanwhile is taken once."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.home import Home
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Settlement, Units, burst, scopes_of
from gateway.limits.redis import outage
from gateway.limits.redis.data_loss import EverUsed, never
from gateway.limits.redis.local_buckets import BURST_PARTS, SHARE, LocalBuckets
from gateway.principal import Plan, Principal
from gateway.processes import embedded_databases as embedded
from tests.scratch import make_scratch

TPM = 60_000
PLAN = Plan(name="p", tokens_per_minute=TPM)


def caller(plan: Plan = PLAN) -> Principal:
    return Principal(
        org_id="org_a",
        project_id="proj_a",
        key_id="key_a",
        key_hint="",
        scopes=frozenset(),
        org_plan=plan,
    )


class Store:
    """A Valkey of the test's own, to be killed."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.url = embedded.redis_url(home)

    async def start(self, *, empty: bool = False) -> None:
        if empty:
            for path in (self.home.redis).glob("**/*"):
                if path.is_file() and path.suffix in (".aof", ".rdb", ".manifest"):
                    path.unlink()
        self.server = await embedded.start_redis(self.home, durable=True)

    async def stop(self) -> None:
        await self.server.stop(30)

    def client(self) -> redis.asyncio.Redis:
        return redis.asyncio.from_url(self.url, retry=Retry(NoBackoff(), 0), socket_timeout=2.0)


@pytest.fixture(scope="module")
def patient_with_stores() -> None:
    """Nobody waits longer than in a product."""


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    home = Home(make_scratch())
    home.create()
    made = Store(home)
    await made.start()
    yield made
    await made.stop()
    shutil.rmtree(home.root)


NewLimiter = Callable[..., Limiter]


@pytest.fixture
async def new_limiter(store: Store) -> AsyncIterator[NewLimiter]:
    clients, limiters = [], []

    def make(**options: object) -> Limiter:
        clients.append(store.client())
        limiters.append(Limiter(clients[-1], **options))  # type: ignore[arg-type]
        return limiters[-1]

    yield make
    for limiter in limiters:
        await limiter.close()
    for client in clients:
        await client.aclose()


number = iter(range(1_000_000))


async def ask(limiter: Limiter, tokens: int, who: Principal | None = None) -> Admission | Refusal:
    return await limiter.admit(
        who or caller(),
        "m",
        input_tokens=tokens,
        max_output_tokens=0,
        lease_id=f"lease-{next(number)}",
    )


async def passed(limiter: Limiter, tokens: int, times: int) -> int:
    verdicts = [await ask(limiter, tokens) for _ in range(times)]
    return sum(each.reserved.tokens for each in verdicts if isinstance(each, Admission))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


async def held(limiter: Limiter) -> int:
    """Tokens missing of the org's bucket."""
    verdict = await ask(limiter, 0)
    assert "tokens" in verdict.state
    if isinstance(verdict, Admission):
        await limiter.void(verdict)
    return burst(TPM) - verdict.state["tokens"].remaining


async def test_while_redis_is_away_each_gateway_passes_its_share_and_no_more(
    store: Store, new_limiter: NewLimiter
) -> None:
    gateways = [new_limiter(num_gateways=2) for _ in range(2)]
    for gateway in gateways:
        assert isinstance(await ask(gateway, 1), Admission)
    await store.stop()
    started = time.monotonic()
    amounts = [await passed(gateway, 10, 300) for gateway in gateways]
    elapsed_s = time.monotonic() - started
    share = burst(TPM) * SHARE / 2 / BURST_PARTS
    for amount in amounts:
        assert share - 10 <= amount <= share + elapsed_s * TPM / 60 * SHARE / 2 + 10
    refused = await ask(gateways[0], 900)
    assert isinstance(refused, Refusal) and refused.retry_after_s is not None
    never = await ask(gateways[0], TPM + 1)
    assert isinstance(never, Refusal) and never.retry_after_s is None
    await store.start()


async def test_what_was_passed_meanwhile_is_taken_once_when_redis_is_back(
    store: Store, new_limiter: NewLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = new_limiter()
    assert isinstance(await ask(limiter, 1), Admission)
    await store.stop()
    amount = await passed(limiter, 100, 30)
    probe, lost = limiter._scripts.probe, 2

    async def answers_are_lost(name: str, keys: list[str], asked: object) -> object:
        nonlocal lost
        answer = await probe(name, keys, asked)
        if name == "debit" and lost:
            lost -= 1
            raise outage.LimiterUnavailable("the answer was lost")
        return answer

    monkeypatch.setattr(limiter._scripts, "probe", answers_are_lost)
    started = time.monotonic()
    await store.start()
    await until(lambda: not limiter._scripts.is_away)
    assert not lost
    missing = await held(limiter)
    refilled = (time.monotonic() - started + 1) * TPM / 60
    assert amount - refilled <= missing <= amount + 1


async def test_settles_of_meanwhile_follow(store: Store, new_limiter: NewLimiter) -> None:
    limiter = new_limiter()
    before = [await ask(limiter, 1000) for _ in range(3)]
    assert all(isinstance(each, Admission) for each in before)
    await asyncio.sleep(1.2)  # what Redis has heard of is on its disk by then
    await store.stop()
    for each in before:
        assert isinstance(each, Admission)
        assert await limiter.settle(each, Units(input_tokens=1)) is Settlement.DEFERRED
    during = await ask(limiter, 100)
    assert isinstance(during, Admission) and during.is_local
    assert await limiter.settle(during, Units(input_tokens=100)) is Settlement.SETTLED
    await store.start()
    await until(lambda: not limiter._scripts.is_away and not limiter._outage._deferred)
    assert await held(limiter) <= 103
    for each in before:
        assert isinstance(each, Admission)
        assert await limiter.settle(each, Units(input_tokens=1)) is Settlement.REPLAYED


async def test_a_request_that_outlives_the_outage_is_debited_in_full(
    store: Store, new_limiter: NewLimiter
) -> None:
    limiter = new_limiter()
    assert isinstance(await ask(limiter, 1), Admission)
    await store.stop()
    during = await ask(limiter, 100)
    assert isinstance(during, Admission)
    await store.start()
    await until(lambda: not limiter._scripts.is_away)
    used, started = Units(input_tokens=100, output_tokens=7900), time.monotonic()
    assert await limiter.settle(during, used) is Settlement.LATE
    missing = await held(limiter)
    refilled = (time.monotonic() - started) * TPM / 60 + 100
    assert 7900 - refilled <= missing <= 7900, "what it had reserved was debited before"


async def test_the_first_failure_opens_the_circuit_and_one_probe_at_a_time_closes_it(
    store: Store, new_limiter: NewLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = new_limiter()
    probe, probing, most, calls = limiter._scripts.probe, 0, 0, 0

    async def counted(name: str, keys: list[str], asked: object) -> object:
        nonlocal probing, most, calls
        calls, probing = calls + 1, probing + 1
        most = max(most, probing)
        try:
            return await probe(name, keys, asked)
        finally:
            probing -= 1

    assert isinstance(await ask(limiter, 1), Admission)
    await store.stop()
    assert isinstance(await ask(limiter, 1), Admission)
    monkeypatch.setattr(limiter._scripts, "probe", counted)
    started = time.monotonic()
    for _ in range(500):
        await ask(limiter, 1)
    assert most <= 1 and calls <= 2 + (time.monotonic() - started) / outage.FIRST_PROBE_S
    await store.start()
    await until(lambda: not limiter._scripts.is_away)


async def it_was() -> bool:
    return True


async def nobody_can_say() -> bool:
    raise OSError("Postgres is away")


@pytest.mark.parametrize(
    ("ever_used", "is_full"), [(it_was, False), (nobody_can_say, False), (never, True)]
)
async def test_a_redis_that_comes_back_empty_does_not_read_as_full_buckets(
    store: Store,
    new_limiter: NewLimiter,
    ever_used: EverUsed,
    is_full: bool,
) -> None:
    limiter = new_limiter(ever_used=ever_used)
    await store.stop()
    await store.start(empty=True)
    started = time.monotonic()
    amount = await passed(limiter, 100, 110)
    elapsed_s = time.monotonic() - started
    if is_full:
        assert amount >= burst(TPM) - 100
    else:
        assert amount <= elapsed_s * TPM / 60 + 100, "it refills from nothing"


async def test_streams_that_redis_has_forgotten_take_their_slots_again(
    store: Store, new_limiter: NewLimiter
) -> None:
    limiter, who = new_limiter(), caller(Plan(name="p", max_concurrent_streams=2))
    running = [await ask(limiter, 1, who) for _ in range(2)]
    assert isinstance(await ask(limiter, 1, who), Refusal)
    await store.stop()
    await store.start(empty=True)
    await until(lambda: not limiter._scripts.is_away)
    await ask(limiter, 1, caller(Plan(name="q", tokens_per_minute=60)))  # notices the outage
    await until(lambda: not limiter._scripts.is_away)
    await limiter.renew()
    assert isinstance(await ask(limiter, 1, who), Refusal)
    for each in running:
        assert isinstance(each, Admission)
        assert await limiter.settle(each, Units(input_tokens=1)) is Settlement.SETTLED
    assert isinstance(await ask(limiter, 1, who), Admission)


async def test_gateways_count_each_other_by_the_time_of_redis(new_limiter: NewLimiter) -> None:
    """The gateways' own clocks make no difference."""
    gateways = [new_limiter(), new_limiter(clock=lambda: 0.0), new_limiter(num_gateways=8)]
    for gateway in gateways:
        await gateway.count_gateways()
    await gateways[0].count_gateways()
    assert [each._local.num_gateways for each in gateways] == [3, 2, 8]


def test_a_local_bucket_refills_at_its_share_and_takes_back_what_was_not_used() -> None:
    now_s = 0.0
    local = LocalBuckets(clock=lambda: now_s)
    scopes = scopes_of(
        caller(Plan(name="p", tokens_per_minute=6000, max_concurrent_streams=1)), "m", "interactive"
    )
    keys, full = ["k"], int(burst(6000) * SHARE / BURST_PARTS)

    def admit(tokens: int) -> float | None:
        """The wait; 0: admitted."""
        refused = local.admit(keys, scopes, Units(input_tokens=tokens).by_letter(requests=1))
        return 0.0 if refused is None else refused.wait_s

    assert admit(full) == 0.0
    assert admit(1) == 1.0, "one stream"
    taken = Units(input_tokens=full).by_letter(requests=1)
    local.settle(keys, scopes, taken, Units(input_tokens=full // 2).by_letter(requests=1))
    assert admit(full // 2) == 0.0
    local.settle(keys, scopes, Units().by_letter(), Units().by_letter())
    assert admit(80) == pytest.approx(80 / (100 * SHARE))
    now_s += 80 / (100 * SHARE)
    assert admit(80) == 0.0
    assert sum(grant.least for grant in local.grants()["k"]) == full


@pytest.mark.parametrize("away_s", [0.5, 3, 10, 20, 60])
def test_what_redis_refilled_while_it_was_used_here_is_posted(away_s: float) -> None:
    """Two gateways let pass all they may, of a bucket that was empty when Redis went away."""
    now_s, rate, amount = 0.0, 100, 10
    gateways = [LocalBuckets(clock=lambda: now_s) for _ in range(2)]
    scopes = scopes_of(caller(Plan(name="p", tokens_per_minute=60 * rate)), "m", "interactive")
    units = Units(input_tokens=amount).by_letter(requests=1)
    passed = 0
    for gateway in gateways:
        gateway.num_gateways = 2
        gateway.begins()
    for step in range(int(away_s * 50)):
        now_s = step / 50
        for gateway in gateways:
            while gateway.admit(["k"], scopes, units) is None:
                passed += amount
    now_s = away_s
    grants = [grant for gateway in gateways for grant in gateway.grants()["k"]]
    full = burst(60 * rate)
    lacking = max(0, full - rate * away_s) + sum(grant.most for grant in grants)
    exactly = max(0, full + passed - rate * away_s)
    assert exactly - 2 <= lacking <= exactly + full * SHARE / BURST_PARTS
    assert sum(grant.least for grant in grants) <= full * SHARE / BURST_PARTS
    for gateway in gateways:
        gateway.taken("k", gateway.grants()["k"])
        assert gateway.grants() == {}
        many = Units(input_tokens=5 * amount).by_letter(requests=1)
        assert gateway.admit(["k"], scopes, many) is not None, "and lets pass no more for it"


@pytest.mark.nightly
async def test_a_short_outage_of_one_that_had_used_all_gives_nothing_away(
    store: Store, new_limiter: NewLimiter
) -> None:
    """A bucket is empty, Redis goes and comes back with its data: in all of that time no more
    passes than the bound."""
    limiter = new_limiter()
    started = time.monotonic()
    amount = await passed(limiter, 100, 101)
    await store.stop()
    while time.monotonic() < started + 5:
        amount += await passed(limiter, 100, 1)
        await asyncio.sleep(0.02)
    await store.start()
    await until(lambda: not limiter._scripts.is_away)
    amount += await passed(limiter, 100, 50)
    elapsed_s = time.monotonic() - started
    bound = burst(TPM) * (1 + SHARE / BURST_PARTS) + elapsed_s * TPM / 60
    assert burst(TPM) < amount <= bound
