"""The limiter's scripts in a real Valkey against the oracle, step by step, on a clock that the
test moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis.asyncio
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    precondition,
    rule,
)

from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import (
    Admission,
    Refusal,
    Settlement,
    Units,
    burst,
    reservation,
    scopes_of,
)
from gateway.principal import Plan, Principal
from tests.gateway.limits.limiter_oracle import (
    CLOCK_KEY,
    Bucket,
    Oracle,
    Scope,
    move_clock,
    rewrite_scripts,
)
from tests.machines import run_machine

ORG, PROJECT, KEYS = "org_a", "proj_a", ("key_a", "key_b")


@pytest.fixture
def moved_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    move_clock(monkeypatch)


UNLIMITED = Plan(name="none")
STEPS = ["admit", "admit", "admit", "time", "time", "settle", "settle", "extend"]


def to_scope(plan: Plan) -> Scope:
    limits = {
        "t": plan.tokens_per_minute,
        "i": plan.input_tokens_per_minute,
        "o": plan.output_tokens_per_minute,
        "r": plan.requests_per_minute,
    }
    buckets = {kind: Bucket(limit) for kind, limit in limits.items()}
    return Scope(buckets, plan.max_concurrent_streams)


def share_of(admission: Admission, share: float) -> Units:
    reserved = admission.reserved
    return Units(
        input_tokens=reserved.input_tokens, output_tokens=round(reserved.output_tokens * share)
    )


def plans() -> st.SearchStrategy[Plan]:
    """Mostly such that something passes: one tight owner refuses for all."""
    tokens_only = st.builds(
        Plan, name=st.just("tokens"), tokens_per_minute=st.sampled_from([600, 601, 6000])
    )
    anything = st.builds(
        Plan,
        name=st.just("anything"),
        tokens_per_minute=st.sampled_from([None, 60, 600, 6000, 3, 0]),
        input_tokens_per_minute=st.sampled_from([None, None, 600, 90]),
        output_tokens_per_minute=st.sampled_from([None, None, 600, 90]),
        requests_per_minute=st.sampled_from([None, 600, 60, 7, 1, 0]),
        max_concurrent_streams=st.sampled_from([None, 9, 3, 1, 0]),
    )
    return st.one_of(tokens_only, st.just(UNLIMITED), st.just(UNLIMITED), anything)


class Machine(RuleBasedStateMachine):
    """Two gateways serve two keys of one organization; the second one's leases are never
    renewed."""

    exact = True
    """False: marks are merged, so refunds may be smaller than the oracle's, and never larger."""
    url = ""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = self.run(self.connect)
        self.gateways = [Limiter(self.redis), Limiter(self.redis)]
        self.number = 0
        self.admissions: dict[str, tuple[Admission, int]] = {}
        self.dead = False

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def main() -> Any:
            return await call(*args, **kwargs)

        return self.runner.run(main())

    async def connect(self) -> redis.asyncio.Redis:
        client = redis.asyncio.from_url(self.url)
        await client.flushdb()
        return client

    @initialize(drawn=st.tuples(plans(), plans(), plans(), plans()))
    def begin(self, drawn: tuple[Plan, Plan, Plan, Plan]) -> None:
        owners = [*KEYS, PROJECT, ORG]
        self.plans = dict(zip(owners, drawn, strict=True))
        self.oracle = Oracle({owner: to_scope(plan) for owner, plan in self.plans.items()})
        self.advance(0)

    def principal(self, key: str) -> Principal:
        return Principal(
            org_id=ORG,
            project_id=PROJECT,
            key_id=key,
            key_hint="",
            scopes=frozenset(),
            key_plan=self.plans[key],
            project_plan=self.plans[PROJECT],
            org_plan=self.plans[ORG],
        )

    def advance(self, by_us: int) -> None:
        self.oracle.now_us += by_us
        self.run(self.redis.set, CLOCK_KEY, self.oracle.now_us)

    @rule(by_us=st.sampled_from([1, 99_999, 400_000, 1_000_000, 4_000_000, 9_999_999, 61_000_000]))
    def time_passes(self, by_us: int) -> None:
        self.advance(by_us)

    @rule(
        target=leases,
        key=st.sampled_from(KEYS),
        gateway=st.integers(0, 1),
        tokens=st.sampled_from([0, 1, 5, 17, 40, 60, 100, 101, 333, 600, 700]),
        output=st.sampled_from([0, 0, 3, 20, 64, 500]),
    )
    def admit(self, key: str, gateway: int, tokens: int, output: int) -> Any:
        self.number += 1
        lease_id = f"lease-{self.number}"
        expected = min(output, self.gateways[gateway]._outputs.expected(key, "m"))
        verdict = self.run(
            self.gateways[gateway].admit,
            self.principal(key),
            "m",
            input_tokens=tokens,
            max_output_tokens=output,
            lease_id=lease_id,
        )
        names = [name for name in (key, PROJECT, ORG) if self.limited(name)]
        if not names:
            assert isinstance(verdict, Admission) and verdict.scopes == ()
            return multiple()
        self.oracle.heal()
        scopes = scopes_of(self.principal(key), "m", "interactive")
        units = reservation(scopes, tokens, expected).by_letter(requests=1)
        wait_us = self.oracle.wait_us(names, units)
        event(type(verdict).__name__)
        if isinstance(verdict, Refusal):
            if self.exact:
                assert wait_us != 0
                waited = verdict.retry_after_s
                assert (None if waited is None else round(waited * 1_000_000)) == wait_us
            self.compare()
            return multiple()
        assert wait_us == 0
        self.oracle.admit(lease_id, names, units)
        self.admissions[lease_id] = (verdict, gateway)
        self.compare()
        return lease_id

    def limited(self, owner: str) -> bool:
        return msgspec.structs.replace(self.plans[owner], name="none") != UNLIMITED

    @precondition(lambda self: self.open_leases())
    @rule(position=st.integers(0, 9), share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 1.2]))
    def settle_an_open_one(self, position: int, share: float) -> None:
        running = self.open_leases()
        self.settle(running[position % len(running)], share)

    def open_leases(self) -> list[str]:
        leases = self.oracle.leases if hasattr(self, "oracle") else {}
        return [lease_id for lease_id, lease in leases.items() if lease.state == "open"]

    @rule(seed=st.integers(0, 2**32))
    def busy_time(self, seed: int) -> None:
        """Many steps at once: leases that overlap are what refunds get wrong."""
        draw = random.Random(seed)
        unit = draw.choice([10, 60, 100])
        for _ in range(30):
            match draw.choice(STEPS):
                case "admit":
                    tokens = max(1, round(unit * draw.random()))
                    output = draw.choice([0, tokens])
                    self.admit(draw.choice(KEYS), draw.randrange(2), tokens, output)
                case "extend" if self.open_leases():
                    lease_id = draw.choice(self.open_leases())
                    self.extend(lease_id, draw.choice([0, 5, 32]), draw.random() < 0.5)
                case "time":
                    self.advance(draw.randrange(2_000_000))
                case "settle" if self.open_leases():
                    self.settle_an_open_one(draw.randrange(10), draw.choice([0, 0, 0.3, 0.8, 1.1]))

    @rule(
        lease_id=leases,
        tokens=st.sampled_from([0, 1, 7, 32]),
        resting=st.booleans(),
        share=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def extend(self, lease_id: str, tokens: int, resting: bool, share: float = 1.0) -> None:
        admission, gateway = self.admissions[lease_id]
        used = share_of(admission, share)
        given = self.run(
            self.gateways[gateway].extend,
            admission,
            output_tokens=tokens,
            used=used,
            resting=resting,
        )
        self.oracle.heal()
        units = Units(output_tokens=tokens).by_letter()
        rest_us = self.oracle.extend(lease_id, units, used.by_letter(), resting=resting)
        assert given.is_open == (rest_us is not None)
        if self.exact:
            assert round(given.rest_s * 1_000_000) == (rest_us or 0)
        self.compare()

    @rule(lease_id=leases, share=st.sampled_from([0.0, 1.0]))
    def settle(self, lease_id: str, share: float) -> None:
        admission, gateway = self.admissions[lease_id]
        used = share_of(admission, share)
        done = self.run(self.gateways[gateway].settle, admission, used)
        self.oracle.heal()
        self.check_settled(done, self.oracle.settle(lease_id, used.by_letter(requests=1)))

    @rule(lease_id=leases, used=st.integers(0, 100))
    def settle_after_a_crash(self, lease_id: str, used: int) -> None:
        units = Units(output_tokens=used)
        done = self.run(self.gateways[0].settle_lease, ORG, lease_id, units)
        self.oracle.heal()
        self.check_settled(done, self.oracle.settle(lease_id, units.by_letter(requests=1)))

    @rule(lease_id=leases)
    def void(self, lease_id: str) -> None:
        admission, gateway = self.admissions[lease_id]
        done = self.run(self.gateways[gateway].void, admission)
        self.oracle.heal()
        self.check_settled(done, self.oracle.settle(lease_id, {}))

    def check_settled(self, done: Settlement, before: str) -> None:
        expected = {
            "open": Settlement.SETTLED,
            "expired": Settlement.LATE,
            "settled": Settlement.REPLAYED,
        }
        assert done == expected[before]
        self.compare()

    @rule(share=st.sampled_from([0.0, 0.4, 1.0, 1.5]))
    def renew(self, share: float) -> None:
        gateway = self.gateways[0]
        known = {}
        for lease_id in gateway._open:
            admission, _ = self.admissions[lease_id]
            known[lease_id] = share_of(admission, share)
            gateway.progress(admission, known[lease_id])
        self.run(gateway.renew)
        if known:
            self.oracle.heal()
        for lease_id, used in known.items():
            self.oracle.renew(lease_id, used.by_letter())

    def compare(self) -> None:
        """After any call the scopes in Redis are those of the oracle."""
        kinds = dict.fromkeys(KEYS, "key") | {PROJECT: "project", ORG: "org"}
        names = [f"tollgate:{{{ORG}}}:{kinds[owner]}:{owner}" for owner in self.oracle.scopes]
        for scope, packed in zip(
            self.oracle.scopes.values(), self.run(self.redis.mget, names), strict=True
        ):
            stored = msgspec.msgpack.decode(packed) if packed else None
            assert (stored["s"] if stored else 0) == len(scope.leases)
            buckets = dict(stored["b"]) if stored else {}
            for kind, bucket in scope.buckets.items():
                now_us = self.oracle.now_us
                deficit_us = max(0, buckets[kind]["f"] - now_us) if kind in buckets else 0
                if self.exact:
                    assert deficit_us == bucket.deficit_us(now_us)
                else:
                    assert deficit_us >= bucket.deficit_us(now_us)

    def teardown(self) -> None:
        try:
            if hasattr(self, "oracle"):
                self.check_that_nothing_is_left()
        finally:
            self.run(self.redis.aclose)
            self.runner.close()

    def check_that_nothing_is_left(self) -> None:
        """When all leases are settled and time has passed, full buckets and tombstones remain."""
        self.oracle.check_windows()
        for lease_id in list(self.admissions):
            self.settle(lease_id, 1.0)
        self.advance(10**10)
        assert not any(scope.leases for scope in self.oracle.scopes.values())
        assert self.run(self.redis.zcard, f"tollgate:{{{ORG}}}:leases") == 0
        ttls = [self.run(self.redis.pttl, key) for key in self.run(self.redis.keys, "*{*")]
        assert all(0 < ttl <= 7 * 86_400_000 for ttl in ttls)


def check(url: str, *, exact: bool, examples: int) -> None:
    class Bound(Machine):
        pass

    Bound.url, Bound.exact = url, exact
    run_machine(Bound, examples=examples, steps=15)


@pytest.mark.slow
@pytest.mark.usefixtures("moved_clock")
def test_the_scripts_do_what_the_oracle_says(
    redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite_scripts(monkeypatch, "MAX_TAKES = 2", "MAX_TAKES = 1000")
    check(redis_server_url, exact=True, examples=25)


@pytest.mark.slow
@pytest.mark.usefixtures("moved_clock")
def test_merged_marks_only_make_refunds_smaller(
    redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite_scripts(monkeypatch, "MAX_MARKS = 64", "MAX_MARKS = 2")
    check(redis_server_url, exact=False, examples=15)


def test_a_burst_is_a_sixth_and_at_least_one() -> None:
    assert [burst(limit) for limit in (1, 5, 6, 11, 12, 600)] == [1, 1, 1, 1, 2, 100]
