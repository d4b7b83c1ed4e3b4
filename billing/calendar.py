"""When a billing period begins and ends, and when its invoice is due, where the customer is. Pure.

A period runs from midnight of the billing day in the customer's timezone to midnight of the next
one; in a month that is too short, of its last day. What is stored and compared are moments in UTC,
so hours that a change of clocks repeats or leaves out belong to exactly one period. Where midnight
itself is left out, the day begins when the clocks have changed; where it comes twice, the first one
counts.
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
    """The first moment of that day there."""
    # In a gap the offset before it holds (fold=0), which makes midnight the moment of the change.
    return datetime.combine(day, time(), zone_of(timezone)).astimezone(UTC)


def boundary(year: int, month: int, billing_day: int, timezone: str) -> datetime:
    day = min(billing_day, monthrange(year, month)[1])
    return day_begins(date(year, month, day), timezone)


def _month_after(year: int, month: int, months: int) -> tuple[int, int]:
    years, month = divmod(month - 1 + months, 12)
    return year + years, month + 1


def next_boundary(moment: datetime, billing_day: int, timezone: str) -> datetime:
    """The first one after `moment`."""
    return _near(moment, billing_day, timezone)[1]


def period_at(moment: datetime, billing_day: int, timezone: str) -> Period:
    """The one that `moment` falls into."""
    return Period(*_near(moment, billing_day, timezone))


def _near(moment: datetime, billing_day: int, timezone: str) -> tuple[datetime, datetime]:
    """The boundaries before (or at) `moment` and after it."""
    local = moment.astimezone(zone_of(timezone))
    found = [
        boundary(*_month_after(local.year, local.month, months), billing_day, timezone)
        for months in (-1, 0, 1)
    ]
    before = max(each for each in found if each <= moment)
    return before, min(each for each in found if each > moment)


def due_at(finalized_at: datetime, net_days: int, timezone: str) -> datetime:
    """The end of the last day on which it can be paid in time."""
    day = finalized_at.astimezone(zone_of(timezone)).date() + timedelta(days=net_days + 1)
    return day_begins(day, timezone)
