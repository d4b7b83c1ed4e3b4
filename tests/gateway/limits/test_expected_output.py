"""The forecast learns what a key usually writes from each answer once."""

from __future__ import annotations

import redis.asyncio

from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Settlement, Units
from gateway.limits.output_forecast import MIN_SAMPLES, UNKNOWN_OUTPUT_TOKENS
from gateway.principal import UNLIMITED, Plan, Principal

INPUT_TOKENS = 100
PLAN = Plan(name="wide", tokens_per_minute=10_000_000)


async def admit(limiter: Limiter, plan: Plan, lease_id: str) -> Admission:
    who = Principal(
        org_id="org_persistence",
        project_id="proj_a",
        key_id="key_a",
        key_hint="",
        scopes=frozenset(),
        key_plan=plan,
    )
    verdict = await limiter.admit(
        who, "m", input_tokens=INPUT_TOKENS, max_output_tokens=4096, lease_id=lease_id
    )
    assert isinstance(verdict, Admission)
    return verdict


async def test_a_settle_that_is_repeated_notes_its_output_once(redis: redis.asyncio.Redis) -> None:
    limiter = Limiter(redis)
    admission = await admit(limiter, PLAN, "first")
    for expected in (Settlement.SETTLED, *[Settlement.REPLAYED] * MIN_SAMPLES):
        assert await limiter.settle(admission, Units(output_tokens=7)) is expected
    unsure = await admit(limiter, PLAN, "second")
    assert unsure.reserved.tokens == INPUT_TOKENS + UNKNOWN_OUTPUT_TOKENS, "one answer is not eight"


async def test_without_a_limit_answers_are_noted_all_the_same(redis: redis.asyncio.Redis) -> None:
    limiter = Limiter(redis)
    for number in range(MIN_SAMPLES):
        admission = await admit(limiter, UNLIMITED, f"free {number}")
        await limiter.settle(admission, Units(output_tokens=7))
    assert (await admit(limiter, PLAN, "limited")).reserved.tokens == INPUT_TOKENS + 7
