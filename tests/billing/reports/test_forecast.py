"""Forecasts of series whose end is known; and of what the books have."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ingestion.ingest import ingest
from billing.reports.forecast import HISTORY_DAYS, MIN_BACKTESTS, expected, forecast, forecast_month
from tests.billing.samples import NOON, an_attempt, an_event

WEEKLY = [70, 80, 90, 100, 60, 10, 5]
EVENT_PICO = 18_160_000
"""The price of one event that `an_event` makes."""


def test_what_repeats_by_the_week_is_forecast_exactly() -> None:
    found = forecast(WEEKLY * 8, spent_pico=1000, today_pico=0, days_left=10)
    assert found.point_pico == 1000 + sum((WEEKLY * 2)[:10])
    assert (found.low_pico, found.high_pico, found.mape) == (found.point_pico,) * 2 + (0,)
    assert found.num_backtests == 56 - 7 - 10 + 1


def test_one_odd_day_does_not_count() -> None:
    odd = WEEKLY * 8
    odd[-3] = 10**9
    assert expected(odd, 7) == expected(WEEKLY * 8, 7)


def test_what_is_spent_today_already_is_the_least() -> None:
    usual = forecast(WEEKLY * 8, spent_pico=0, today_pico=20, days_left=1)
    more = forecast(WEEKLY * 8, spent_pico=0, today_pico=500, days_left=1)
    assert (usual.point_pico, more.point_pico) == (70, 500)


@pytest.mark.parametrize("days", range(7))
def test_a_short_past_has_a_forecast_and_no_interval(days: int) -> None:
    found = forecast(WEEKLY[:days], spent_pico=5, today_pico=1, days_left=3)
    mean = sum(WEEKLY[:days]) // days if days else 0
    assert found.point_pico == 5 + max(mean, 1) + 2 * mean
    assert (found.low_pico, found.high_pico, found.mape) == (None, None, None)


def test_the_interval_holds_what_comes_about_as_often_as_it_says() -> None:
    draws = random.Random(7)
    held = tried = 0
    for _ in range(200):
        series = [int(day * draws.uniform(0.5, 1.5)) for day in WEEKLY * 16][: HISTORY_DAYS - 15]
        past, future = series[:-10], series[-10:]
        found = forecast(past, spent_pico=0, today_pico=0, days_left=10)
        assert found.low_pico is not None and found.high_pico is not None
        assert found.mape is not None and found.mape < 0.25
        tried += 1
        held += found.low_pico <= sum(future) <= found.high_pico
    assert 0.65 <= held / tried <= 0.95


amounts = st.integers(0, 10**18)


@given(st.lists(amounts, max_size=HISTORY_DAYS), amounts, amounts, st.integers(1, 31))
def test_the_point_lies_in_the_interval_and_behind_what_is_spent(
    past: list[int], spent: int, today: int, days: int
) -> None:
    found = forecast(past, spent_pico=spent, today_pico=today, days_left=days)
    assert found.point_pico >= spent + today
    if found.low_pico is not None and found.high_pico is not None:
        assert found.num_backtests >= MIN_BACKTESTS
        assert spent + today <= found.low_pico <= found.point_pico <= found.high_pico


async def test_the_books_say_what_was_spent_in_this_month_and_before(db: AsyncEngine) -> None:
    now = datetime.fromtimestamp(NOON, UTC)  # the 19th of a November
    day_s = timedelta(days=1).total_seconds()
    used = [an_event(an_attempt(admitted_at=NOON - n * day_s)) for n in range(40)]
    other = an_event(an_attempt(project="proj_b"))
    await ingest(db, [*used, other, an_event(an_attempt(org="org_b"))])
    async with db.connect() as conn:
        month = await forecast_month(conn, "org_a", now, "proj_a")
        whole = await forecast_month(conn, "org_a", now)
    assert (month.start.day, month.start.month, month.end.month) == (1, 11, 12)
    assert month.spent_pico == 19 * EVENT_PICO
    assert month.found.point_pico == 30 * EVENT_PICO == month.found.low_pico
    assert month.found.horizon_days == 12
    assert whole.spent_pico == 20 * EVENT_PICO and whole.found.point_pico == 31 * EVENT_PICO
