"""Billing periods and due dates in the customer's timezone. Pure.

A period runs from midnight of the billing day to midnight of the next one; a month that is too
short has it on its last day. Moments are stored and compared in UTC, so each hour that a change of
clocks repeats or skips belongs to exactly one period. Where midnight is skipped, the day begins
when the clocks have changed; where it comes twice, the first one counts.
"""

from __future__ import annotations

from calendar import monthrange
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

import msgspec


class Period(msgspec.Struct, frozen=True, order=True):
    """[start, end), in UTC."""

    start: datetime
    end: datetime


@cache
def timezones() -> frozenset[str]:
    return frozenset(available_timezones())


@cache
def zone_of(timezone: str) -> ZoneInfo:
    return ZoneInfo(timezone)


def day_begins(day: date, timezone: str) -> datetime:
    """Return the first moment of a day in a timezone."""
    # In a gap the offset before it holds (fold=0), which makes midnight the moment of the change.
    return datetime.combine(day, time(), zone_of(timezone)).astimezone(UTC)


def boundary(year: int, month: int, billing_day: int, timezone: str) -> datetime:
    day = min(billing_day, monthrange(year, month)[1])
    return day_begins(date(year, month, day), timezone)


def _month_after(year: int, month: int, months: int) -> tuple[int, int]:
    years, month = divmod(month - 1 + months, 12)
    return year + years, month + 1


def next_boundary(moment: datetime, billing_day: int, timezone: str) -> datetime:
    """Return the first period boundary after `moment`."""
    return period_at(moment, billing_day, timezone).end


def period_at(moment: datetime, billing_day: int, timezone: str) -> Period:
    """Return the period that `moment` falls into."""
    local = moment.astimezone(zone_of(timezone))
    boundaries = [
        boundary(*_month_after(local.year, local.month, months), billing_day, timezone)
        for months in (-1, 0, 1)
    ]
    start = max(each for each in boundaries if each <= moment)
    return Period(start, min(each for each in boundaries if each > moment))


def due_at(finalized_at: datetime, net_days: int, timezone: str) -> datetime:
    """Return the end of the last day on which an invoice can be paid in time."""
    day = finalized_at.astimezone(zone_of(timezone)).date() + timedelta(days=net_days + 1)
    return day_begins(day, timezone)
