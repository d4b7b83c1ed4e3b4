"""Reads periods as people say them: `yesterday`, `last 7d`, `2026-11`. All times are of UTC."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec

EXAMPLES = (
    "today, yesterday, this month, last month, last 24h, last 7d, 2026-11, 2026-11-19, "
    "2026-11-01..2026-11-15, 2026-11-01.. (until now)"
)
MAX_CHARS = 100
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNITS = {
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
LAST = re.compile(
    r"last (?:(\d{1,5}) ?)?(m|min|minutes?|h|hours?|d|days?|w|weeks?)", re.ASCII | re.IGNORECASE
)
DATE = re.compile(r"(\d{4})(?:-(\d{2})(?:-(\d{2})(?:[T ](\d{2})(?::(\d{2}))?Z?)?)?)?", re.ASCII)


class Span(msgspec.Struct, frozen=True):
    """A time from `start` up to, and without, `end`."""

    start: datetime
    end: datetime

    @property
    def seconds(self) -> float:
        return (self.end - self.start).total_seconds()

    def to_query(self) -> dict[str, int]:
        """Return what usage reports take: whole Unix seconds that hold all of it."""
        return {
            "start_time": int(self.start.timestamp()),
            "end_time": max(int(self.end.timestamp()), int(self.start.timestamp()) + 1),
        }

    def __str__(self) -> str:
        return f"{to_minute(self.start)} to {to_minute(self.end)} UTC"


def read_span(text: str, now: datetime) -> Span:
    """Read a period. `A..B` begins with A and ends with the end of B.

    Raises: ValueError, which says what can be read.
    """
    words = " ".join(text[:MAX_CHARS].split())
    try:
        begin, dots, end = words.partition("..")
        span = _read_one(begin.strip(), now)
        if dots:
            span = Span(span.start, _read_one(end.strip(), now).end if end.strip() else now)
        if span.start < EPOCH:
            raise ValueError
    except (OverflowError, ValueError):
        raise ValueError(f"{words!r} is no period; try {EXAMPLES}") from None
    if span.end <= span.start:
        raise ValueError(f"{words!r}: it ends before it begins")
    return span


def _read_one(words: str, now: datetime) -> Span:
    """Raises: OverflowError, ValueError."""
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    named: dict[str, Callable[[], Span]] = {
        "today": lambda: Span(today, today + UNITS["d"]),
        "yesterday": lambda: Span(today - UNITS["d"], today),
        "this week": lambda: _week(today),
        "last week": lambda: _week(today - UNITS["w"]),
        "this month": lambda: _month(today.year, today.month),
        "last month": lambda: _month(*_before(today.year, today.month)),
        "this year": lambda: _year(today.year),
        "last year": lambda: _year(today.year - 1),
    }
    if (found := named.get(words.lower())) is not None:
        return found()
    if (last := LAST.fullmatch(words)) is not None:
        number = int(last[1] or 1)
        return _behind(now, number * UNITS[last[2][0].lower()])
    if (date := DATE.fullmatch(words)) is None:
        raise ValueError
    return _read_date(*(None if part is None else int(part) for part in date.groups()))


def _behind(now: datetime, length: timedelta) -> Span:
    if not length:
        raise ValueError
    return Span(now - length, now)


def _read_date(
    year: int | None, month: int | None, day: int | None, hour: int | None, minute: int | None
) -> Span:
    assert year is not None
    if month is None:
        return _year(year)
    if day is None:
        return _month(year, month)
    start = datetime(year, month, day, hour or 0, minute or 0, tzinfo=UTC)
    unit = "d" if hour is None else "h" if minute is None else "m"
    return Span(start, start + UNITS[unit])


def _week(day: datetime) -> Span:
    """ISO 8601: a week begins on Monday."""
    start = day - day.weekday() * UNITS["d"]
    return Span(start, start + UNITS["w"])


def _month(year: int, month: int) -> Span:
    start = datetime(year, month, 1, tzinfo=UTC)
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    return Span(start, datetime(*following, 1, tzinfo=UTC))


def _before(year: int, month: int) -> tuple[int, int]:
    return (year - 1, 12) if month == 1 else (year, month - 1)


def _year(year: int) -> Span:
    return Span(datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC))


def to_minute(moment: datetime | float | None) -> str:
    """Show a moment, or Unix seconds, to the minute."""
    if moment is None:
        return "-"
    if not isinstance(moment, datetime):
        moment = datetime.fromtimestamp(moment, UTC)
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M")
