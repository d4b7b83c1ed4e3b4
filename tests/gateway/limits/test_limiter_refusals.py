"""Refusals under several scopes at once: they consume nothing, and what clients are told, in both
vendors' headers, is exact: at that moment the request passes, and not a microsecond before."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import pytest
import redis.asyncio
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from gateway.http_errors.table import refused, retry_headers
from gateway.limits import headers, limiter
from gateway.limits.headers import to_duration, to_headers
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import (
    Admission,
    RateState,
    RateWindow,
    Refusal,
    Units,
    rate_window,
    scopes_of,
)
from gateway.limits.redis.keys import epoch_key, org_keys, scope_keys
from gateway.principal import Plan, Principal
from tests.budget import examples
from tests.gateway.limits.limiter_oracle import CLOCK_KEY, move_clock

START_US = 1_700_000_000_000_000
NOW_S = START_US / 1_000_000
MODEL = "m"
NAMES = {"t": "tokens", "i": "input_tokens", "o": "output_tokens", "r": "requests"}


class Step(NamedTuple):
    after_us: int
    input_tokens: int
    output_tokens: int
    used_share: float | None
    """The share of the reserved output that it uses; None: the request goes on."""


def plans() -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        name=st.just("p"),
        tokens_per_minute=st.sampled_from([None, 600, 601, 6_000]),
        input_tokens_per_minute=st.sampled_from([None, None, None, 90, 600]),
        output_tokens_per_minute=st.sampled_from([None, None, 90, 600]),
        requests_per_minute=st.sampled_from([None, None, 6, 13, 60]),
        max_concurrent_streams=st.sampled_from([*[None] * 12, 0, 1, 3]),
    )


def callers() -> st.SearchStrategy[Principal]:
    return st.builds(
        Principal,
        org_id=st.just("org_a"),
        project_id=st.just("proj_a"),
        key_id=st.just("key_a"),
        key_hint=st.just(""),
        scopes=st.just(frozenset()),
        client_id=st.just("client_a"),
        key_model_plans=st.fixed_dictionaries({MODEL: plans()}),
        key_plan=plans(),
        model_plans=st.fixed_dictionaries({MODEL: plans()}),
        client_plan=plans(),
        project_plan=plans(),
        org_plan=plans(),
    )


STEPS = st.builds(
    Step,
    after_us=st.sampled_from([0, 0, 1, 333_333, 1_000_000, 7_000_003]),
    input_tokens=st.sampled_from([0, 1, 5, 15, 40, 100]),
    output_tokens=st.sampled_from([0, 0, 3, 15, 90]),
    used_share=st.sampled_from([None, None, 0.0, 0.5, 1.0, 3.0]),
)
REQUESTS = st.tuples(st.sampled_from([0, 1, 15, 30, 90, 601]), st.sampled_from([0, 1, 15, 90]))


class World:
    def __init__(self, store: redis.asyncio.Redis, who: Principal) -> None:
        self.store, self.who, self.limiter = store, who, Limiter(store)
        self.now_us, self.number = START_US, 0

    async def at(self, moment_us: int) -> None:
        self.now_us = moment_us
        await self.store.set(CLOCK_KEY, moment_us)

    async def ask(self, input_tokens: int, output_tokens: int) -> Admission | Refusal:
        self.number += 1
        return await self.limiter.admit(
            self.who,
            MODEL,
            input_tokens=input_tokens,
            max_output_tokens=output_tokens,
            lease_id=f"lease-{self.number}",
        )

    async def live(self, steps: list[Step]) -> None:
        for step in steps:
            await self.at(self.now_us + step.after_us)
            verdict = await self.ask(step.input_tokens, step.output_tokens)
            if isinstance(verdict, Admission) and step.used_share is not None:
                output = round(verdict.reserved.output_tokens * step.used_share)
                await self.limiter.settle(verdict, Units(output_tokens=output))

    async def stored(self) -> dict[bytes, bytes]:
        """All keys of the org, byte by byte."""
        names = await self.store.keys("tollgate:{org_a}*")
        return {name: await self.store.dump(name) for name in names}

    async def state(self) -> RateState:
        """Return what clients must be told, from what stands in Redis."""
        windows: dict[str, list[RateWindow]] = {kind: [] for kind in NAMES.values()}
        scopes = scopes_of(self.who, MODEL, "interactive")
        for scope, key in zip(scopes, scope_keys("org_a", scopes), strict=True):
            packed: Any = await self.store.get(key)
            buckets = msgspec.msgpack.decode(packed)["b"] if packed else {}
            for bucket in scope.buckets:
                full_at_us = buckets[bucket.letter]["f"] if bucket.letter in buckets else 0
                window = rate_window(bucket, full_at_us, self.now_us)
                windows[NAMES[bucket.letter]].append(window)
        return {
            kind: min(found, key=lambda window: (window.remaining, window.limit))
            for kind, found in windows.items()
            if found
        }


async def check(url: str, who: Principal, steps: list[Step], request: tuple[int, int]) -> None:
    store = redis.asyncio.from_url(url)
    try:
        await store.flushdb()
        world = World(store, who)
        await world.at(START_US)
        await world.limiter._data_loss_detector.begin(epoch_key("org_a"))
        await world.live(steps)
        # What has expired is healed before, so that the request finds nothing to heal.
        await world.limiter._scripts.call("renew", org_keys("org_a"), (0, []))
        before = await world.stored()
        verdict = await world.ask(*request)
        event(verdict.kind if isinstance(verdict, Refusal) else "admitted")
        assert to_headers(verdict.state) == to_headers(await world.state())
        check_headers(to_headers(verdict.state))
        if isinstance(verdict, Refusal):
            assert await world.stored() == before
            await check_wait(world, verdict, request)
    finally:
        await store.aclose()


async def check_wait(world: World, refusal: Refusal, request: tuple[int, int]) -> None:
    told = refused(refusal).headers
    if refusal.retry_after_s is None:
        assert not any(name.startswith("retry-after") for name in told)
        assert told["x-should-retry"] == "false"
        await world.at(world.now_us + 3_600_000_000)
        later = await world.ask(*request)
        assert isinstance(later, Refusal) and later.retry_after_s is None
        return
    wait_us = round(refusal.retry_after_s * 1_000_000)
    assert told["retry-after"] == str(max(1, -(-wait_us // 1_000_000)))
    assert told["retry-after-ms"] == str(-(-wait_us // 1_000))
    if refusal.kind == "streams":
        return
    asked_us = world.now_us
    await world.at(asked_us + wait_us - 1)
    early = await world.ask(*request)
    assert isinstance(early, Refusal)
    await world.at(asked_us + wait_us)
    late = await world.ask(*request)
    assert isinstance(late, Admission) or late.kind == "streams", "whose end nobody knows"


def check_headers(told: dict[str, str]) -> None:
    """Both vendors' say the same."""
    kinds = {name.removeprefix("x-ratelimit-limit-") for name in told if "-limit-" in name[:18]}
    assert len(told) == 6 * len(kinds)
    for kind in kinds:
        ours, theirs = f"x-ratelimit-{{}}-{kind}", f"anthropic-ratelimit-{kind}-{{}}"
        for what in ("limit", "remaining"):
            assert told[ours.format(what)] == told[theirs.format(what)]
        reset_s = seconds_of(told[ours.format("reset")])
        moment = datetime.fromisoformat(told[theirs.format("reset")]).timestamp()
        assert NOW_S + reset_s - 0.001 <= moment < NOW_S + reset_s + 1


