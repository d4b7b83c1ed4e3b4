"""A stream takes in steps what it writes beyond its reservation, and waits where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
import redis.asyncio

from engine.protocol import Lane
from foundation.tasks import TaskSet
from gateway.limits import limiter
from gateway.limits.allowance import MIN_REST_S, Allowance
from gateway.limits.limiter import MAX_AHEAD_TOKENS, STEP_TOKENS, Limiter
from gateway.limits.outcomes import Admission, Refusal, Settlement, Units, burst
from gateway.limits.redis.scripts import LimiterUnavailable
from gateway.principal import Plan, Principal
from tests.gateway.limits.limiter_oracle import CLOCK_KEY, move_clock

START_US = 1_700_000_000_000_000
EXPECTED = 512
"""The output that is expected from a key without a history, in tokens."""


def caller(plan: Plan, **changes: object) -> Principal:
    anybody = Principal(
        org_id="org_a",
        project_id="proj_a",
        key_id="key_a",
        key_hint="",
        scopes=frozenset(),
        org_plan=plan,
    )
    return msgspec.structs.replace(anybody, **changes)


class World:
    """A limiter on a clock of the test's own, and the streams it has admitted."""

    def __init__(self, store: redis.asyncio.Redis, plan: Plan) -> None:
        self.store, self.plan = store, plan
        self.limiter = Limiter(store)
        self.tasks = TaskSet()
        self.now_s = 0.0
        self.sleepers: list[tuple[float, asyncio.Event]] = []
        self.number = 0

    async def at(self, seconds: float) -> None:
        """Go to a moment, and let everybody act who has waited for it."""
        self.now_s = seconds
        await self.store.set(CLOCK_KEY, START_US + round(seconds * 1_000_000))
        due = [each for each in self.sleepers if each[0] <= seconds]
        for each in due:
            self.sleepers.remove(each)
            each[1].set()
        await self.quiet()

    async def quiet(self) -> None:
        """Until all that can go on without the clock has."""
        async with asyncio.timeout(30):
            while len(self.tasks._tasks) > len(self.sleepers):
                await asyncio.sleep(0)

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self.sleepers.append((self.now_s + seconds, woken))
        await woken.wait()

    async def admit(
        self, input_tokens: int, max_output_tokens: int, lane: Lane = "interactive"
    ) -> Admission | Refusal:
        self.number += 1
        return await self.limiter.admit(
            caller(self.plan),
            "m",
            input_tokens=input_tokens,
            max_output_tokens=max_output_tokens,
            lease_id=f"lease-{self.number}",
            lane=lane,
        )

    async def stream(self, input_tokens: int, max_output_tokens: int = 100_000) -> Stream:
        verdict = await self.admit(input_tokens, max_output_tokens)
        assert isinstance(verdict, Admission)
        return Stream(self, verdict)


class Stream:
    """Writes a token whenever it is asked to, unless it rests."""

    def __init__(self, world: World, admission: Admission) -> None:
        self.admission = admission
        self.world = world
        self.allowance = Allowance(world.limiter, admission, world.tasks, sleep=world.sleep)
        self.written = 0
        self.written_at: list[float] = []
        self.resting = False
        self.rests = 0

    async def rest(self, resting: bool) -> None:
        self.resting = resting
        self.rests += resting

    def write(self) -> None:
        if self.resting or self.written >= self.admission.max_output_tokens:
            return
        self.written += 1
        self.written_at.append(self.world.now_s)
        self.allowance.note(self.used, self.rest)

    @property
    def used(self) -> Units:
        return Units(input_tokens=self.admission.reserved.input_tokens, output_tokens=self.written)

    async def settle(self) -> Settlement:
        self.allowance.end()
        return await self.world.limiter.settle(self.admission, self.used)


NewWorld = Callable[[Plan], World]


