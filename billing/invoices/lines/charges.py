"""Charges: the booked amounts in an invoice's window, added up by project, model, tier, component
and price. Nothing is priced here.

    window of invoice n:   admitted in its period, posted before its cutoff
                        +  admitted before its period, posted since the cutoff of invoice n - 1

So every posting is in exactly one invoice, for good: a late one, for a period whose invoice is
final, is in the next invoice, with the period that it belongs to. A cutoff is a number of
`posting_seq` that is drawn under an exclusive lock of the books (`take_cutoff`): earlier postings
have lower numbers, later ones higher, whatever the clocks say.

A period is read from the sums that are written with its events (`usage_charges`), a day at a time,
so ten million events take thirty short statements, without a lock. Once a draft covers an hour,
nothing is added to its sums: later events are marked (`usage_events.late`, decided under the lock
of the cutoff) and read one by one, up to the cutoff.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.calendar import Period
from billing.errors import InvoicingConflict
from billing.events import COMPONENTS, PriceSet
from billing.invoices.lines.rerated_usage import PARTS
from billing.ledger.accounts import USES
from billing.ledger.spend_totals import hold_books
from billing.money import Pico
from billing.pricing.rating import price_of
from billing.tables import AMOUNTS, EPOCH, REQUESTS, sums_of

Kind = Literal["usage", "late", "correction", "adjustment"]
HOUR, SLICE = timedelta(hours=1), timedelta(days=1)
MAX_LINES = 100_000
"""An invoice has at most so many lines; more would come from invented names of models."""
CHARGES = """
    (t.debit = {account} AND t.credit LIKE 'revenue:%'
        OR t.credit = {account} AND t.debit LIKE 'revenue:%')
"""
"""SQL: true if a transfer `t` charges usage, false if it is about payment."""
CHARGED = "sum(CASE WHEN t.debit = {account} THEN t.amount_pico ELSE -t.amount_pico END)"


class InvoiceWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The postings that one invoice counts."""

    org: str
    period: Period
    since: int
    """The cutoff of the previous invoice."""
    cutoff: int
    earlier: tuple[Period, ...] = ()
    """The periods of earlier invoices."""