def seconds_of(duration: str) -> float:
    """Go's notation."""
    found, left = 0.0, duration
    for unit, seconds in (("h", 3600.0), ("m", 60.0)):
        if unit in left and not left.endswith("ms"):
            amount, _, left = left.partition(unit)
            found += float(amount) * seconds
    if left.endswith("ms"):
        return found + float(left[:-2]) / 1000
    return found + (float(left[:-1]) if left else 0.0)


@pytest.fixture(scope="module")
def moved() -> Iterator[None]:
    """Time of the scripts and of the headers; leases that outlast every wait."""
    with pytest.MonkeyPatch.context() as patched:
        move_clock(patched)
        patched.setattr(limiter, "LEASE_TTL_S", 1e6)
        patched.setattr(headers.time, "time", lambda: NOW_S)
        yield


@pytest.mark.usefixtures("moved")
@settings(deadline=None, max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(who=callers(), steps=st.lists(STEPS, max_size=8), request=REQUESTS)
def test_a_refused_request_consumes_nothing_and_is_told_exactly_when_to_come_back(
    redis_server_url: str, who: Principal, steps: list[Step], request: tuple[int, int]
) -> None:
    asyncio.run(check(redis_server_url, who, steps, request))


@given(st.integers(1, 10**9))
@example(16_001_000)
@example(100_000)
def test_a_wait_is_rounded_up_once(wait_us: int) -> None:
    told = retry_headers(wait_us / 1_000_000)
    assert told["retry-after-ms"] == str(-(-wait_us // 1_000))
    assert told["retry-after"] == str(-(-wait_us // 1_000_000))
    assert math.ceil(seconds_of(to_duration(wait_us / 1_000_000)) * 1000 - 1e-6) == -(
        -wait_us // 1_000
    )
