"""Workers that hold slices, on a real Valkey, whatever happens to them and to it: no more passes
than the bound, nothing is lost for ever, and nobody who has used little is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
import redis.asyncio
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.limits.limiter import LEASE_TTL_S
from gateway.limits.outcomes import Admission, Refusal, burst, scopes_of
from gateway.limits.redis.keys import scope_keys
from gateway.limits.slices import slices
from gateway.principal import UNLIMITED, Plan
from tests.gateway.limits.limiter_oracle import move_clock
from tests.gateway.limits.slices.virtual_workers import (
    ORG,
    RENEW_US,
    Request,
    Worker,
    World,
    be_busy_at_once,
    caller,
)
from tests.machines import run_machine

T = TypeVar("T")
NUM_WORKERS = 3
CALM_US = 65_000_000
"""Longer ago nothing of what happened counts: leases have expired, too."""
SMALL = 8
"""Below half its limit whoever asks for at most an eighth of a burst passes."""


def plans() -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        name=st.just("p"),
        tokens_per_minute=st.sampled_from([6_000, 6_001, 60_000]),
        requests_per_minute=st.sampled_from([None, 600, 6_000]),
        max_concurrent_streams=st.sampled_from([None, None, 40]),
    )


class SlicesMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = self.run(self.connect())
        self.world = World(self.store, NUM_WORKERS)
        self.run(self.world.begin())
        self.troubled_us = 0
        self.slots_may_differ = False
        self.cut_us: dict[int, int] = {}
        """By worker, since when it is cut off."""

    def run(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await work

        return self.runner.run(main())

    async def connect(self) -> redis.asyncio.Redis:
        return redis.asyncio.from_url(self.url)

    @initialize(org=plans(), key=st.one_of(st.just(UNLIMITED), plans()))
    def begin(self, org: Plan, key: Plan) -> None:
        self.callers = [
            caller(key_id, key=key, project=UNLIMITED, org=org) for key_id in ("key_a", "key_b")
        ]
        self.tokens = min(
            plan.tokens_per_minute for plan in (org, key) if plan.tokens_per_minute is not None
        )

    def worker(self, number: int) -> Worker:
        return self.world.workers[number % len(self.world.workers)]

    def trouble(self) -> None:
        self.troubled_us = self.world.now_us

    # ---- what tenants do

    @rule(
        number=st.integers(0, NUM_WORKERS - 1),
        key=st.integers(0, 1),
        share=st.sampled_from([0.0, 0.01, 0.02, 0.1, 0.3, 0.6, 1.0]),
        output=st.sampled_from([0, 0, 10]),
    )
    def ask(self, number: int, key: int, share: float, output: int) -> None:
        self.run(self.ask_one(self.worker(number), key, round(share * burst(self.tokens)), output))

    async def ask_one(self, worker: Worker, key: int, tokens: int, output: int) -> None:
        who, world = self.callers[key], self.world
        may_not_refuse = self.is_calm() and self.is_small(who, tokens + output)
        verdict = await world.ask(worker, who, tokens, output)
        if isinstance(verdict, Refusal):
            event(f"refused: {verdict.kind}")
            assert not may_not_refuse or verdict.kind == "streams", verdict
        elif verdict is not None:
            event("of slices" if verdict.is_of_slices else "exactly")
            self.check_headers(verdict)

    def is_calm(self) -> bool:
        return self.world.now_us - self.troubled_us > CALM_US

    def is_small(self, who: Any, tokens: int) -> bool:
        scopes = scopes_of(who, "m", "interactive")
        for key, scope in zip(scope_keys(ORG, scopes), scopes, strict=True):
            for limit in scope.buckets:
                units = 1 if limit.letter == "r" else tokens
                if units * SMALL > limit.burst or self.world.deficit_share(key, limit.letter) > 0.5:
                    return False
        return True

    def check_headers(self, admission: Admission) -> None:
        """Nobody is told of more than a full bucket has."""
        for kind, window in admission.state.items():
            assert 0 <= window.remaining <= burst(window.limit), (kind, window)

    @rule(number=st.integers(0, NUM_WORKERS - 1), share=st.sampled_from([0.0, 0.3, 1.0]))
    def settle(self, number: int, share: float) -> None:
        worker = self.worker(number)
        for request in self.world.open_of(worker)[:3]:
            tokens = round(request.admission.reserved.tokens * share)
            self.run(self.settle_one(request, tokens))

    async def settle_one(self, request: Request, tokens: int) -> None:
        """Settle one. Of what began before a loss of data the use is debited now."""
        if request.at_us <= self.troubled_us:
            self.trouble()
        await self.world.settle(request, tokens)

    @rule(seed=st.integers(0, 2**32))
    def busy_time(self, seed: int) -> None:
        """Ask and settle without end, mostly little, on all workers."""
        self.run(self.be_busy(random.Random(seed)))

    async def be_busy(self, draw: random.Random) -> None:
        most = max(1, round(draw.choice([0.01, 0.03, 0.1]) * burst(self.tokens)))
        for _ in range(draw.randrange(20, 80)):
            worker = draw.choice(self.world.workers)
            await self.ask_one(worker, draw.randrange(2), draw.randrange(most + 1), 0)
            if draw.random() < 0.8 and (running := self.world.open_of(worker)):
                request = draw.choice(running)
                await self.settle_one(request, draw.randrange(request.used + 1))
            await self.world.live(draw.random() * draw.choice([0.01, 0.1]))

    @rule(number=st.integers(0, NUM_WORKERS - 1), key=st.integers(0, 1), is_killed=st.booleans())
    def all_is_taken(self, number: int, key: int, is_killed: bool) -> None:
        """One worker gets slices and runs requests on them; then another takes all that is there,
        and what the first one still has."""
        self.run(self.take_all(number, key, is_killed=is_killed))

    async def take_all(self, number: int, key: int, *, is_killed: bool) -> None:
        first, small = self.worker(number), max(1, burst(self.tokens) // 100)
        for _ in range(12):
            await self.ask_one(first, key, small, 0)
            await self.world.live(0.03)
        if is_killed:
            self.a_worker_is_killed(number)
            await self.world.live(2.2)
        other = self.worker(number + 1)
        for part in (2, 10, 50, 200):
            for _ in range(12):
                who = self.callers[key]
                verdict = await self.world.ask(other, who, max(1, burst(self.tokens) // part))
                if not isinstance(verdict, Admission):
                    break
        for _ in range(12):
            await self.world.ask(self.worker(number), self.callers[key], small)

    # ---- what happens to workers and to Redis

    @rule(seconds=st.sampled_from([0.05, 0.4, 1.0, 2.5, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(self.world.live(seconds))

    @rule()
    def a_quiet_minute(self) -> None:
        if all(not (each.cut or each.mute or each.stalled) for each in self.world.workers):
            self.run(self.world.be_quiet(CALM_US))

    @rule(number=st.integers(0, NUM_WORKERS - 1), seconds=st.sampled_from([0.3, 1.5, 4.0]))
    def a_worker_stalls(self, number: int, seconds: float) -> None:
        worker = self.worker(number)
        worker.stalled = True
        self.run(self.world.live(seconds))
        worker.stalled, worker.is_trusted = False, False
        self.trouble()

    @rule(number=st.integers(0, NUM_WORKERS - 1), is_heard=st.booleans())
    def a_worker_is_cut_off(self, number: int, is_heard: bool) -> None:
        worker = self.worker(number)
        worker.cut, worker.mute = not is_heard, is_heard
        worker.is_trusted = False
        self.cut_us.setdefault(worker.number, self.world.now_us)
        self.trouble()

    @rule()
    def all_are_heard_again(self) -> None:
        for worker in self.world.workers:
            if worker.cut or worker.mute:
                self.run(worker.join_again())
                self.trouble()
                if self.is_forgotten(worker):
                    self.slots_may_differ = True
                self.cut_us.pop(worker.number)

    def is_forgotten(self, worker: Worker) -> bool:
        """Tell whether a worker is cut off for so long that leases of it expire, and with them
        their slots."""
        since_us = self.cut_us.get(worker.number, self.world.now_us)
        return self.world.now_us - since_us > LEASE_TTL_S * 1_000_000 - RENEW_US

    @rule(number=st.integers(0, NUM_WORKERS - 1))
    def a_worker_is_killed(self, number: int) -> None:
        self.world.kill(self.worker(number))
        self.trouble()

    @rule()
    def redis_is_emptied(self) -> None:
        self.run(self.empty())

    async def empty(self) -> None:
        await self.world.forget()
        self.slots_may_differ = True
        for worker in self.world.workers:
            worker.is_trusted = False
        self.trouble()

    # ---- what holds all the time

    @invariant()
    def what_workers_hold_is_taken(self) -> None:
        if hasattr(self, "callers"):
            self.run(self.world.check_slices())

    @invariant()
    def no_more_streams_than_allowed(self) -> None:
        if not hasattr(self, "callers") or self.slots_may_differ:
            return
        if any(map(self.is_forgotten, self.world.workers)):
            return
        for who in self.callers:
            most = who.key_plan.max_concurrent_streams
            of_key = [each for each in self.world.open() if each.who.key_id == who.key_id]
            assert most is None or len(of_key) <= most
        most = self.callers[0].org_plan.max_concurrent_streams
        assert most is None or len(self.world.open()) <= most

    def teardown(self) -> None:
        try:
            if hasattr(self, "callers"):
                self.all_are_heard_again()
                self.run(self.end())
        finally:
            self.run(self.store.aclose())
            self.runner.close()

    async def end(self) -> None:
        """All end, and time passes: the bound held, and nothing is left of anything."""
        world = self.world
        for request in [each for each in world.requests if each.is_open]:
            await world.settle(request, request.used)
        world.check_bound()
        await world.live(1.5)
        await world.move(200_000_000)
        world.buckets.clear()
        for worker in world.workers:
            assert not worker.slices._orgs and not worker.slices._covered
        for who in self.callers:
            full = min(
                limit.burst
                for scope in scopes_of(who, "m", "interactive")
                for limit in scope.buckets
                if limit.letter == "t"
            )
            verdict = await world.ask(world.workers[0], who, full)
            assert isinstance(verdict, Admission), verdict
            await world.workers[0].limiter.void(verdict)
            await world.live(1.5)
            await world.move(60_000_000)
        assert await self.store.zcard(f"tollgate:{{{ORG}}}:leases") == 0


@pytest.mark.slow
def test_workers_with_slices_keep_the_bound(
    redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_clock(monkeypatch)
    be_busy_at_once(monkeypatch)
    assert slices.BUSY_REQUESTS == 1

    class Bound(SlicesMachine):
        url = redis_server_url

    run_machine(Bound, examples=80, steps=25)
