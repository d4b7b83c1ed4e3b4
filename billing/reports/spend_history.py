"""Read what an org has spent by day, as a forecast wants it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.money import Pico
from billing.reports.forecast import HISTORY_DAYS, Forecast, forecast
from billing.tables import AMOUNTS, usage_daily

DAY = timedelta(days=1)


class MonthForecast(msgspec.Struct, frozen=True, kw_only=True):
    start: datetime
    end: datetime
    spent_pico: Pico
    """So far, today included, as the books have it."""
    found: Forecast


async def forecast_month(
    conn: AsyncConnection, org: str, now: datetime, project: str | None = None
) -> MonthForecast:
    """Forecast the month of `now`, in UTC."""
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    start = today.replace(day=1)
    end = (start + 31 * DAY).replace(day=1)
    by_day = await _spent_by_day(conn, org, today - HISTORY_DAYS * DAY, project)
    first = min(by_day, default=today)
    past = [by_day.get(first + n * DAY, 0) for n in range((today - first).days)]
    spent = sum(amount for day, amount in by_day.items() if start <= day < today)
    spent_today = by_day.get(today, 0)
    found = forecast(past, spent_pico=spent, today_pico=spent_today, days_left=(end - today).days)
    return MonthForecast(start=start, end=end, spent_pico=spent + spent_today, found=found)


async def _spent_by_day(
    conn: AsyncConnection, org: str, since: datetime, project: str | None
) -> dict[datetime, Pico]:
    own = usage_daily.c
    total = sa.func.sum(sum((own[name] for name in AMOUNTS), sa.literal(0)))
    found = sa.select(own.day, total).where(own.org == org, own.day >= since)
    if project is not None:
        found = found.where(own.project == project)
    rows = await conn.execute(found.group_by(own.day))
    return {day.astimezone(UTC): int(amount) for day, amount in rows}