@pytest.fixture
async def new_world(redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> NewWorld:
    move_clock(monkeypatch)
    await redis.set(CLOCK_KEY, START_US)
    return lambda plan: World(redis, plan)


def most_in_a_minute(moments: list[float]) -> int:
    moments, first, most = sorted(moments), 0, 0
    for last, at in enumerate(moments):
        while moments[first] < at - 60:
            first += 1
        most = max(most, last - first + 1)
    return most


async def test_streams_that_never_end_stay_within_the_stated_bound(new_world: NewWorld) -> None:
    """Five streams write a hundred tokens a second each, for two minutes, on a limit of 50."""
    limit, num_streams = 3000, 5
    world = new_world(Plan(name="p", tokens_per_minute=limit))
    streams = [await world.stream(1)]
    for second in range(1, 60):  # one by one, as the bucket lets them in
        await world.at(second * 11)
        await world.limiter.renew()
        if len(streams) < num_streams and isinstance(
            admission := await world.admit(1, 100_000), Admission
        ):
            streams.append(Stream(world, admission))
    assert len(streams) == num_streams
    start_s = world.now_s
    for step in range(120 * 10):
        await world.at(start_s + step / 10)
        if step % 100 == 0:
            await world.limiter.renew()
        for stream in streams:
            for _ in range(10):
                stream.write()
            await world.quiet()
    written = [at for stream in streams for at in stream.written_at]
    # What each had reserved was counted at its admission, long ago.
    reserved = sum(stream.admission.reserved.output_tokens for stream in streams)
    bound = 2 * burst(limit) + limit + num_streams * MAX_AHEAD_TOKENS
    assert most_in_a_minute(written) <= reserved + bound
    late = [at for at in written if at > start_s + 60]
    assert most_in_a_minute(late) <= bound
    assert len(late) >= 0.9 * limit, "they get what there is"
    assert all(stream.rests for stream in streams)


class Upstreams(Stream):
    """Cannot be told to rest."""

    async def rest(self, resting: bool) -> None:
        self.rests += resting


async def test_what_upstreams_write_is_bounded_by_what_they_were_asked_for(
    new_world: NewWorld,
) -> None:
    """Four streams write what they may all at once, just after somebody has emptied the bucket."""
    limit, num_streams, max_tokens = 6000, 4, 3000
    world = new_world(Plan(name="p", tokens_per_minute=limit, max_concurrent_streams=num_streams))
    streams = []
    for position in range(num_streams):
        await world.at(position * 11)
        await world.limiter.renew()
        verdict = await world.admit(1, max_tokens)
        assert isinstance(verdict, Admission)
        streams.append(Upstreams(world, verdict))
    start_s = 60.0
    await world.at(start_s)
    await streams.pop().settle()  # its slot is for who takes the burst
    assert isinstance(burst_taken := await world.admit(burst(limit), 0), Admission)
    await world.limiter.settle(burst_taken, burst_taken.reserved)
    counted = [start_s] * burst(limit)
    for step in range(1, 120):
        await world.at(start_s + step / 10)
        for stream in streams:
            for _ in range(100):
                stream.write()
        await world.quiet()
    assert isinstance(await world.admit(1, 0), Refusal), "while there is debt nobody is let in"
    for stream in streams:
        assert stream.written == max_tokens and stream.rests
        counted += stream.written_at[stream.admission.reserved.output_tokens :]
        assert await stream.settle() is Settlement.SETTLED
    beyond = sum(max_tokens - stream.admission.reserved.output_tokens for stream in streams)
    most = most_in_a_minute(counted)
    assert most <= burst(limit) + limit + beyond
    assert most > 2 * burst(limit) + limit + len(streams) * MAX_AHEAD_TOKENS, "not the engine's"
    refused = await world.admit(1, 0)
    assert isinstance(refused, Refusal) and refused.retry_after_s is not None
    debt = beyond - (world.now_s - start_s) * limit / 60
    assert refused.retry_after_s == pytest.approx(debt / (limit / 60), abs=1), "it is all paid back"


async def test_a_stream_within_its_limits_never_rests(new_world: NewWorld) -> None:
    world = new_world(Plan(name="p", tokens_per_minute=60_000))
    stream = await world.stream(10, 5_000)
    for step in range(200):
        await world.at(step / 10)
        for _ in range(50):
            stream.write()
        await world.quiet()
    assert stream.written == 5_000 and not stream.rests
    await stream.settle()
    follower = await world.admit(1, 0)
    assert isinstance(follower, Admission) and "tokens" in follower.state
    deficit = burst(60_000) - follower.state["tokens"].remaining
    assert deficit == 1, "5,000 tokens in ten seconds are half of what has come back meanwhile"


async def test_a_rest_ends_when_the_debt_is_paid(new_world: NewWorld) -> None:
    world = new_world(Plan(name="p", output_tokens_per_minute=600))
    stream = await world.stream(10_000)
    for _ in range(600):
        stream.write()
    await world.quiet()
    assert stream.resting, "what one answer may be is one debt already"
    debt_s = (EXPECTED + STEP_TOKENS - burst(600)) / 10
    await world.at(debt_s - 0.1)
    assert stream.resting
    await world.at(debt_s + MIN_REST_S)
    assert not stream.resting and stream.rests == 1


async def test_what_was_asked_for_ahead_and_not_used_comes_back(new_world: NewWorld) -> None:
    world = new_world(Plan(name="p", tokens_per_minute=60_000))
    stream = await world.stream(10)
    for _ in range(EXPECTED + 10):
        stream.write()
    await world.quiet()
    assert await stream.settle() is Settlement.SETTLED
    follower = await world.admit(1, 0)
    assert isinstance(follower, Admission) and "tokens" in follower.state
    assert follower.state["tokens"].remaining == burst(60_000) - EXPECTED - 10 - 10 - 1


async def test_an_expired_lease_keeps_what_was_used_and_a_late_settle_adds_the_rest(
    new_world: NewWorld,
) -> None:
    """A gateway that is killed gives no tokens away: not when its leases expire, and not after."""
    world = new_world(Plan(name="p", tokens_per_minute=60_000, max_concurrent_streams=1))
    stream = await world.stream(100, 5_000)
    for _ in range(300):
        stream.write()
    await world.limiter.renew()
    for _ in range(100):
        stream.write()
    # the gateway dies here
    await world.at(limiter.LEASE_TTL_S)

    async def deficit() -> int:
        verdict = await World.admit(world, 0, 0)
        assert "tokens" in verdict.state
        if isinstance(verdict, Admission):
            await world.limiter.void(verdict)
        return burst(60_000) - verdict.state["tokens"].remaining

    assert await deficit() == 0, "400 tokens are long refilled"
    await world.limiter.admit(
        caller(world.plan), "m", input_tokens=9_000, max_output_tokens=0, lease_id="big"
    )
    late = Units(input_tokens=100, output_tokens=400)
    settle = world.limiter.settle_lease
    lease_id = stream.admission.lease_id
    assert await settle("org_a", lease_id, late) is Settlement.LATE
    assert await settle("org_a", lease_id, late) is Settlement.REPLAYED
    assert await deficit() == 9_000 + 100, "of 400, 300 were known"


async def test_a_stream_of_hours_that_died_is_debited_all_the_same(new_world: NewWorld) -> None:
    world = new_world(Plan(name="p", tokens_per_minute=60_000))
    stream = await world.stream(100, 100_000)
    for minute in range(0, 3 * 60 * 60, 30):
        await world.at(minute)
        await world.limiter.renew()
    await world.at(world.now_s + limiter.LEASE_TTL_S)
    used = Units(input_tokens=100, output_tokens=9_000)
    settled = await world.limiter.settle_lease("org_a", stream.admission.lease_id, used)
    assert settled is Settlement.LATE
    refused = await world.admit(1_000, 0)
    assert isinstance(refused, Refusal) and "tokens" in refused.state
    assert refused.state["tokens"].remaining == burst(60_000) - 9_100


async def test_input_and_output_have_limits_of_their_own(new_world: NewWorld) -> None:
    plan = Plan(name="p", input_tokens_per_minute=600, output_tokens_per_minute=6000)
    world = new_world(plan)
    first = await world.admit(90, 500)
    assert isinstance(first, Admission)
    assert "input_tokens" in first.state and first.state["input_tokens"].remaining == 10
    assert "output_tokens" in first.state and first.state["output_tokens"].remaining == 500
    by_input = await world.admit(20, 0)
    assert isinstance(by_input, Refusal) and by_input.kind == "input_tokens"
    by_output = await world.admit(10, 600)
    assert isinstance(by_output, Refusal) and by_output.kind == "output_tokens"
    never = await world.admit(601, 0)
    assert isinstance(never, Refusal) and never.retry_after_s is None


async def test_batch_tokens_are_limited_by_the_day_and_only_in_their_lane(
    new_world: NewWorld,
) -> None:
    world = new_world(Plan(name="p", batch_tokens_per_day=1000))
    assert isinstance(await world.admit(900, 0), Admission)
    assert isinstance(await world.admit(900, 0, "batch"), Admission)
    refused = await world.admit(900, 0, "batch")
    assert isinstance(refused, Refusal) and (refused.kind, refused.limit) == ("batch_tokens", 1000)
    assert refused.retry_after_s == pytest.approx(800 / 1000 * 86_400)
    await world.at(800 / 1000 * 86_400)
    assert isinstance(await world.admit(900, 0, "batch"), Admission)


async def test_an_oauth_client_has_limits_over_all_its_users(new_world: NewWorld) -> None:
    world = new_world(Plan(name="unused"))
    plan = Plan(name="client", tokens_per_minute=600)
    verdicts = [
        await world.limiter.admit(
            caller(Plan(name="none"), key_id="c", client_id="c", user_id=user, client_plan=plan),
            "m",
            input_tokens=60,
            max_output_tokens=0,
            lease_id=user,
        )
        for user in ("anna", "ben")
    ]
    assert isinstance(verdicts[0], Admission) and isinstance(verdicts[1], Refusal)
    assert verdicts[1].scope == "client"


async def test_while_redis_is_away_a_stream_goes_on(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world(Plan(name="p", tokens_per_minute=6000))
    stream = await world.stream(10)

    async def away(*args: object) -> None:
        raise LimiterUnavailable("away")

    monkeypatch.setattr(world.limiter._scripts, "call", away)
    for _ in range(2 * EXPECTED):
        stream.write()
        await world.quiet()
    assert stream.written == 2 * EXPECTED and not stream.resting
    monkeypatch.undo()
    assert await stream.settle() is Settlement.SETTLED
    refused = await world.admit(1, 0)
    assert isinstance(refused, Refusal), "all it wrote was taken"