class Subject(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The subject of a line: what its charge is for."""

    usage: Period
    kind: Kind
    project: str
    model: str
    tier: str
    component: str
    price_id: str
    """Empty without a price."""
    pico_per_token: int | None


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    subject: Subject
    quantity: int
    num_requests: int
    amount_pico: Pico


Sums = dict[Subject, list[int]]
"""Quantity, number of requests and pico-USD of each subject."""
_prices = msgspec.json.Decoder(PriceSet)


async def take_cutoff(conn: AsyncConnection) -> int:
    """Draw a cutoff behind all booked postings. The caller commits at once, since the books are
    locked until then."""
    await hold_books(conn)
    found = await conn.scalar(sa.text("SELECT nextval('posting_seq')"))
    assert isinstance(found, int)
    return found


BOUNDS = """
    unnest(CAST(:starts AS timestamptz[]), CAST(:ends AS timestamptz[]))
        AS b(usage_start, usage_end)
"""
_ITS_PERIOD = """
    CAST(:usage_start AS timestamptz) AS usage_start, CAST(:usage_end AS timestamptz) AS usage_end
"""


def _summed(usage: str, source: str, where: str, requests: str) -> Any:
    """Return a query that adds up usage by the prices at which it was admitted."""
    return sa.text(f"""
        SELECT e.*, CAST(s.prices AS text) AS prices FROM (
            SELECT {usage}, project, model, tier, price_set, band,
                {sums_of((*COMPONENTS, *AMOUNTS))}, {requests}
            FROM {source} WHERE u.org = :org AND {where}
            GROUP BY 1, 2, project, model, tier, price_set, band
        ) e JOIN price_sets s ON s.id = e.price_set
    """)


def _of_events(usage: str, source: str, where: str) -> Any:
    booked = f"u.kind = 'usage' AND u.seq < :cutoff AND {where}"
    return _summed(usage, source, booked, USES)


_HOURS = _summed(
    _ITS_PERIOD,
    "usage_charges u",
    "u.hour >= :from AND u.hour < :to",
    sums_of(REQUESTS),
)
_PART_OF_AN_HOUR = _of_events(
    _ITS_PERIOD,
    "usage_events u",
    "NOT u.late AND u.admitted_at >= :from AND u.admitted_at < :to",
)
_SINCE_DRAFTED = _of_events(
    _ITS_PERIOD, "usage_events u", "u.late AND u.admitted_at >= :start AND u.admitted_at < :end"
)
_BY_PERIOD = (
    f"usage_events u JOIN {BOUNDS} ON u.admitted_at >= usage_start AND u.admitted_at < usage_end"
)
_BEFORE = "u.seq >= :since AND u.admitted_at < :start"
_BEFORE_THE_FIRST = _of_events("usage_start, usage_end", _BY_PERIOD, _BEFORE)
_LATE = _of_events("usage_start, usage_end", _BY_PERIOD, f"u.late AND {_BEFORE}")
_BAND = """
    CASE WHEN jsonb_path_exists(prices, '$.*.bands') THEN coalesce((
        SELECT max(CAST(b ->> 'min_total_input' AS bigint))
        FROM jsonb_path_query(prices, '$.*.bands[*]') b
        WHERE CAST(b ->> 'min_total_input' AS bigint) <= total_input), 0)
    ELSE 0 END
"""
"""SQL: the largest size band of any component that an event reaches."""
_RERATED = sa.text(f"""
    WITH {PARTS}
    SELECT usage_start, usage_end, line_kind, project, model, tier, CAST(prices AS text) AS prices,
        {_BAND} AS band, {
    ", ".join(
        f"sum(sign * {name}) AS {name}, sum(sign * {amount}) AS {amount},"
        f" coalesce(sum(sign) FILTER (WHERE {name} > 0), 0) AS {name}_requests"
        for name, amount in zip(COMPONENTS, AMOUNTS, strict=True)
    )
}
    FROM parts JOIN {BOUNDS} ON admitted_at >= usage_start AND admitted_at < usage_end
    GROUP BY 1, 2, 3, 4, 5, 6, parts.prices, band
""")


def bounds(window: InvoiceWindow) -> dict[str, list[datetime]]:
    """Return the periods that a posting of the window can belong to, and the time before the first
    of them."""
    periods = [*window.earlier, window.period]
    found = [Period(EPOCH, min(periods).start), *periods]
    return {"starts": [each.start for each in found], "ends": [each.end for each in found]}


def slices(period: Period) -> tuple[list[Period], list[Period]]:
    """Split a period into slices of whole hours, and the parts of an hour before and behind them:
    in some timezones midnight is at a quarter past."""
    first = period.start + (EPOCH - period.start) % HOUR
    last = period.end - (period.end - EPOCH) % HOUR
    if first >= last:
        return [], [period]
    whole = []
    while first < last:
        whole.append(Period(first, min(first + SLICE, last)))
        first = whole[-1].end
    parts = [Period(period.start, whole[0].start), Period(last, period.end)]
    return whole, [each for each in parts if each.start < each.end]


async def charges_of(db: AsyncEngine, window: InvoiceWindow) -> list[Charge]:
    """Return the charges of a window in the order of their subjects.

    Raises: InvoicingConflict when there are more than MAX_LINES.
    """
    found: Sums = defaultdict(lambda: [0, 0, 0])
    named: dict[str, Any] = {
        "org": window.org,
        "since": window.since,
        "cutoff": window.cutoff,
        "start": window.period.start,
        "end": window.period.end,
        **bounds(window),
    }
    usage = {"usage_start": window.period.start, "usage_end": window.period.end}
    async with db.connect() as conn:
        whole, parts = slices(window.period)
        for query, spans in ((_HOURS, whole), (_PART_OF_AN_HOUR, parts)):
            for each in spans:
                part = {"from": each.start, "to": each.end}
                for row in await read_briefly(conn, query, named | usage | part):
                    _add_usage(found, "usage", row)
        for row in await read_briefly(conn, _SINCE_DRAFTED, named | usage):
            _add_usage(found, "usage", row)
        late = _LATE if window.earlier else _BEFORE_THE_FIRST
        for row in await read_briefly(conn, late, named):
            _add_usage(found, "late", row)
        for row in await read_briefly(conn, _RERATED, named):
            _add_usage(found, row.line_kind, row)
    if len(found) > MAX_LINES:
        raise InvoicingConflict("lines", f"an invoice has at most {MAX_LINES} lines")
    return [
        Charge(subject=subject, quantity=quantity, num_requests=requests, amount_pico=amount)
        for subject, (quantity, requests, amount) in sorted(found.items(), key=_order)
        if quantity or requests or amount
    ]


def _order(item: tuple[Subject, list[int]]) -> tuple[Any, ...]:
    subject = item[0]
    return (*msgspec.structs.astuple(subject)[:-1], subject.pico_per_token or 0)


async def read_briefly(
    conn: AsyncConnection, query: Any, named: dict[str, Any]
) -> Sequence[sa.Row[Any]]:
    """Run a query in a transaction of its own. `named` may have more parameters than it takes."""
    used = {name: named[name] for name in query.compile().params}
    rows = (await conn.execute(query, used)).all()
    await conn.rollback()  # a long period holds no transaction open
    return rows


def _add_usage(found: Sums, kind: Kind, row: sa.Row[Any]) -> None:
    """Add a row to the subjects of the components that it used."""
    prices, columns = _prices.decode(row.prices), row._mapping
    for component, column in zip(COMPONENTS, AMOUNTS, strict=True):
        quantity, amount = int(columns[component]), int(columns[column])
        if quantity or amount:
            price = price_of(component, prices)
            band = None if price is None else price.of(row.band)
            subject = Subject(
                kind=kind,
                usage=Period(row.usage_start.astimezone(UTC), row.usage_end.astimezone(UTC)),
                project=row.project,
                model=row.model,
                tier=row.tier,
                component=component,
                price_id="" if band is None else band.price_id,
                pico_per_token=None if band is None else band.pico_per_token,
            )
            sums = found[subject]
            sums[0] += quantity
            sums[1] += int(columns[f"{component}_requests"])
            sums[2] += amount
