"""Counters of spending against the plainest oracle there is, a sum over requests, whatever order
losses, builds, settles, expiries and bookings come in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
)

from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Units
from gateway.limits.spending import counter_of
from gateway.principal import CapScope, SpendCap
from tests.gateway.limits.limiter_oracle import CLOCK_KEY, move_clock
from tests.gateway.limits.money.money_books import ORG, PRICES, BooksOfATest, who
from tests.machines import run_machine

BEGIN = 2_110_708_800.0
LEASE_S = 61
KEYS = ("key_a", "key_b")
CAPS = {
    "org": SpendCap("org", ORG, "total", 20_000),
    "key_a": SpendCap("key", "key_a", "total", 9_000),
}


@dataclass
class Ran:
    """A request that was admitted."""

    admission: Admission
    key_id: str
    gateway: int
    admitted_at: float
    held: int
    cost: int | None = None
    ended_at: float = 0.0
    known: int = 0
    """The cost that its gateway reported at the last renewal."""


class Machine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.books = BooksOfATest()
        self.now = BEGIN
        self.redis = self.run(self.connect)
        self.gateways = [
            Limiter(self.redis, books=self.books, grace_s=0, clock=lambda: self.now)
            for _ in range(2)
        ]
        self.ran: list[Ran] = []
        self.was_lost = False

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def main() -> Any:
            return await call(*args, **kwargs)

        return self.runner.run(main())

    async def connect(self) -> redis.asyncio.Redis:
        client = redis.asyncio.from_url(self.url)
        await client.flushdb()
        await client.set(CLOCK_KEY, int(self.now * 1_000_000))
        return client

    def caps(self, key_id: str) -> tuple[SpendCap, ...]:
        return tuple(cap for name, cap in CAPS.items() if name in ("org", key_id))

    @rule(
        key_id=st.sampled_from(KEYS),
        gateway=st.integers(0, 1),
        tokens=st.sampled_from([0, 7, 100, 900]),
        output=st.sampled_from([0, 9, 50, 400, 3000]),
        given=st.booleans(),
        capped=st.sampled_from([True, True, True, False]),
    )
    def admit(
        self, key_id: str, gateway: int, tokens: int, output: int, given: bool, capped: bool
    ) -> None:
        verdict = self.run(
            self.gateways[gateway].admit,
            who(*(self.caps(key_id) if capped else ()), key_id=key_id),
            "m",
            input_tokens=tokens,
            max_output_tokens=output,
            lease_id=f"lease-{len(self.ran)}-{self.books.tick()}",
            prices=PRICES,
            min_output_tokens=0 if given else 1,
            admitted_at=self.now,
        )
        event(type(verdict).__name__)
        if isinstance(verdict, Refusal):
            assert verdict.kind == "money"
            return
        hold = 0
        if verdict.spending is not None:
            hold = min(verdict.spending.hold_nano, self.cost_of(tokens, verdict.max_output_tokens))
        self.ran.append(Ran(verdict, key_id, gateway, self.now, hold))
        if not self.was_lost and capped:
            for name in ("org", key_id):
                if name in CAPS:
                    assert self.counted(name) <= CAPS[name].amount_nano

    def cost_of(self, tokens: int, output: int) -> int:
        return -(-tokens * 3_000 // 1000) - (-output * 10_500 // 1000)

    def open_ones(self) -> list[Ran]:
        return [each for each in self.ran if each.cost is None]

    @precondition(lambda self: self.open_ones())
    @rule(position=st.integers(0, 9), share=st.floats(0, 1))
    def ends(self, position: int, share: float) -> None:
        """Its event is on disk."""
        found = self.open_ones()
        one = found[position % len(found)]
        one.cost = max(one.known, round(one.held * share))
        if one.admission.spending is None:
            one.cost = round(share * 500)
        one.ended_at = self.now

    def ended(self) -> list[Ran]:
        return [each for each in self.ran if each.cost is not None]

    @precondition(lambda self: self.ended())
    @rule(position=st.integers(0, 30))
    def settle(self, position: int) -> None:
        found = self.ended()
        one = found[position % len(found)]
        used = Units(cost_nano=one.cost or 0)
        self.run(self.gateways[one.gateway].settle, one.admission, used)

    @precondition(lambda self: self.ended())
    @rule(position=st.integers(0, 30), told=st.booleans())
    def ship(self, position: int, told: bool) -> None:
        """`told`: the gateway lives long enough to say so."""
        found = self.ended()
        self.book(found[position % len(found)], told)

    def book(self, one: Ran, told: bool = True) -> None:
        lease_id, cost = one.admission.lease_id, one.cost
        assert cost is not None
        booked = self.books.ingest(lease_id, one.key_id, cost, one.ended_at)
        if told:
            self.run(self.gateways[1 - one.gateway].counters.book, [booked])

    @rule(gateway=st.integers(0, 1))
    def renew(self, gateway: int) -> None:
        self.run(self.gateways[gateway].renew)

    @rule(by_s=st.sampled_from([1, 20, LEASE_S]))
    def time_passes(self, by_s: int) -> None:
        self.now += by_s
        self.run(self.redis.set, CLOCK_KEY, int(self.now * 1_000_000))

    @rule(name=st.sampled_from(["all", "org", "key_a"]))
    def is_lost(self, name: str) -> None:
        self.was_lost = True
        if name == "all":
            self.run(self.redis.flushdb)
            self.run(self.redis.set, CLOCK_KEY, int(self.now * 1_000_000))
        else:
            self.run(self.redis.delete, self.key(name))

    def key(self, name: str) -> str:
        scope: CapScope = "org" if name == "org" else "key"
        return counter_of(scope, ORG if name == "org" else name, "total", 0).key(ORG)

    def counted(self, name: str) -> int | None:
        found = self.run(self.redis.hget, self.key(name), "n")
        return None if found is None else int(found)

    def teardown(self) -> None:
        try:
            self.check_the_end()
        finally:
            self.run(self.redis.aclose)
            self.runner.close()

    def check_the_end(self) -> None:
        """Some are never settled; all are booked."""
        for number, one in enumerate(self.ran):
            if one.cost is None:
                one.cost, one.ended_at = one.held // 2, self.now
            if number % 3:
                self.run(
                    self.gateways[one.gateway].settle,
                    one.admission,
                    Units(cost_nano=one.cost),
                )
        for one in self.ran:
            self.book(one)
        self.time_passes(LEASE_S)
        for gateway in self.gateways:
            gateway._open.clear()
        self.admit("key_a", 0, 0, 0, True, True)
        for name in CAPS:
            spent = sum(one.cost or 0 for one in self.ran if name in ("org", one.key_id))
            found = self.counted(name)
            assert found == spent, name


@pytest.mark.slow
def test_each_request_is_in_each_counter_once(
    redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_clock(monkeypatch)

    class Bound(Machine):
        url = redis_server_url

    run_machine(Bound, examples=40, steps=25)
