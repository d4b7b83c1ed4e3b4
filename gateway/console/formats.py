"""Formats what the pages show: money, counts, times, ids. Functions of templates, which escape what
they get; what is exact stands in a title.

A figure that is not known is None, and shown as a dash.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import groupby

from markupsafe import Markup, escape

from billing.money import PICO_PER_USD, format_usd, to_decimal

NOTHING = "–"
SPACE = "\u00a0"
"""Between a number and its unit: it does not break."""
SHOWN_DIGITS = 4
PICO_PER_CENT = 10**10
SCALES = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
WHOLE_BELOW = 100_000
"""Counts below stand in full."""
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
ID_CHARS = 16
"""A longer id is shortened in the middle."""


def usd(pico: int | None) -> str:
    """Show pico-USD: whole cents, and below a dollar the first four digits that count."""
    if pico is None:
        return NOTHING
    if pico == 0 or abs(pico) >= PICO_PER_USD:
        cents, part = divmod(abs(pico), PICO_PER_CENT)
        cents += (part, cents % 2) > (PICO_PER_CENT // 2, 0)  # half a cent to the even one
        text = f"{cents // 100:,}.{cents % 100:02}"
    else:
        amount = to_decimal(abs(pico))
        places = max(2, SHOWN_DIGITS - amount.adjusted() - 1)
        text = f"{round(amount, places):f}"
        whole, _, rest = text.partition(".")
        text = f"{whole}.{rest.rstrip('0').ljust(2, '0')}"
    return f"{'−' if pico < 0 else ''}${SPACE}{text}"


def exact_usd(pico: int | None) -> str:
    """Show pico-USD to the last place."""
    return NOTHING if pico is None else f"${SPACE}{format_usd(pico)}"


def count(number: int | float | None) -> str:
    """Show a count: in full where it is short, else as 41.2 M."""
    if number is None:
        return NOTHING
    if abs(number) < WHOLE_BELOW:
        return f"{number:,.0f}"
    for scale, letter in SCALES:
        if abs(number) >= scale:
            return f"{number / scale:.1f}{SPACE}{letter}"
    return f"{number:,.0f}"


def percent(part: float | None, digits: int = 1) -> str:
    """Show a share. `part`: 0 to 1."""
    return NOTHING if part is None else f"{part * 100:.{digits}f}{SPACE}%"


def ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return NOTHING
    if milliseconds < 10:
        return f"{milliseconds:.1f}{SPACE}ms"
    if milliseconds < 10_000:
        return f"{milliseconds:,.0f}{SPACE}ms"
    return f"{milliseconds / 1000:,.1f}{SPACE}s"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return (
                f"{num_bytes:.0f}{SPACE}{unit}" if unit == "B" else f"{num_bytes:.1f}{SPACE}{unit}"
            )
        num_bytes /= 1024
    return f"{num_bytes:.1f}{SPACE}TiB"


def short_id(text: str) -> str:
    """Shorten an id in the middle; the end tells ids of one hour apart."""
    if len(text) <= ID_CHARS:
        return text
    prefix, underscore, rest = text.partition("_")
    kept = f"{prefix}{underscore}" if underscore and len(prefix) <= 8 else ""
    rest = text[len(kept) :]
    return f"{kept}{rest[:3]}…{rest[-6:]}" if len(rest) > 10 else text


def moment(when: datetime | float | None, zone: tzinfo = UTC) -> str:
    """Show a moment, or Unix seconds, to the minute, in the viewer's zone."""
    return NOTHING if when is None else _at(when, zone).strftime("%Y-%m-%d %H:%M")


def exact_moment(when: datetime | float, zone: tzinfo = UTC) -> str:
    return _at(when, zone).strftime("%Y-%m-%d %H:%M:%S %Z")


def relative(when: datetime | float | None, now: datetime) -> str:
    """Show how long ago a moment was, or in how long it is."""
    if when is None:
        return NOTHING
    seconds = (now - _at(when, UTC)).total_seconds()
    words = duration(abs(seconds))
    if abs(seconds) < 5:
        return "now"
    return f"{words} ago" if seconds > 0 else f"in {words}"


def duration(seconds: float | timedelta) -> str:
    """Show a duration in its largest unit."""
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if seconds < MINUTE_S:
        return f"{seconds:.0f}{SPACE}s"
    if seconds < HOUR_S:
        return f"{seconds / MINUTE_S:.0f}{SPACE}min"
    if seconds < 2 * DAY_S:
        return f"{seconds / HOUR_S:.0f}{SPACE}h"
    return f"{seconds / DAY_S:.0f} days"


def time_tag(when: datetime | float | None, now: datetime, zone: tzinfo = UTC) -> Markup:
    """Show how long ago a moment was; the moment itself on hover."""
    if when is None:
        return Markup(NOTHING)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        _at(when, UTC).isoformat(timespec="seconds"),
        exact_moment(when, zone),
        relative(when, now),
    )


def clock_tag(when: datetime | float, zone: tzinfo = UTC) -> Markup:
    """Show the time of day of a moment, which stays right however long it is looked at; the moment
    itself on hover."""
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        _at(when, UTC).isoformat(timespec="seconds"),
        exact_moment(when, zone),
        _at(when, zone).strftime("%H:%M:%S"),
    )


def coded(text: str) -> Markup:
    """Show what stands between backticks as code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if at % 2 else escape(part)
        for at, part in enumerate(parts)
    )


def spark(values: Sequence[float | None]) -> tuple[str, str]:
    """Return the SVG paths of a line and of what is below it, in a box of 240 by 32. A value that
    is not known is a gap."""
    highest = max((each for each in values if each is not None), default=0) or 1
    step = 240 / max(len(values) - 1, 1)
    line, below = "", ""
    for is_known, run in groupby(enumerate(values), lambda each: each[1] is not None):
        if not is_known:
            continue
        points = [f"{at * step:.1f},{29 - 25 * (value or 0) / highest:.1f}" for at, value in run]
        first, last = points[0].partition(",")[0], points[-1].partition(",")[0]
        line += f"M{' '.join(points)}{'h3' if len(points) == 1 else ''}"
        below += f"M{first},32L{' '.join(points)} {last},32Z"
    return line, below


def _at(when: datetime | float, zone: tzinfo) -> datetime:
    if not isinstance(when, datetime):
        when = datetime.fromtimestamp(when, UTC)
    return when.astimezone(zone)
