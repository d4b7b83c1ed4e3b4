"""kill -9 of Redis under load, coming back with its data and without: nobody is refused for it or
hangs, nobody gets more than is stated, what passed meanwhile is taken once, and what was settled
meanwhile is."""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import msgspec
import pytest

from gateway.limits.redis.local_buckets import BURST_PARTS, SHARE
from tests.chaos.valkey import Valkey, valkey
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, completion
from tests.journeys.upstreams import LiveUpstream, live_upstreams
from tests.stack import Stack, running

pytestmark = pytest.mark.slow

TOKENS_PER_MINUTE = 60_000
RATE = TOKENS_PER_MINUTE / 60
BURST = TOKENS_PER_MINUTE // 6
USED = 200
CLIENTS = 8
PAUSE_S = 0.25
"""Between two requests of a client: together they ask for six times what is let pass."""
NUM_HELD, HELD_FOR_S = 5, 5.0
EMPTIED_WITHIN_S = 30.0
AFTER_S = 5.0
"""Long enough for what the bucket holds to be passed on."""
PATIENCE_S = 4.0
"""The first request after the kill waits for Redis' timeout at most; all others wait for nothing.
"""
GRANTED = SHARE / BURST_PARTS
"""The share of a burst that all gateways let pass at once while Redis is away, and owe for it."""
CONFIG = """
redis_url = "{redis}"
[[model]]
name = "big"
upstream = "{upstream}"
[plan.default]
[plan.tokens]
tokens_per_minute = 60_000
[plan.streams]
max_concurrent_streams = 8
"""


class TimedAnswer(msgspec.Struct, frozen=True):
    """One answer and its moments (`time.monotonic`)."""

    sent_at: float
    answered_at: float
    status: int


class Scene:
    """A Tollgate of two workers, its Redis, and an upstream that holds what it is asked to hold."""

    def __init__(self, stack: Stack, store: Valkey, upstream: LiveUpstream) -> None:
        self.stack, self.store, self.upstream = stack, store, upstream
        self.keys = {plan: stack.create_key("--plan", plan) for plan in ("tokens", "streams")}
        self.seen: list[TimedAnswer] = []
        self.let_go = asyncio.Event()
        self.stopping = False
        upstream.play(self.answer)

    async def answer(self, exchange: Exchange) -> None:
        if exchange.body["messages"][0]["content"] == "Hold.":
            while not self.let_go.is_set():  # of another thread's loop
                await asyncio.sleep(0.02)
        usage = {"prompt_tokens": 10, "completion_tokens": USED - 10, "total_tokens": USED}
        await exchange.answer(completion(usage=usage))

    async def ask(self, plan: str, words: str) -> TimedAnswer:
        request = {
            "model": "big",
            "messages": [{"role": "user", "content": words}],
            "max_tokens": USED - 10,
        }
        headers = {"authorization": f"Bearer {self.keys[plan]}"}
        sent_at = time.monotonic()
        answer = await self.http.post("/v1/chat/completions", json=request, headers=headers)
        return TimedAnswer(sent_at, time.monotonic(), answer.status_code)

    async def flood(self) -> None:
        while not self.stopping:
            self.seen.append(await self.ask("tokens", "Go on."))
            await asyncio.sleep(PAUSE_S)

    async def redis_away(self, away_s: float, *, empty: bool) -> None:
        """Kill it under load, and see to it that all is as it should be."""
        self.seen, self.stopping, self.let_go = [], False, asyncio.Event()
        # A connection for each request: whichever worker is free accepts it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.stack.base_url, timeout=30, limits=limits
        ) as self.http:
            await self.kill_amid_load(away_s, empty=empty)
        self.upstream.exchanges.clear()

    async def kill_amid_load(self, away_s: float, *, empty: bool) -> None:
        load = asyncio.gather(*(self.flood() for _ in range(CLIENTS)))
        async with asyncio.timeout(EMPTIED_WITHIN_S):
            while not any(each.status == 429 for each in self.seen):
                await asyncio.sleep(0.1)
        held = [asyncio.create_task(self.ask("streams", "Hold.")) for _ in range(NUM_HELD)]
        while len([e for e in self.upstream.exchanges if "Hold." in str(e.body)]) < NUM_HELD:
            await asyncio.sleep(0.02)
        await self.store.kill()
        killed_at = time.monotonic()
        await asyncio.sleep(min(away_s / 2, HELD_FOR_S))
        ready = await asyncio.to_thread(httpx.get, f"{self.stack.base_url}/health/ready")
        assert ready.status_code == 200, ready.text
        self.let_go.set()
        assert {each.status for each in await asyncio.gather(*held)} == {200}
        await asyncio.sleep(killed_at + away_s - time.monotonic())
        await self.store.start(empty=empty)
        back_at = time.monotonic()
        await asyncio.sleep(AFTER_S)
        self.stopping = True
        await load
        self.check_answers(killed_at, back_at)
        if not empty:
            self.check_debits(back_at - killed_at, back_at)
        # before they would expire by themselves
        settled = lambda: self.store.open_leases() == 0  # noqa: E731
        await asyncio.to_thread(self.stack.wait, "all is settled", settled, 10.0)

    def check_answers(self, killed_at: float, back_at: float) -> None:
        assert {each.status for each in self.seen} == {200, 429}
        assert max(each.answered_at - each.sent_at for each in self.seen) < PATIENCE_S
        passed = [each for each in self.seen if each.status == 200]
        check_bound(passed)
        meanwhile = [each for each in passed if killed_at < each.answered_at < back_at]
        usual = SHARE * RATE * (back_at - killed_at)
        assert USED * len(meanwhile) > 0.7 * usual, "requests go on"

    def check_debits(self, away_s: float, back_at: float) -> None:
        """The bucket was empty when Redis was killed. Back again it lacks what is missing of it
        after all that has passed since, at least what all gateways let pass at once: debited once,
        not twice and not never."""
        passed = [e for e in self.seen if e.status == 200 and e.answered_at > back_at]
        last = max(each.answered_at for each in self.seen)
        beyond_rate = (USED * len(passed) - RATE * (last - back_at)) / BURST
        missing = 1.0 - beyond_rate
        expected = max(GRANTED, 1 + GRANTED - (1 - SHARE) * away_s * RATE / BURST)
        # What they let pass after its return and before they noticed, a second at most, is theirs.
        assert expected - 0.15 < missing < expected + 0.1, f"{missing:.2f}, not {expected:.2f}"


