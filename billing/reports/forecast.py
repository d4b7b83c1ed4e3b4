"""Forecast what a month will have cost at its end, and how far such forecasts were off. Pure: no
I/O.

Days are UTC's. A day to come costs what the days of its name cost lately: the median of the last of
them, so that one odd day does not count (seasonal naive, made robust). How far off that is, it is
asked about its own past: from every day that has as much before it as it needs, the same number of
days is forecast and compared with what they cost. The interval is what those errors span, the worst
tenth on either side left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean

import msgspec

from billing.money import Pico, median

WEEK = 7
WEEKS = 4
"""Days of one name that count."""
HISTORY_DAYS = 120
MIN_BACKTESTS = 5
"""With fewer errors there is no interval."""
CONFIDENCE_PERCENT = 80


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    point_pico: Pico
    low_pico: Pico | None
    high_pico: Pico | None
    """None: the past is too short to say how far off it may be."""
    mape: float | None
    """Mean absolute percentage error of the backtests, as a fraction; None: none of their days cost
    anything."""
    num_backtests: int
    horizon_days: int


def forecast(
    past: Sequence[Pico], *, spent_pico: Pico, today_pico: Pico, days_left: int
) -> Forecast:
    """`past`: what each day before today cost, the oldest first, from the first that cost anything;
    HISTORY_DAYS at most. `spent_pico`: of this month before today. `days_left`: from today on."""
    assert days_left >= 1 and len(past) <= HISTORY_DAYS
    today, *later = expected(past, days_left)
    to_come = max(today, today_pico) + sum(later)
    ratios, errors = backtest(past, days_left)
    point, least = spent_pico + to_come, spent_pico + today_pico
    low = high = None
    if len(ratios) >= MIN_BACKTESTS:
        tail = len(ratios) * (100 - CONFIDENCE_PERCENT) // 200
        low = min(point, max(least, spent_pico + int(to_come * ratios[tail])))
        high = max(point, spent_pico + int(to_come * ratios[-1 - tail]))
    return Forecast(
        point_pico=point,
        low_pico=low,
        high_pico=high,
        mape=fmean(errors) if errors else None,
        num_backtests=len(ratios),
        horizon_days=days_left,
    )


def expected(past: Sequence[Pico], days: int) -> list[Pico]:
    """Return the cost expected of each day that follows `past`."""
    if len(past) < WEEK:
        mean = sum(past) // len(past) if past else 0
        return [mean] * days
    by_name = [median(past[-WEEK * WEEKS :][::-1][back::WEEK]) for back in range(WEEK)]
    return [by_name[WEEK - 1 - ahead % WEEK] for ahead in range(days)]


def backtest(past: Sequence[Pico], days: int) -> tuple[list[Fraction], list[float]]:
    """Return sorted ratios of what was to what had been forecast, and the errors as fractions of
    what was."""
    ratios, errors = [], []
    for origin in range(WEEK, len(past) - days + 1):
        said, was = sum(expected(past[:origin], days)), sum(past[origin : origin + days])
        if said:
            ratios.append(Fraction(was, said))
        if was:
            errors.append(abs(was - said) / was)
    return sorted(ratios), errors
