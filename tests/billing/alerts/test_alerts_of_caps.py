"""Alerts of caps that are made or changed: what is spent already of the period that runs is said in
the transaction that does it, and nothing falls between that and a booking."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import THRESHOLDS, raise_for_cap
from billing.ingestion.ingest import ingest
from tests.billing.alerts.test_alerts import DAY_S, archive, cap, raised, spends
from tests.billing.samples import NOON
from tests.budget import examples

_numbers = count(100)
AT = datetime.fromtimestamp(NOON, UTC)


async def looks(db: AsyncEngine, cap_id: str, at: datetime | None = AT) -> None:
    async with db.begin() as conn:
        await raise_for_cap(conn, cap_id, at)


async def test_what_is_spent_counts_in_the_period_that_runs(db: AsyncEngine) -> None:
    await ingest(db, [spends(50), spends(30, NOON - DAY_S), spends(20, NOON - 40 * DAY_S)])
    await ingest(db, [spends(1000, org="org_b"), spends(1000, project="proj_b", key="k2")])
    for period, used in (("day", 50), ("month", 80), ("total", 100)):
        made = await cap(db, 100, project="proj_a", period=period)  # type: ignore[arg-type]
        await looks(db, made)
        await looks(db, made)
        found = [each for each in await raised(db) if each[0] == made]
        assert [each[3:] for each in found] == [(at, used) for at in THRESHOLDS if at <= used]
        assert {each[2] for each in found} == {
            {"day": "2026-11-19", "month": "2026-11-01", "total": "1970-01-01"}[period]
        }
    tomorrow = await cap(db, 1)
    await looks(db, tomorrow, AT + timedelta(days=1))
    gone = await cap(db, 1, key="k")
    await archive(db, gone)
    await looks(db, gone)
    nothing = await cap(db, 0, key="idle")
    await looks(db, nothing, None)
    assert {each[0] for each in await raised(db)}.isdisjoint({tomorrow, gone, nothing})


@pytest.mark.parametrize("turns", [6])
async def test_what_is_booked_while_a_cap_is_made_is_told_by_one_of_both(
    db: AsyncEngine, turns: int
) -> None:
    """This holds whichever stands first; no event follows that would tell."""

    async def made(org: str) -> None:
        async with db.begin() as conn:
            await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
            added = sa.text("""
                INSERT INTO spend_caps (id, org_id, period, amount_pico, hard, by_operator)
                VALUES (:org, :org, 'day', 100, false, false)
            """)
            await conn.execute(added, {"org": org})
            await raise_for_cap(conn, org, AT)
            await asyncio.sleep(0.02)  # until then nobody else sees it

    for turn in range(turns):
        org = f"org_{turn}"
        batches = [ingest(db, [spends(25, org=org, key=f"k{n}")]) for n in range(4)]
        await asyncio.gather(*batches[: turn % 4], made(org), *batches[turn % 4 :])
        assert [each[3] for each in await raised(db, org)] == [50, 80, 100], org


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    first=st.integers(0, 200),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=8),
)
async def test_each_threshold_that_was_ever_reached_was_said_once(
    db: AsyncEngine, first: int, steps: list[tuple[bool, int]]
) -> None:
    """`steps`: a new amount of the cap, or what is spent."""
    org = f"org_{next(_numbers)}"
    made = await cap(db, first, org=org)
    amount, spent, reached = first, 0, set[int]()
    for changes, number in [(True, first), *steps]:
        if changes:
            amount = number
            async with db.begin() as conn:
                changed = sa.text("UPDATE spend_caps SET amount_pico = :amount WHERE id = :id")
                await conn.execute(changed, {"amount": amount, "id": made})
                await raise_for_cap(conn, made, AT)
        else:
            spent += number
            await ingest(db, [spends(number, org=org)])
        reached |= {at for at in THRESHOLDS if spent and spent * 100 >= amount * at}
        assert sorted(each[3] for each in await raised(db, org)) == sorted(reached)
