"""A period begins at midnight where the customer is, whatever clocks and months do."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.calendar import (
    Period,
    day_begins,
    due_at,
    next_boundary,
    period_at,
    timezones,
)

moments = st.datetimes(datetime(1980, 1, 1), datetime(2037, 1, 1), timezones=st.just(UTC))
zones = st.sampled_from(sorted(timezones()))
days = st.integers(1, 31)


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type,misc]


@given(moments, days, zones)
def test_periods_follow_each_other_and_leave_nothing_out(
    moment: datetime, billing_day: int, timezone: str
) -> None:
    period = period_at(moment, billing_day, timezone)
    assert period.start <= moment < period.end
    assert period_at(period.start, billing_day, timezone) == period
    assert period_at(period.end - timedelta.resolution, billing_day, timezone) == period
    assert period_at(period.end, billing_day, timezone).start == period.end
    assert timedelta(days=26) < period.end - period.start < timedelta(days=33)
    assert next_boundary(moment, billing_day, timezone) == period.end


@given(st.dates(date(1980, 1, 2), date(2037, 1, 1)), zones)
def test_a_day_begins_with_its_first_moment(day: date, timezone: str) -> None:
    begun, zone = day_begins(day, timezone), ZoneInfo(timezone)
    # A day that a place has left out, by crossing the date line, begins where the next one does.
    assert begun.astimezone(zone).date() - day in (timedelta(), timedelta(days=1))
    assert (begun - timedelta.resolution).astimezone(zone).date() < day


@pytest.mark.parametrize(
    ("moment", "billing_day", "timezone", "expected"),
    [
        # Not on the first of the month in UTC: it is October there for four more hours.
        (utc(2026, 11, 1, 2), 1, "America/New_York",
         Period(utc(2026, 10, 1, 4), utc(2026, 11, 1, 4))),
        # Its clocks go back in it: 30 days and an hour.
        (utc(2026, 11, 20), 1, "America/New_York",
         Period(utc(2026, 11, 1, 4), utc(2026, 12, 1, 5))),
        # A leap day is the last of its month, and so is the 28th.
        (utc(2028, 2, 10), 31, "UTC", Period(utc(2028, 1, 31), utc(2028, 2, 29))),
        (utc(2027, 2, 28), 30, "UTC", Period(utc(2027, 2, 28), utc(2027, 3, 30))),
        # Midnight of the day on which Beirut's clocks went forward was one o'clock.
        (utc(2022, 3, 27), 27, "Asia/Beirut",
         Period(utc(2022, 3, 26, 22), utc(2022, 4, 26, 21))),
        # Havana's midnight came twice.
        (utc(2026, 11, 1, 4, 30), 1, "America/Havana",
         Period(utc(2026, 11, 1, 4), utc(2026, 12, 1, 5))),
        # Samoa had no 30th of December in 2011.
        (utc(2011, 12, 30, 12), 30, "Pacific/Apia",
         Period(utc(2011, 12, 30, 10), utc(2012, 1, 29, 10))),
        (utc(2026, 7, 1), 1, "Asia/Kathmandu",
         Period(utc(2026, 6, 30, 18, 15), utc(2026, 7, 31, 18, 15))),
    ],
)  # fmt: skip
def test_where_others_are_off_by_a_timezone(
    moment: datetime, billing_day: int, timezone: str, expected: Period
) -> None:
    assert period_at(moment, billing_day, timezone) == expected


def test_an_invoice_is_due_at_the_end_of_a_day_there() -> None:
    finalized_at = utc(2026, 10, 2, 3)  # the first of October still, in New York
    assert due_at(finalized_at, 30, "America/New_York") == utc(2026, 11, 1, 4)
    assert due_at(finalized_at, 0, "America/New_York") == utc(2026, 10, 2, 4)