def check_bound(passed: list[TimedAnswer]) -> None:
    """Check what was asked and answered within any span of time: it was let pass within it."""
    for first in passed:
        ends: list[float] = []
        for each in passed:
            if each.sent_at >= first.sent_at:
                insort(ends, each.answered_at)
        for number, end in enumerate(ends, 1):
            bound = (1 + GRANTED) * BURST + RATE * (end - first.sent_at)
            assert number * USED <= bound, f"{number * USED} tokens of {bound:.0f}"


@contextmanager
def scene() -> Iterator[Scene]:
    with ExitStack() as opened:
        store = opened.enter_context(valkey())
        asyncio.run(store.start())
        (upstream,) = opened.enter_context(live_upstreams(1))
        config = CONFIG.format(redis=store.url, upstream=upstream.base_url)
        yield Scene(opened.enter_context(running(config=config, workers=2)), store, upstream)


@pytest.fixture(scope="module")
def scenes() -> Iterator[tuple[Scene, Scene]]:
    """Side by side: seconds cannot be shortened, but they can be shared."""
    with scene() as first, scene() as second:
        yield first, second


def books_balance(stack: Stack) -> None:
    stack.wait_metric("tollgate_spool_backlog_events", 0, timeout_s=60)
    assert stack.run("reconcile") == "The books balance.\n"


@pytest.mark.nightly
@pytest.mark.parametrize("away_s", [3, 60])
def test_redis_away_is_no_outage(scenes: tuple[Scene, Scene], away_s: float) -> None:
    """With its data and without."""
    first, second = scenes

    async def both() -> None:
        await asyncio.gather(
            first.redis_away(away_s, empty=False), second.redis_away(away_s, empty=True)
        )

    asyncio.run(both())
    books_balance(first.stack)
    books_balance(second.stack)
