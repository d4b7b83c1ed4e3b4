"""Spend that is unusual for its hour is told of once a day; what repeats by the week is not."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import UNUSUAL, select_alerts, to_alerts
from billing.alerts.unusual_spend import LEAST_EXCESS_PICO, MIN_WEEKS, bound_pico, watch
from billing.events import Price, Quantities
from billing.ingestion.ingest import ingest
from billing.money import PICO_PER_USD, Pico
from tests.billing.samples import NOON, an_attempt, an_event

WEEK_S = 7 * 86_400
USD = PICO_PER_USD
AFTERWARDS = datetime.fromtimestamp(NOON, UTC) + timedelta(hours=1, minutes=11)


@pytest.mark.parametrize(
    ("past", "bound"),
    [
        ([10 * USD] * (MIN_WEEKS - 1), None),
        ([10 * USD] * 8, 20 * USD),
        ([0] * 8, LEAST_EXCESS_PICO),
        ([10 * USD] * 7 + [900 * USD], 20 * USD),
        ([8 * USD, 12 * USD] * 4, 10 * USD + 6 * 2 * USD * 14_826 // 10_000),
    ],
)
def test_what_is_usual(past: list[Pico], bound: Pico | None) -> None:
    assert bound_pico(past) == bound


@given(st.lists(st.integers(0, 10**18), min_size=MIN_WEEKS, max_size=8))
def test_at_least_twice_the_middle_is_usual(past: list[Pico]) -> None:
    bound = bound_pico(past)
    assert bound is not None and bound >= 2 * sorted(past)[(len(past) - 1) // 2]


async def spend(db: AsyncEngine, org: str, dollars: int, *, weeks_ago: int = 0) -> None:
    prices = {"output": Price("one", USD)}
    attempt = an_attempt(org=org, prices=prices, admitted_at=NOON - weeks_ago * WEEK_S)
    await ingest(db, [an_event(attempt, Quantities(output=dollars))])


async def raised(db: AsyncEngine, org: str) -> list[tuple[str, int, int]]:
    async with db.connect() as conn:
        found = to_alerts(await conn.execute(select_alerts(org)))
    assert all(each.measure == UNUSUAL and each.period == "day" for each in found)
    return [(each.scope_id, each.ceiling // USD, each.used // USD) for each in found]


async def test_it_is_told_of_once_whoever_looks(db: AsyncEngine) -> None:
    async with db.begin() as conn:
        for org in ("org_a", "org_b", "org_new"):
            await conn.execute(
                sa.text("INSERT INTO orgs (id, name) VALUES (:id, :id)"), {"id": org}
            )
    for weeks_ago in range(1, 9):
        for org in ("org_a", "org_b"):
            await spend(db, org, 10, weeks_ago=weeks_ago)
    await spend(db, "org_a", 25)
    await spend(db, "org_b", 15)
    await spend(db, "org_new", 500)
    await watch(db, AFTERWARDS - timedelta(minutes=2))  # the hour is over, and still being booked
    assert await raised(db, "org_a") == []
    await asyncio.gather(watch(db, AFTERWARDS), watch(db, AFTERWARDS))
    await watch(db, AFTERWARDS)
    assert await raised(db, "org_a") == [("org_a", 20, 25)]
    assert await raised(db, "org_b") == [] == await raised(db, "org_new")
