"""Periods as people say them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.periods import EXAMPLES, Span, read_span

NOW = datetime(2026, 11, 19, 13, 14, 15, tzinfo=UTC)
MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))


def at(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type,misc]


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("today", at(2026, 11, 19), at(2026, 11, 20)),
        ("Yesterday", at(2026, 11, 18), at(2026, 11, 19)),
        ("this week", at(2026, 11, 16), at(2026, 11, 23)),
        ("last week", at(2026, 11, 9), at(2026, 11, 16)),
        ("this  month", at(2026, 11, 1), at(2026, 12, 1)),
        ("last month", at(2026, 10, 1), at(2026, 11, 1)),
        ("last year", at(2025, 1, 1), at(2026, 1, 1)),
        ("last 7d", NOW - timedelta(days=7), NOW),
        ("last 24 hours", NOW - timedelta(hours=24), NOW),
        ("last 90m", NOW - timedelta(minutes=90), NOW),
        ("last hour", NOW - timedelta(hours=1), NOW),
        ("last 2w", NOW - timedelta(days=14), NOW),
        ("2026", at(2026, 1, 1), at(2027, 1, 1)),
        ("2026-12", at(2026, 12, 1), at(2027, 1, 1)),
        ("2026-11-19", at(2026, 11, 19), at(2026, 11, 20)),
        ("2026-11-19T05", at(2026, 11, 19, 5), at(2026, 11, 19, 6)),
        ("2026-11-19 05:30", at(2026, 11, 19, 5, 30), at(2026, 11, 19, 5, 31)),
        ("2026-11-01..2026-11-15", at(2026, 11, 1), at(2026, 11, 16)),
        ("2026-11-01..", at(2026, 11, 1), NOW),
        ("last month..yesterday", at(2026, 10, 1), at(2026, 11, 19)),
    ],
)
def test_periods_are_read_as_they_are_said(text: str, start: datetime, end: datetime) -> None:
    assert read_span(text, NOW) == Span(start, end)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "last 0d", "2026-13", "2026-02-30", "0000", "9999", "last 99999w", "..", "1..2",
     "2026-11-15..2026-11-01", "2026-11-19T24", "last d7", "²026"],
)  # fmt: skip
def test_what_is_no_period_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="no period; try today|ends before"):
        read_span(text, NOW)


def test_every_example_is_one() -> None:
    for text in EXAMPLES.removesuffix(" (until now)").split(", "):
        read_span(text, NOW)


@given(st.text(max_size=40), MOMENTS)
def test_any_text_is_a_period_forwards_in_time_or_refused(text: str, now: datetime) -> None:
    try:
        span = read_span(text, now)
    except ValueError as error:
        assert "no period" in str(error) or "ends before" in str(error)
    else:
        assert span.start < span.end
        query = span.to_query()
        assert query["start_time"] < query["end_time"]


@given(MOMENTS)
def test_days_and_months_follow_each_other_without_gaps(now: datetime) -> None:
    assert read_span("yesterday", now).end == read_span("today", now).start
    assert read_span("last month", now).end == read_span("this month", now).start
    assert read_span("last week", now).end == read_span("this week", now).start
    today = read_span("today", now)
    assert today.start <= now < today.end
    assert read_span(f"{now:%Y-%m-%d}", now) == today
    assert read_span(f"{now:%Y-%m}", now) == read_span("this month", now)
