"""Read the usage of a period in the order of time, as finely as its free allowances need it.

The order matters only at the moment at which an allowance ends. So a period is read by hours, whose
sums exist already; the hour in which an allowance ends by seconds; and that second by requests, in
the order of `admitted_at` and id. Within a request the order is that of `COMPONENTS`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.events import COMPONENTS
from billing.invoices.lines.charges import InvoiceWindow, read_briefly, slices
from billing.invoices.lines.rerated_usage import SIDES
from billing.pricing.adjustments import LineGroup, PeriodTerms, UsageLine, divided
from billing.tables import AMOUNTS, rated_amounts, sums_of

Grain = Literal["hour", "second", "request"]
LENGTH: dict[Grain, timedelta] = {"hour": timedelta(hours=1), "second": timedelta(seconds=1)}
FINER: dict[Grain, Grain] = {"hour": "second", "second": "request"}
_PLACE = "moment, id, model, tier"
_HOUR = "date_trunc('hour', admitted_at, 'UTC')"


class TimedSpan(LineGroup, frozen=True, kw_only=True):
    moment: datetime
    """The beginning of the span."""
    grain: Grain


def _summed(moment: str, request: str, source: str) -> sa.TextClause:
    return sa.text(f"""
        SELECT {_PLACE}, {sums_of((*COMPONENTS, *AMOUNTS))}
        FROM (SELECT *, {moment} AS moment, {request} AS id FROM ({source}) s) e
        GROUP BY {_PLACE} ORDER BY {_PLACE}
    """)


_COUNTED = ", ".join((*COMPONENTS, *AMOUNTS))
_BOOKED = f"""
    SELECT admitted_at, model, tier, {_COUNTED} FROM usage_events u
    WHERE u.org = :org AND u.kind = 'usage' AND u.seq < :cutoff
        AND u.admitted_at >= :from AND u.admitted_at < :to
"""
_RATED = f"""
    SELECT u.id AS request, u.admitted_at, u.model, u.tier, {", ".join(COMPONENTS)},
        {rated_amounts("r", "u")}
    FROM usage_events u LEFT JOIN LATERAL (
        SELECT * FROM event_ratings WHERE event_id = u.id AND seq < :cutoff
        ORDER BY number DESC LIMIT 1
    ) r ON true
    WHERE u.org = :org AND u.kind = 'usage' AND u.seq < :cutoff
        AND u.admitted_at >= :from AND u.admitted_at < :to
"""
_RERATED = f"""
    SELECT admitted_at, model, tier,
        {", ".join(f"sign * {name} AS {name}" for name in (*COMPONENTS, *AMOUNTS))}
    FROM sides WHERE line_kind = 'usage'
"""
_HOURS = _summed(
    "hour",
    "''",
    f"SELECT hour, model, tier, {_COUNTED} FROM usage_charges u"
    " WHERE u.org = :org AND u.hour >= :from AND u.hour < :to",
)
_PART_OF_AN_HOUR = _summed(_HOUR, "''", f"{_BOOKED} AND NOT u.late")
_SINCE_DRAFTED = _summed(_HOUR, "''", f"{_BOOKED} AND u.late")
_CHANGES = sa.text(f"WITH {SIDES} {_summed(_HOUR, chr(39) * 2, _RERATED).text}")
_FINER: dict[Grain, sa.TextClause] = {
    "second": _summed("date_trunc('second', admitted_at, 'UTC')", "''", _RATED),
    "request": _summed("admitted_at", "request", _RATED),
}


async def lines_in_order(
    db: AsyncEngine, window: InvoiceWindow, terms: PeriodTerms
) -> list[UsageLine]:
    """Return the lines of kind `usage` of `charges_of`, in the order of time."""
    async with db.connect() as conn:
        spans = await _by_hour(conn, window)
        while (position := divided(terms, spans)) is not None:
            spans[position : position + 1] = await _finer(conn, window, spans[position])
    return [line for span in spans for line in span.lines]


async def _by_hour(conn: AsyncConnection, window: InvoiceWindow) -> list[TimedSpan]:
    period = window.period
    whole, parts = slices(period)
    reads = [(_HOURS, each.start, each.end) for each in whole]
    reads += [(_PART_OF_AN_HOUR, each.start, each.end) for each in parts]
    reads += [(query, period.start, period.end) for query in (_SINCE_DRAFTED, _CHANGES)]
    rows: list[sa.Row[Any]] = []
    for query, start, end in reads:
        rows += await _read(conn, query, window, start, end)
    return sorted(_spans(rows, "hour"), key=lambda span: span.moment)


async def _finer(conn: AsyncConnection, window: InvoiceWindow, span: TimedSpan) -> list[TimedSpan]:
    start = max(span.moment, window.period.start)
    end = min(span.moment + LENGTH[span.grain], window.period.end)
    grain = FINER[span.grain]
    return list(_spans(await _read(conn, _FINER[grain], window, start, end), grain))


async def _read(
    conn: AsyncConnection,
    query: sa.TextClause,
    window: InvoiceWindow,
    start: datetime,
    end: datetime,
) -> Iterable[sa.Row[Any]]:
    period = window.period
    named: dict[str, Any] = {"org": window.org, "since": window.since, "cutoff": window.cutoff}
    named |= {"start": period.start, "end": period.end, "from": start, "to": end}
    return await read_briefly(conn, query, named)


def _spans(rows: Iterable[sa.Row[Any]], grain: Grain) -> Iterator[TimedSpan]:
    found: dict[tuple[datetime, str], dict[tuple[str, str, str], list[int]]] = {}
    for row in rows:
        span = found.setdefault((row.moment, row.id), defaultdict(lambda: [0, 0]))
        for component, column in zip(COMPONENTS, AMOUNTS, strict=True):
            sums = span[row.model, row.tier, component]
            sums[0] += int(row._mapping[component])
            sums[1] += int(row._mapping[column])
    for (moment, _), lines in found.items():
        yield TimedSpan(
            moment=moment.astimezone(UTC),
            grain=grain,
            divisible=grain in FINER,
            lines=tuple(
                UsageLine(
                    model=model, tier=tier, component=name, quantity=quantity, amount_pico=amount
                )
                for (model, tier, name), (quantity, amount) in lines.items()
                if quantity or amount
            ),
        )
