"""A day's limit of batches after Redis has lost its data begins with what the books say."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis.asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Quantities
from billing.ingestion.ingest import ingest
from gateway.bookkeeping.spend_reader import PostgresBooks, to_owner
from gateway.limits.counters import full_at_us
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Units
from gateway.limits.redis.scope_limits import BucketLimit
from gateway.principal import DAY_US, Plan, Principal
from tests.billing.samples import an_attempt, an_event

A_DAY = 1_000_000
WHO = Principal(
    org_id="org_a",
    project_id="proj_a",
    key_id="key_a",
    key_hint="",
    scopes=frozenset(),
    project_plan=Plan(name="p", batch_tokens_per_day=A_DAY),
)
SCOPE = "tollgate:{org_a}:project:proj_a"


async def it_was() -> bool:
    return True


async def admit(limiter: Limiter, tokens: int) -> bool:
    verdict = await limiter.admit(
        WHO,
        "m",
        input_tokens=tokens,
        max_output_tokens=0,
        lease_id=f"lease-{time.monotonic_ns()}",
        lane="batch",
    )
    if isinstance(verdict, Admission):
        await limiter.void(verdict)
    return isinstance(verdict, Admission)


async def used(db: AsyncEngine, tokens: int, hours_ago: float, **fields: Any) -> None:
    then = (datetime.now(tz=UTC) - timedelta(hours=hours_ago)).timestamp()
    attempt = an_attempt(admitted_at=then, lane=fields.pop("lane", "batch"), **fields)
    await ingest(db, [an_event(attempt, Quantities(output=tokens))])


async def test_it_holds_what_was_not_used_in_the_last_day(
    redis: redis.asyncio.Redis, db: AsyncEngine
) -> None:
    await used(db, 300_000, 0.0)
    await used(db, 400_000, 0.0, lane="interactive")
    await used(db, 400_000, 0.0, project="proj_b")
    await used(db, A_DAY, 50)
    limiter = Limiter(redis, ever_used=it_was, books=PostgresBooks(db))
    assert not await admit(limiter, 705_000), "it did not begin full"
    assert await admit(limiter, 695_000), "nor empty"
    assert await redis.get(f"{SCOPE}:day:d") is not None


async def test_a_batch_that_ends_before_anybody_has_asked_spoils_nothing(
    redis: redis.asyncio.Redis, db: AsyncEngine
) -> None:
    limiter = Limiter(redis, ever_used=it_was, books=PostgresBooks(db))
    verdict = await limiter.admit(
        WHO, "m", input_tokens=400_000, max_output_tokens=0, lease_id="l", lane="batch"
    )
    assert isinstance(verdict, Admission)
    await redis.flushdb()
    await limiter._data_loss_detector.begin("tollgate:{org_a}:epoch")
    await limiter.renew()
    await limiter.settle(verdict, Units(input_tokens=400_000))
    assert await redis.get(SCOPE) is None, "nobody knows what its bucket holds"
    await used(db, 400_000, 0.0)
    assert not await admit(limiter, 605_000) and await admit(limiter, 595_000)


async def test_where_the_books_are_closed_a_share_passes(redis: redis.asyncio.Redis) -> None:
    class Closed(PostgresBooks):
        def __init__(self) -> None: ...

        async def used_by_hour(self, *_: Any) -> Any:
            raise OSError("Postgres is away")

    limiter = Limiter(redis, ever_used=it_was, books=Closed())
    assert await admit(limiter, 100_000) and not limiter._scripts.is_away
    assert not await admit(limiter, 900_000)


def test_hours_are_replayed_as_the_bucket_was_used() -> None:
    limit = BucketLimit("d", 24_000, 24_000, DAY_US)
    hour = 3600.0
    assert full_at_us(limit, [], 10**15) == 0
    # 1000 tokens refill in an hour; used at the end of hours 0 and 1.
    assert full_at_us(limit, [(0.0, 3000), (hour, 500)], 10**15) == round(4.5 * hour * 10**6)
    assert full_at_us(limit, [(0.0, 3000)], 60_000_000) == 60_000_000 + 3 * 3_600_000_000


@pytest.mark.parametrize(
    ("scope", "owner", "found"),
    [
        ("key_model", "key_a/org/m", {"key": "key_a", "model": "org/m"}),
        ("model", "proj_a/m", {"project": "proj_a", "model": "m"}),
        ("client", "c", {"key": "c"}),
        ("org", "org_a", {}),
    ],
)
def test_owners_stand_in_the_books(scope: Any, owner: str, found: dict[str, str]) -> None:
    assert to_owner(scope, owner) == found
