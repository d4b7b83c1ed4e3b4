"""Alerts of tokens per minute: noted in memory, written now and then, each threshold once an hour,
over all gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import redis.asyncio
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gateway.limits import ceilings
from gateway.limits.ceilings import MAX_NOTED, Ceilings
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Units, buckets_of, scopes_of
from gateway.limits.redis.scope_limits import ScopeLimits
from gateway.principal import Plan
from tests.budget import examples
from tests.gateway.limits.test_limiter import limits, of, principal

NOWHERE = "postgresql+asyncpg://nobody@/none?host=/nonexistent"
HOUR = 1_795_089_600.0
"""2026-11-19 12:00:00 UTC."""
NOTHING = Units()
_numbers = count(100)


def scope(owner_id: str = "proj_1", **limited: int) -> ScopeLimits:
    buckets = buckets_of(Plan(name="p", **limited), "interactive")
    return ScopeLimits(scope="project", owner_id=owner_id, buckets=buckets, max_streams=None)


async def raised(db: AsyncEngine, org: str = "org_1") -> list[tuple[str, int, int]]:
    query = "SELECT measure, threshold, used::bigint FROM alerts WHERE org_id = :org ORDER BY id"
    async with db.connect() as conn:
        return [tuple(row) for row in await conn.execute(sa.text(query), {"org": org})]


class Clock:
    def __init__(self) -> None:
        self.now = HOUR

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_each_threshold_is_said_once_an_hour_by_all_gateways(
    db: AsyncEngine, clock: Clock
) -> None:
    both = [Ceilings(db, num_gateways=lambda: 2, wall_clock=clock) for _ in range(2)]
    limited = [scope(tokens_per_minute=1000)]
    for minute in range(3):
        clock.now = HOUR + 60 * minute + 1
        for part in (110, 140, 150, 150):  # of each, so twice as much
            for each in both:
                each.note("org_1", limited, of(part), NOTHING)
            await asyncio.gather(*(each.flush() for each in both))
    tokens = "tokens_per_minute"
    assert [each[:2] for each in await raised(db)] == [(tokens, 50), (tokens, 80), (tokens, 100)]
    clock.now = HOUR + 3600
    both[0].note("org_1", limited, of(600), NOTHING)
    await both[0].flush()
    assert (await raised(db))[3:] == [(tokens, 50, 600)]
    async with db.connect() as conn:
        starts = await conn.scalars(sa.text("SELECT DISTINCT period_start FROM alerts ORDER BY 1"))
        assert [each.timestamp() for each in starts] == [HOUR, HOUR + 3600]


async def test_input_and_output_have_ceilings_of_their_own_and_requests_have_none(
    db: AsyncEngine, clock: Clock
) -> None:
    noting = Ceilings(db, wall_clock=clock)
    limited = scope(
        input_tokens_per_minute=100, output_tokens_per_minute=100, requests_per_minute=1
    )
    blocked = scope("proj_2", tokens_per_minute=0)
    noting.note("org_1", [limited, blocked], Units(input_tokens=60, output_tokens=85), NOTHING)
    noting.note("org_1", [], of(10**6), NOTHING)
    await noting.flush()
    assert sorted(await raised(db)) == [
        ("input_tokens_per_minute", 50, 60),
        ("output_tokens_per_minute", 50, 85),
        ("output_tokens_per_minute", 80, 85),
    ]


async def test_what_is_little_is_not_written_and_what_follows_much_is(
    db: AsyncEngine, clock: Clock
) -> None:
    noting = Ceilings(db, num_gateways=lambda: 4, wall_clock=clock)
    limited = [scope(tokens_per_minute=8000)]

    async def used() -> int | None:
        async with db.connect() as conn:
            found = await conn.scalar(sa.text("SELECT max(used) FROM ceiling_minutes"))
            return None if found is None else int(found)

    noting.note("org_1", limited, of(99), NOTHING)
    await noting.flush()
    assert await used() is None
    noting.note("org_1", limited, of(1), NOTHING)
    await noting.flush()
    noting.note("org_1", limited, of(1), NOTHING)
    await noting.flush()
    assert await used() == 101
    noting.note("org_1", limited, NOTHING, of(51))
    clock.now += 60
    noting.note("org_1", limited, of(9), NOTHING)
    clock.now += 60
    await noting.flush()
    await noting.flush()
    assert await used() == 50 and noting._noted == {}


async def test_what_postgres_does_not_take_is_kept_within_bounds(
    db: AsyncEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ceilings, "MAX_NOTED", 2)
    nowhere = create_async_engine(NOWHERE)
    noting = Ceilings(nowhere, wall_clock=clock)
    for name in ("a", "b", "c", "a"):
        noting.note("org_1", [scope(name, tokens_per_minute=100)], of(30), NOTHING)
    assert [(key[2], each.tokens) for key, each in noting._noted.items()] == [("a", 60), ("b", 30)]
    await noting.flush()
    assert "ceilings not written" in caplog.text
    noting._db = db
    await noting.close()
    assert await raised(db) == [("tokens_per_minute", 50, 60)]
    await nowhere.dispose()
    assert MAX_NOTED > 1000


async def test_it_writes_by_itself(db: AsyncEngine) -> None:
    noting = Ceilings(db, interval_s=0.01)
    noting.start()
    noting.note("org_1", [scope(tokens_per_minute=10)], of(10), NOTHING)
    async with asyncio.timeout(30):
        while len(await raised(db)) < 3:
            await asyncio.sleep(0.01)
    await noting.close()


async def test_the_limiter_notes_what_it_admits_and_puts_it_right_at_the_end(
    redis: redis.asyncio.Redis,
) -> None:
    heard: list[tuple[str, int, int]] = []

    def on_use(org: str, scopes: Sequence[ScopeLimits], taken: Units, back: Units) -> None:
        heard.append((",".join(each.scope for each in scopes), taken.tokens, back.tokens))

    limiter = Limiter(redis, on_use=on_use)
    who = principal(key=limits(tokens=6000), org=limits(tokens=60_000))

    async def admit(lease_id: str, tokens: int) -> Any:
        return await limiter.admit(
            who, "m", input_tokens=tokens, max_output_tokens=0, lease_id=lease_id
        )

    admitted = await admit("one", 100)
    assert isinstance(admitted, Admission)
    await admit("huge", 50_000)
    for _ in range(2):
        await limiter.settle(admitted, of(130))
    voided = await admit("two", 10)
    await limiter.void(voided)
    assert heard == [
        ("key,org", 100, 0), ("key,org", 130, 100), ("key,org", 10, 0), ("key,org", 0, 10),
    ]  # fmt: skip
    free = await limiter.admit(
        principal(), "m", input_tokens=1, max_output_tokens=0, lease_id="free"
    )
    assert isinstance(free, Admission) and scopes_of(principal(), "m", "interactive") == ()
    await limiter.settle(free, of(1))
    assert len(heard) == 4, "nothing limits it"
    await limiter.close()


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 59), st.integers(-20, 120), st.booleans()),
        max_size=12,
    )
)
async def test_thresholds_are_those_of_the_fullest_minute_as_it_was_written(
    db: AsyncEngine, noted: list[tuple[int, int, int, bool]]
) -> None:
    """`noted`: which gateway, in which minute, how many tokens of a hundred, and whether it writes
    then. With one hundred a minute all is written but what is below five."""
    clock, org = Clock(), f"org_{next(_numbers)}"
    gateways = [Ceilings(db, wall_clock=clock) for _ in range(3)]
    limited = [scope(tokens_per_minute=100)]
    told: dict[int, int] = {}
    most = 0
    for which, minute, tokens, writes in sorted(noted, key=lambda each: each[1]):
        clock.now = HOUR + 60 * minute
        taken, back = (of(tokens), NOTHING) if tokens > 0 else (NOTHING, of(-tokens))
        gateways[which].note(org, limited, taken, back)
        if writes:
            before = {key[4]: each for key, each in gateways[which]._noted.items()}
            written = {
                at: each.tokens
                for at, each in before.items()
                if each.tokens and (each.is_told or each.tokens >= 5)
            }
            await gateways[which].flush()
            for at, amount in written.items():
                told[at] = told.get(at, 0) + amount
                most = max(most, told[at])
    found = [each[1] for each in await raised(db, org)]
    assert found == [each for each in (50, 80, 100) if most >= each]
