"""Reads the time range of a page: `?range=24h`, `7d`, `2026-11`, `yesterday`, or `?from=…&to=…`
with Unix seconds, dates or moments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from foundation.periods import Span, read_span

DEFAULT = "24h"
MAX_DAYS = 3 * 366
"""No page reads more at once."""
LAST = re.compile(r"(\d{1,5})([mhdw])", re.ASCII)
SECONDS = re.compile(r"\d{1,11}", re.ASCII)
CHOICES = (
    ("1h", "Last hour"),
    ("24h", "Last 24 h"),
    ("7d", "Last 7 days"),
    ("30d", "Last 30 days"),
    ("today", "Today"),
    ("yesterday", "Yesterday"),
    ("this month", "This month"),
    ("last month", "Last month"),
)
LABELS = dict(CHOICES)


class TimeRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range of time, as it was asked for."""

    start: datetime
    end: datetime
    text: str
    """Names it in an address; empty: it was given by `from` and `to`."""
    label: str

    @property
    def length(self) -> timedelta:
        return self.end - self.start

    @property
    def before(self) -> TimeRange:
        """Return the range of the same length just before."""
        start = self.start - self.length
        return TimeRange(start=start, end=self.start, text="", label="the period before")

    @property
    def query(self) -> dict[str, str]:
        """Return the parameters by which another page has the same range."""
        if self.text:
            return {"range": self.text}
        return {"from": f"{self.start.timestamp():.0f}", "to": f"{self.end.timestamp():.0f}"}

    @property
    def is_long(self) -> bool:
        """Tell whether it is shown by days, not by hours."""
        return self.length > timedelta(days=8)


def read_range(query: Mapping[str, str], now: datetime, default: str = DEFAULT) -> TimeRange:
    """Raises: ValueError, which says what can be read."""
    if "from" in query:
        begin, end = query["from"].strip(), query.get("to", "").strip()
        start = _read_end(begin, now).start
        stop = _read_end(end, now).end if end else now
        if not start < stop:
            raise ValueError("the range ends before it begins")
        found = Span(start, stop)
        text, label = "", f"{start:%Y-%m-%d %H:%M} to {stop:%Y-%m-%d %H:%M} UTC"
    else:
        text = " ".join((query.get("range") or default).split())
        last = LAST.fullmatch(text)
        found = read_span(f"last {text}" if last else text, now)
        label = LABELS.get(text) or (f"Last {last[1]} {last[2]}" if last else text.capitalize())
    if found.end - found.start > timedelta(days=MAX_DAYS):
        raise ValueError(f"the range is longer than {MAX_DAYS} days")
    return TimeRange(start=found.start, end=found.end, text=text, label=label)


def _read_end(text: str, now: datetime) -> Span:
    """Raises: ValueError."""
    if SECONDS.fullmatch(text):
        moment = datetime.fromtimestamp(int(text), UTC)
        return Span(moment, moment)
    return read_span(text, now)
