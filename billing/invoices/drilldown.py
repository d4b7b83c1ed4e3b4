"""What is behind a line: its hours, and its requests, as they were booked.

Above: the gateway's administration. Below: `usage_events`, `transfers`. The line says what it is
about, its invoice up to where it counts, so these are the very postings that were added up. Both
are selections for a page by `id`: of an hour its beginning, of a request its event, whose ids are
in the order of time. Of a single hour requests are found by the index.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from billing.events import COMPONENTS, INPUTS
from billing.invoices.charges import CHARGED, CHARGES
from billing.invoices.invoice import Invoice, Line
from billing.ledger import account_of
from billing.rating import PRICED_AS
from billing.tables import MONEY, amount_column

HOUR = timedelta(hours=1)
HOUR_ID = """to_char(date_trunc('hour', admitted_at, 'UTC') AT TIME ZONE 'UTC',
    'YYYY-MM-DD"T"HH24"Z"')"""


def _price_id(component: str) -> str:
    """SQL: of an event, which price the component was rated by (`rating.price_of`, `Price.of`)."""
    also = PRICED_AS.get(component, component)  # type: ignore[call-overload]
    price = f"coalesce(prices -> '{component}', prices -> '{also}')"
    band = "CAST(b ->> 'min_total_input' AS bigint)"
    return f"""coalesce((
        SELECT b ->> 'price_id' FROM jsonb_array_elements({price} -> 'bands') b
        WHERE {band} <= {" + ".join(INPUTS)} ORDER BY {band} DESC LIMIT 1
    ), {price} ->> 'price_id', '')"""


def _usage(component: str) -> str:
    assert component in COMPONENTS, component
    return f"""
        SELECT id, request_id, key, admitted_at, {component} AS quantity,
            {amount_column(component)} AS amount_pico
        FROM usage_events
        WHERE org = :org AND kind = 'usage' AND admitted_at >= :start AND admitted_at < :end
            AND seq >= :since AND seq < :cutoff AND project = :project AND model = :model
            AND tier = :tier AND {component} > 0 AND {_price_id(component)} = :price_id
    """


_CORRECTIONS = f"""
    SELECT t.id, u.request_id, u.key, u.admitted_at, 0 AS quantity,
        {CHARGED.format(account=":account").removeprefix("sum")} AS amount_pico
    FROM transfers t JOIN usage_events u ON u.id = t.event_id
    WHERE u.org = :org AND {CHARGES.format(account=":account")} AND t.kind = :component
        AND u.admitted_at >= :start AND u.admitted_at < :end AND t.seq < :cutoff
        AND (u.admitted_at >= :period_start OR t.seq >= :since)
        AND u.project = :project AND u.model = :model AND u.tier = :tier
"""


def _postings(invoice: Invoice, line: Line, hour: datetime | None) -> tuple[str, dict[str, Any]]:
    named: dict[str, Any] = {
        "org": invoice.org_id,
        "start": line.usage_start if hour is None else max(hour, line.usage_start),
        "end": line.usage_end if hour is None else min(hour + HOUR, line.usage_end),
        "cutoff": invoice.cutoff,
        "project": line.project,
        "model": line.model,
        "tier": line.tier,
    }
    if line.kind == "correction":
        more = {
            "account": account_of(invoice.org_id),
            "component": line.component,
            "period_start": invoice.period_start,
            "since": invoice.since,
        }
        return _CORRECTIONS, named | more
    since = invoice.since if line.kind == "late" else 0
    return _usage(line.component), named | {"price_id": line.price_id, "since": since}


def _selected(query: str, named: dict[str, Any], *columns: sa.Column[Any]) -> sa.Select[Any]:
    found = sa.text(query).bindparams(**named).columns(*columns).subquery("found")
    return sa.select(found)


def requests_of(invoice: Invoice, line: Line, hour: datetime | None = None) -> sa.Select[Any]:
    """id, request_id, key, admitted_at, quantity, amount_pico. `hour`: of this one alone. Of an
    adjustment, which no event has made, there is none (`behind`)."""
    query, named = _postings(invoice, line, hour)
    return _selected(
        query,
        named,
        sa.Column("id", sa.Text),
        sa.Column("request_id", sa.Text),
        sa.Column("key", sa.Text),
        sa.Column("admitted_at", sa.TIMESTAMP(timezone=True)),
        sa.Column("quantity", sa.BigInteger),
        sa.Column("amount_pico", MONEY),
    )


def hours_of(invoice: Invoice, line: Line) -> sa.Select[Any]:
    """id (such as 2026-11-01T00Z), quantity, amount_pico, num_requests."""
    query, named = _postings(invoice, line, None)
    grouped = f"""
        SELECT {HOUR_ID} AS id, sum(quantity) AS quantity, sum(amount_pico) AS amount_pico,
            count(*) AS num_requests
        FROM ({query}) p GROUP BY 1
    """
    return _selected(
        grouped,
        named,
        sa.Column("id", sa.Text),
        sa.Column("quantity", MONEY),
        sa.Column("amount_pico", MONEY),
        sa.Column("num_requests", sa.BigInteger),
    )


def behind(line: Line) -> bool:
    """Whether requests stand behind it."""
    return line.kind != "adjustment"
