"""A forecast follows the trend and the shape of the day, and is never below what there is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.planner.forecast import BUCKET_S, DAY_MINUTES, WINDOW_S, Forecast

DAY_S = 60.0 * DAY_MINUTES
STEP_S = 30.0


def rate_of_day(at_s: float) -> float:
    """Return a rate that is three times as large for an hour from 10:00."""
    return 3.0 if 10 * 3600 <= at_s % DAY_S < 11 * 3600 else 1.0


def after(seconds: float, forecast: Forecast, begin_s: float = 0.0) -> Forecast:
    steps = int(seconds // STEP_S)
    for number in range(steps):
        at_s = begin_s + number * STEP_S
        forecast.observe(at_s, rate_of_day(at_s), STEP_S)
    return forecast


def test_what_comes_each_day_is_expected_before_it_comes() -> None:
    before_s = DAY_S + 10 * 3600 - 300
    forecast = after(before_s, Forecast())
    assert forecast.level == pytest.approx(1.0, rel=0.05)
    assert forecast.at(before_s, 900) > 2.5
    assert Forecast(forecast.profile).usual(10.5 * 3600) == pytest.approx(3.0, rel=0.05)


def test_growth_goes_on_for_as_long_as_it_is_looked_ahead() -> None:
    forecast = Forecast()
    for number in range(60):
        forecast.observe(5.0 * number, 0.1 * number, 5.0)
    assert forecast.at(300, 60) == pytest.approx(5.9 + 60 * 0.02, rel=0.15)


@given(rates=st.lists(st.floats(0, 1e3), max_size=50), ahead_s=st.floats(0, 1e4))
def test_it_is_a_rate_and_no_less_than_the_one_now(rates: list[float], ahead_s: float) -> None:
    forecast = Forecast()
    for number, rate in enumerate(rates):
        forecast.observe(20.0 * number, rate, 20.0)
    found = forecast.at(20.0 * len(rates), ahead_s)
    assert math.isfinite(found) and 0 <= forecast.level <= found


def test_a_profile_of_another_length_is_none() -> None:
    assert Forecast([1.0, 2.0]).usual(0.0) is None


def came(rng: random.Random, rate: float, seconds: float, bunch: int = 1) -> float:
    """Return how many a second came of a Poisson process of that rate, each with company."""
    number, at_s = 0, rng.expovariate(rate / bunch)
    while at_s < seconds:
        number, at_s = number + bunch, at_s + rng.expovariate(rate / bunch)
    return number / seconds


@pytest.mark.parametrize(("bunch", "most"), [(1, 1.35), (8, 4.0)])
def test_accidents_are_no_growth(bunch: int, most: float) -> None:
    """The forecast for half a minute ahead stays near a rate that stays."""
    rng, forecast = random.Random(1), Forecast()
    expected = []
    for number in range(720):
        forecast.observe(5.0 * number, came(rng, 4.0, 5.0, bunch), 5.0)
        expected.append(forecast.at(5.0 * number, 35.0))
    known = expected[36:]
    assert max(known) <= most * 4.0
    assert sum(known) / len(known) <= 1.3 * 4.0


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_jump_is_followed_at_once(factor: float) -> None:
    rng, forecast = random.Random(2), Forecast()
    for number in range(120):
        forecast.observe(5.0 * number, came(rng, 4.0, 5.0), 5.0)
    for number in range(120, 124):
        forecast.observe(5.0 * number, came(rng, 4.0 * factor, 5.0), 5.0)
    assert forecast.level == pytest.approx(4.0 * factor, rel=0.25)


def test_looks_that_are_close_are_kept_as_few() -> None:
    forecast = Forecast()
    for number in range(1000):
        forecast.observe(0.25 * number, 10.0, 0.25)
    assert len(forecast._came) <= 2 * WINDOW_S / BUCKET_S
