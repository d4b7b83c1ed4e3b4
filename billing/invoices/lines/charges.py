"""Charges sum up the ledger's postings in an invoice's window, exact, by project, model, tier,
component and price.

Nothing is priced here: the amounts are those that were booked with each event.

    window of invoice n:   admitted in its period, posted before its cutoff
                        +  admitted before its period, posted since the cutoff of invoice n - 1

So every posting is in exactly one invoice, and which one it is never changes: what comes late, for
a period that was finalized, joins the next, marked with the period that it belongs to. A cutoff is
a number of `posting_seq` that was drawn while nobody booked (`take_cutoff`): what was booked before
has a lower number, what comes later a higher one, whatever clocks do.

A period is read from the sums that were written with its events (`usage_charges`), a day at a time,
so ten million events are thirty short statements, and no lock is held meanwhile. Nothing is added
to an hour once a draft covers it: what comes then is marked (`usage_events.late`, decided behind
the lock that a cutoff is drawn under), and read by itself, up to the cutoff.
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
from billing.events import COMPONENTS, Band, PriceSet
from billing.invoices.lines.rerated_usage import PARTS
from billing.ledger.accounts import USES
from billing.ledger.spend_totals import hold_books
from billing.money import Pico
from billing.pricing.rating import price_of
from billing.tables import AMOUNTS, EPOCH, REQUESTS

Kind = Literal["usage", "late", "correction", "adjustment"]
HOUR, SLICE = timedelta(hours=1), timedelta(days=1)
MAX_LINES = 100_000
"""Of one invoice: beyond it somebody made up names of models or projects."""
CHARGES = """
    (t.debit = {account} AND t.credit LIKE 'revenue:%'
        OR t.credit = {account} AND t.debit LIKE 'revenue:%')
"""
"""SQL: that a transfer is about what was used, not about how it is paid."""
CHARGED = "sum(CASE WHEN t.debit = {account} THEN t.amount_pico ELSE -t.amount_pico END)"


class InvoiceWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The postings that one invoice counts."""

    org: str
    period: Period
    since: int
    """The cutoff of the invoice before."""
    cutoff: int
    earlier: tuple[Period, ...] = ()
    """The periods that were invoiced before."""


class Subject(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The subject of a line: what its charge is for."""

    usage: Period
    kind: Kind
    project: str
    model: str
    tier: str
    component: str
    price_id: str
    """Empty: it had none."""
    pico_per_token: int | None


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    subject: Subject
    quantity: int
    num_requests: int
    amount_pico: Pico


Sums = dict[Subject, list[int]]
"""Quantity, requests, pico-USD."""
NO_PRICE = Band(0, "", 0)
_prices = msgspec.json.Decoder(PriceSet)


async def take_cutoff(conn: AsyncConnection) -> int:
    """Behind all that was booked, before all that will be; the caller commits at once, for until
    then nobody books."""
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
    """By the prices that events were admitted by: what was rated alike is added up before anybody
    looks into its prices."""
    sums = ", ".join(f"sum({name}) AS {name}" for name in (*COMPONENTS, *AMOUNTS))
    return sa.text(f"""
        SELECT e.*, CAST(s.prices AS text) AS prices FROM (
            SELECT {usage}, project, model, tier, price_set, band, {sums}, {requests}
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
    ", ".join(f"sum({name}) AS {name}" for name in REQUESTS),
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
"""SQL: the least input of the largest size band that an event reaches, of any component."""
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
    """All periods that a posting of the window can belong to; what was admitted before the first of
    them is shown as of the time before it."""
    periods = [*window.earlier, window.period]
    first = min(periods)
    found = [Period(EPOCH, first.start), *periods]
    return {"starts": [each.start for each in found], "ends": [each.end for each in found]}


def slices(period: Period) -> tuple[list[Period], list[Period]]:
    """Whole hours, a SLICE at a time, and the parts of an hour before and behind them: midnight may
    be at a quarter past."""
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
    """In the order of their subjects.

    Raises: InvoicingConflict where there are more than MAX_LINES.
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
        raise InvoicingConflict("lines", f"an invoice has {MAX_LINES} lines at most")
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
    """`named`: what the query takes, and perhaps more."""
    used = {name: named[name] for name in query.compile().params}
    rows = (await conn.execute(query, used)).all()
    await conn.rollback()  # a statement is a transaction: nothing is held through a long period
    return rows


def _add_usage(found: Sums, kind: Kind, row: sa.Row[Any]) -> None:
    """A line for each component that was used."""
    prices, columns = _prices.decode(row.prices), row._mapping
    for component, column in zip(COMPONENTS, AMOUNTS, strict=True):
        quantity, amount = int(columns[component]), int(columns[column])
        if quantity or amount:
            price = price_of(component, prices)
            chosen = NO_PRICE if price is None else price.of(row.band)
            subject = _subject(row, kind, component, chosen)
            _add(found, subject, quantity, columns[f"{component}_requests"], amount)


def _subject(row: sa.Row[Any], kind: Kind, component: str, price: Band) -> Subject:
    return Subject(
        kind=kind,
        usage=Period(row.usage_start.astimezone(UTC), row.usage_end.astimezone(UTC)),
        project=row.project,
        model=row.model,
        tier=row.tier,
        component=component,
        price_id=price.price_id,
        pico_per_token=price.pico_per_token if price.price_id else None,
    )


def _add(found: Sums, subject: Subject, *counts: Any) -> None:
    sums = found[subject]
    for position, value in enumerate(counts):
        sums[position] += int(value)
