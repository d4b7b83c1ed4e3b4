"""Workers that hold slices of what is left under caps, on a real Valkey, whatever happens to them
and to it: what is spent and held never exceeds a cap, and each request is in each counter once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

import pytest
import redis.asyncio
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.limits.counters import SpentUnknown
from gateway.limits.limiter import LEASE_TTL_S
from gateway.limits.outcomes import Admission, Refusal, Units, holds_of
from gateway.limits.spending import counter_of
from gateway.principal import CapScope, SpendCap
from tests.gateway.limits.limiter_oracle import move_clock
from tests.gateway.limits.money.money_books import ORG, PRICES, BooksOfATest, who
from tests.gateway.limits.slices.virtual_workers import (
    RENEW_US,
    Away,
    Worker,
    World,
    be_busy_at_once,
)
from tests.machines import run_machine

T = TypeVar("T")
NUM_WORKERS = 3
KEYS = ("key_a", "key_b")
CAPS = {
    "org": SpendCap("org", ORG, "total", 70_000),
    "key_a": SpendCap("key", "key_a", "total", 30_000),
}
CALM_US = 65_000_000
"""Longer ago nothing of what happened counts: leases have expired, too."""
SMALL = 16
"""Below half of a cap whoever may cost at most this part of it passes."""


@dataclass
class Ran:
    """A request that was admitted; amounts in nano-USD."""

    admission: Admission
    worker: Worker
    hold: int
    cost: int | None = None
    is_booked: bool = False

    @property
    def key_id(self) -> str:
        return self.admission.key_id


class MoneySlicesMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.books = BooksOfATest()
        self.store = self.run(self.connect())
        self.world = World(self.store, NUM_WORKERS, self.books)
        self.run(self.world.begin())
        self.ran: list[Ran] = []
        self.num_asked = 0
        self.was_lost = False
        self.troubled_us = 0
        self.cut_us: dict[int, int] = {}

    def run(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await work

        return self.runner.run(main())

    async def connect(self) -> redis.asyncio.Redis:
        return redis.asyncio.from_url(self.url)

    def worker(self, number: int) -> Worker:
        return self.world.workers[number % NUM_WORKERS]

    def trouble(self) -> None:
        self.troubled_us = self.world.now_us

    # ---- what tenants do

    @rule(
        number=st.integers(0, NUM_WORKERS - 1),
        key_id=st.sampled_from(KEYS),
        tokens=st.sampled_from([0, 7, 100, 900]),
        output=st.sampled_from([0, 9, 50, 400, 3000]),
        is_given=st.booleans(),
    )
    def ask(self, number: int, key_id: str, tokens: int, output: int, is_given: bool) -> None:
        self.run(self.ask_one(self.worker(number), key_id, tokens, output, is_given=is_given))

    async def ask_one(
        self, worker: Worker, key_id: str, tokens: int, output: int, *, is_given: bool = True
    ) -> None:
        self.num_asked += 1
        caps = [cap for name, cap in CAPS.items() if name in ("org", key_id)]
        may_not_refuse = self.is_calm() and self.is_small(key_id, tokens, output)
        try:
            verdict = await worker.limiter.admit(
                who(*caps, key_id=key_id),
                "m",
                input_tokens=tokens,
                max_output_tokens=output,
                lease_id=f"lease-{self.num_asked}-{self.books.tick()}",
                prices=PRICES,
                min_output_tokens=0 if is_given else 1,
            )
        except (Away, SpentUnknown):
            return
        if isinstance(verdict, Refusal):
            event("refused")
            assert verdict.kind == "money" and not may_not_refuse
            return
        event("of slices" if verdict.is_of_slices else "exactly")
        (hold, *_) = [nano for _, nano in holds_of(verdict)]
        self.ran.append(Ran(verdict, worker, hold))

    def is_calm(self) -> bool:
        return not self.was_lost and self.world.now_us - self.troubled_us > CALM_US

    def is_small(self, key_id: str, tokens: int, output: int) -> bool:
        hold = tokens * 3 + output * 11
        return all(
            hold * SMALL <= CAPS[name].amount_nano
            and 2 * (self.used(name) + hold) <= CAPS[name].amount_nano
            for name in ("org", key_id)
            if name in CAPS
        )

    def used(self, name: str) -> int:
        """Return what is spent, and held by requests that run."""
        of_it = [each for each in self.ran if name in ("org", each.key_id)]
        return sum(each.hold if each.cost is None else each.cost for each in of_it)

    def running_of(self, worker: Worker) -> list[Ran]:
        return [each for each in self.ran if each.cost is None and each.worker is worker]

    @rule(number=st.integers(0, NUM_WORKERS - 1), share=st.floats(0, 1))
    def settle(self, number: int, share: float) -> None:
        for one in self.running_of(self.worker(number))[:3]:
            self.run(self.settle_one(one, share))

    async def settle_one(self, one: Ran, share: float) -> None:
        one.cost = round(one.hold * share)
        await one.worker.limiter.settle(one.admission, Units(cost_nano=one.cost))
        await one.worker.slices._tasks.wait()

    @rule(position=st.integers(0, 60), is_told=st.booleans())
    def ship(self, position: int, is_told: bool) -> None:
        """Let the books have one that has ended. `is_told`: its shipper lives to say so."""
        ended = [each for each in self.ran if each.cost is not None]
        if ended:
            self.run(self.book(ended[position % len(ended)], is_told=is_told))

    async def book(self, one: Ran, *, is_told: bool = True) -> None:
        moment = self.world.now_us / 1_000_000
        assert one.cost is not None
        booked = self.books.ingest(one.admission.lease_id, one.key_id, one.cost, moment)
        if is_told:
            heard = [each for each in self.world.workers if not (each.cut or each.mute)]
            if heard:
                await heard[0].limiter.counters.book([booked])
                one.is_booked = True

    @rule(seed=st.integers(0, 2**32))
    def busy_time(self, seed: int) -> None:
        """Ask and settle without end, mostly for little, on all workers."""
        self.run(self.be_busy(random.Random(seed)))

    async def be_busy(self, draw: random.Random) -> None:
        most = draw.choice([3, 30, 200])
        for _ in range(draw.randrange(20, 80)):
            worker = draw.choice(self.world.workers)
            await self.ask_one(worker, draw.choice(KEYS), draw.randrange(most), 0)
            if draw.random() < 0.8 and (running := self.running_of(worker)):
                await self.settle_one(draw.choice(running), draw.random())
            if draw.random() < 0.1:
                ended = [each for each in self.ran if each.cost is not None and not each.is_booked]
                for one in ended[:5]:
                    await self.book(one)
            await self.world.live(draw.random() * draw.choice([0.01, 0.1]))

    @rule(number=st.integers(0, NUM_WORKERS - 1), is_killed=st.booleans())
    def all_is_spent(self, number: int, is_killed: bool) -> None:
        """One worker gets slices and runs requests on them; then another takes all that is there,
        and what the first one still has."""
        self.run(self.spend_all(number, is_killed=is_killed))

    async def spend_all(self, number: int, *, is_killed: bool) -> None:
        first = self.worker(number)
        for _ in range(12):
            await self.ask_one(first, "key_a", 20, 0)
            await self.world.live(0.03)
        if is_killed:
            await self.kill(first)
            await self.world.live(2.2)
        other = self.worker(number + 1)
        for tokens in (5000, 1000, 200, 20):
            for _ in range(6):
                await self.ask_one(other, "key_a", tokens, 0)
        for _ in range(6):
            await self.ask_one(self.worker(number), "key_a", 20, 0)
        for one in self.running_of(other)[:6]:
            await self.settle_one(one, 0.1)

    # ---- what happens to workers and to Redis

    @rule(seconds=st.sampled_from([0.05, 0.4, 1.0, 2.5, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(self.world.live(seconds))

    @rule()
    def a_quiet_minute(self) -> None:
        if not any(each.cut or each.mute for each in self.world.workers):
            self.run(self.world.be_quiet(CALM_US))

    @rule(number=st.integers(0, NUM_WORKERS - 1), seconds=st.sampled_from([0.3, 1.5, 4.0]))
    def a_worker_stalls(self, number: int, seconds: float) -> None:
        worker = self.worker(number)
        worker.stalled = True
        self.run(self.world.live(seconds))
        worker.stalled = False
        self.trouble()

    @rule(number=st.integers(0, NUM_WORKERS - 1), is_heard=st.booleans())
    def a_worker_is_cut_off(self, number: int, is_heard: bool) -> None:
        worker = self.worker(number)
        worker.cut, worker.mute = not is_heard, is_heard
        self.cut_us.setdefault(worker.number, self.world.now_us)
        self.trouble()

    def is_forgotten(self, worker: Worker) -> bool:
        """Tell whether a worker is cut off for so long that leases of it expire, and with them what
        they hold."""
        since_us = self.cut_us.get(worker.number, self.world.now_us)
        return self.world.now_us - since_us > LEASE_TTL_S * 1_000_000 - 2 * RENEW_US

    @rule()
    def all_are_heard_again(self) -> None:
        for worker in self.world.workers:
            if worker.cut or worker.mute:
                self.was_lost |= self.is_forgotten(worker)
                self.run(worker.join_again())
                self.trouble()
                self.cut_us.pop(worker.number)

    @rule(number=st.integers(0, NUM_WORKERS - 1))
    def a_worker_is_killed(self, number: int) -> None:
        """Kill one: what it let run ends, and another one ships its spool."""
        self.run(self.kill(self.worker(number)))

    async def kill(self, worker: Worker) -> None:
        self.was_lost |= self.is_forgotten(worker)
        self.world.kill(worker)
        for one in [each for each in self.ran if each.worker is worker]:
            if one.cost is None:
                one.cost = one.hold // 2
            await self.book(one)
            self.was_lost |= not one.is_booked  # nobody can say it while its slice is held
        self.trouble()

    @rule(what=st.sampled_from(["all", "org", "key_a"]))
    def is_lost(self, what: str) -> None:
        self.was_lost = True
        self.run(self.lose(what))

    async def lose(self, what: str) -> None:
        if what == "all":
            await self.world.forget()
        else:
            await self.store.delete(self.counter(what))

    def counter(self, name: str) -> str:
        scope: CapScope = "org" if name == "org" else "key"
        return counter_of(scope, ORG if name == "org" else name, "total", 0).key(ORG)

    # ---- what holds

    @invariant()
    def no_more_is_spent_and_held_than_the_cap(self) -> None:
        self.was_lost |= any(map(self.is_forgotten, self.world.workers))
        if not self.was_lost:
            for name, cap in CAPS.items():
                assert self.used(name) <= cap.amount_nano, name

    def teardown(self) -> None:
        try:
            self.all_are_heard_again()
            self.run(self.end())
        finally:
            self.run(self.store.aclose())
            self.runner.close()

    async def end(self) -> None:
        """All end and are booked, and time passes: each is counted once, and nothing is held."""
        for number, one in enumerate(self.ran):
            if one.cost is None:
                await self.settle_one(one, 0.5)
            if number % 2:
                await self.book(one)
        await self.world.live(1.5)
        for one in self.ran:
            await self.book(one)
        for worker in self.world.workers:
            assert not worker.slices._orgs and not worker.slices._covered
            assert not worker.limiter._open
        await self.world.move(round(LEASE_TTL_S * 1_000_000) + 1)
        await self.ask_one(self.world.workers[0], "key_a", 0, 0)
        for name in CAPS:
            spent = sum(one.cost or 0 for one in self.ran if name in ("org", one.key_id))
            assert int(await self.store.hget(self.counter(name), "n") or -1) == spent, name


@pytest.mark.slow
def test_workers_with_slices_of_money_keep_the_caps(
    redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_clock(monkeypatch)
    be_busy_at_once(monkeypatch)

    class Bound(MoneySlicesMachine):
        url = redis_server_url

    run_machine(Bound, examples=60, steps=25)
