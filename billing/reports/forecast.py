"""Forecast the cost of a month, with an interval from backtests.

The forecast is seasonal naive, made robust: a future day costs the median of the last WEEKS days of
its weekday, in UTC. For the interval, the same number of days is forecast from every past day with
enough history, and compared with their cost; the worst tenth of the ratios on either side is left
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from statistics import fmean

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.money import Pico, median
from billing.queries import Query, ask
from billing.tables import AnyRow, total_pico, usage_daily

WEEK = 7
WEEKS = 4
HISTORY_DAYS = 120
MIN_BACKTESTS = 5
"""With fewer backtests there is no interval."""
CONFIDENCE_PERCENT = 80
DAY = timedelta(days=1)


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    point_pico: Pico
    low_pico: Pico | None
    high_pico: Pico | None
    """None: there are too few backtests."""
    mape: float | None
    """Mean absolute percentage error of the backtests, as a fraction; None: all their days were
    free."""
    num_backtests: int
    horizon_days: int


class MonthForecast(msgspec.Struct, frozen=True, kw_only=True):
    start: datetime
    end: datetime
    spent_pico: Pico
    """Booked spending so far, today included."""
    found: Forecast


async def forecast_month(
    conn: AsyncConnection, org: str, now: datetime, project: str | None = None
) -> MonthForecast:
    """Forecast the month of `now`, in UTC."""
    return await ask(conn, forecast_query(org, now, project))


def forecast_query(org: str, now: datetime, project: str | None = None) -> Query[MonthForecast]:
    """Return the query of `forecast_month`."""
    own, today = usage_daily.c, _midnight(now)
    found = sa.select(own.day, sa.func.sum(total_pico(own)).label("pico"))
    found = found.where(own.org == org, own.day >= today - HISTORY_DAYS * DAY)
    if project is not None:
        found = found.where(own.project == project)

    def read(rows: Sequence[AnyRow]) -> MonthForecast:
        return _of_days({row.day.astimezone(UTC): int(row.pico) for row in rows}, today)

    return Query(found.group_by(own.day), read)


def _midnight(now: datetime) -> datetime:
    return now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _of_days(by_day: Mapping[datetime, Pico], today: datetime) -> MonthForecast:
    """Forecast the month of `today` by what was spent each day."""
    start = today.replace(day=1)
    end = (start + 31 * DAY).replace(day=1)
    first = min(by_day, default=today)
    past = [by_day.get(first + n * DAY, 0) for n in range((today - first).days)]
    spent = sum(amount for day, amount in by_day.items() if start <= day < today)
    spent_today = by_day.get(today, 0)
    found = forecast(past, spent_pico=spent, today_pico=spent_today, days_left=(end - today).days)
    return MonthForecast(start=start, end=end, spent_pico=spent + spent_today, found=found)


def forecast(
    past: Sequence[Pico], *, spent_pico: Pico, today_pico: Pico, days_left: int
) -> Forecast:
    """Forecast the cost of a month. `past`: the cost of each day before today, oldest first, from
    the first with a cost; at most HISTORY_DAYS. `spent_pico`: the cost of this month before today.
    `days_left`: the days from today to the end of the month."""
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
    """Return the expected cost of each day after `past`."""
    if len(past) < WEEK:
        mean = sum(past) // len(past) if past else 0
        return [mean] * days
    by_weekday = [median(past[-WEEK * WEEKS :][::-1][back::WEEK]) for back in range(WEEK)]
    return [by_weekday[WEEK - 1 - ahead % WEEK] for ahead in range(days)]


def backtest(past: Sequence[Pico], days: int) -> tuple[list[Fraction], list[float]]:
    """Return the sorted ratios of actual to forecast cost, and the errors as fractions of the
    actual cost."""
    ratios, errors = [], []
    for origin in range(WEEK, len(past) - days + 1):
        predicted = sum(expected(past[:origin], days))
        actual = sum(past[origin : origin + days])
        if predicted:
            ratios.append(Fraction(actual, predicted))
        if actual:
            errors.append(abs(actual - predicted) / actual)
    return sorted(ratios), errors
