"""Drill down from a line of an invoice to its hours, its requests and their tags, as booked.

The line's subject and the invoice's cutoff select exactly the postings that were added up. All
queries have an `id` to page by: the beginning of an hour, the id of a request's event, which sorts
by time, and the digest of a set of tags. The requests of one hour are found by an index.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from billing.events import COMPONENTS
from billing.invoices.invoice import Invoice, InvoiceLine
from billing.invoices.lines.prices import parts, price_id
from billing.invoices.lines.rerated_usage import PARTS
from billing.tables import MONEY, amount_column, columns_of, rated_amounts

HOUR = timedelta(hours=1)
HOUR_ID = """to_char(date_trunc('hour', admitted_at, 'UTC') AT TIME ZONE 'UTC',
    'YYYY-MM-DD"T"HH24"Z"')"""
_ITSELF = ("id", "request_id", "key", "admitted_at")
_RATED = f"""
    SELECT {columns_of("u", (*_ITSELF, *COMPONENTS))}, {rated_amounts("r", "u")},
        coalesce(r.prices, p.prices) AS prices
    FROM usage_events u JOIN price_sets p ON p.id = u.price_set LEFT JOIN (
        SELECT DISTINCT ON (event_id) * FROM event_ratings
        WHERE org_id = :org AND seq < :cutoff ORDER BY event_id, number DESC
    ) r ON r.event_id = u.id
    WHERE u.org = :org AND u.kind = 'usage'
        AND u.admitted_at >= :from AND u.admitted_at < :to
        AND u.seq >= :since AND u.seq < :cutoff AND u.project = :project
        AND u.model = :model AND u.tier = :tier
"""


def _usage(component: str) -> str:
    """Return SQL of the events by their last rating before the cutoff."""
    rated = f"({_RATED} AND u.{component} > 0) rated"
    return f"""
        SELECT {", ".join(_ITSELF)}, {component} AS quantity,
            {amount_column(component)} AS amount_pico
        FROM ({parts(rated, *_ITSELF)}) e
        WHERE {component} > 0 AND {price_id(component)} = :price_id
    """


def _corrections(component: str) -> str:
    """Return SQL of the corrected events; a cost that was taken back is negative."""
    quantity, amount = (f"sum(sign * {name})" for name in (component, amount_column(component)))
    return f"""
        WITH {PARTS}
        SELECT {", ".join(_ITSELF)}, {quantity} AS quantity, {amount} AS amount_pico
        FROM parts
        WHERE line_kind = 'correction' AND admitted_at >= :from AND admitted_at < :to
            AND project = :project AND model = :model AND tier = :tier AND {component} > 0
            AND {price_id(component)} = :price_id
        GROUP BY {", ".join(_ITSELF)} HAVING {quantity} <> 0 OR {amount} <> 0
    """


def _postings(
    invoice: Invoice, line: InvoiceLine, hour: datetime | None
) -> tuple[str, dict[str, Any]]:
    assert line.component in COMPONENTS, line.component
    named: dict[str, Any] = {
        "org": invoice.org_id,
        "from": line.usage_start if hour is None else max(hour, line.usage_start),
        "to": line.usage_end if hour is None else min(hour + HOUR, line.usage_end),
        "since": invoice.since,
        "cutoff": invoice.cutoff,
        "project": line.project,
        "model": line.model,
        "tier": line.tier,
        "price_id": line.price_id,
    }
    if line.kind == "correction":
        window = {"start": invoice.period_start, "end": invoice.period_end}
        return _corrections(line.component), named | window
    since = invoice.since if line.kind == "late" else 0
    return _usage(line.component), named | {"since": since}


def _selected(query: str, named: dict[str, Any], *columns: sa.Column[Any]) -> sa.Select[Any]:
    found = sa.text(query).bindparams(**named).columns(*columns).subquery("found")
    return sa.select(found)


def requests_of(
    invoice: Invoice, line: InvoiceLine, hour: datetime | None = None
) -> sa.Select[Any]:
    """Select id, request_id, key, admitted_at, quantity, amount_pico of a line's requests, in all
    hours or in one. The line must have requests (`has_requests`)."""
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


def hours_of(invoice: Invoice, line: InvoiceLine) -> sa.Select[Any]:
    """Select id (such as 2026-11-01T00Z), quantity, amount_pico, num_requests of a line's hours."""
    query, named = _postings(invoice, line, None)
    grouped = f"""
        SELECT {HOUR_ID} AS id, sum(quantity) AS quantity, sum(amount_pico) AS amount_pico,
            count(*) AS num_requests
        FROM ({query}) p GROUP BY 1
    """
    return _selected(grouped, named, sa.Column("id", sa.Text), *_sums())


def _sums() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("quantity", MONEY),
        sa.Column("amount_pico", MONEY),
        sa.Column("num_requests", sa.BigInteger),
    )


def tags_of(invoice: Invoice, line: InvoiceLine) -> sa.Select[Any]:
    """Select id, tags, quantity, amount_pico, num_requests of a line by the set of tags of its
    requests, or {}. A request is in one set, however many tags it has, so they add up to the
    line."""
    query, named = _postings(invoice, line, None)
    grouped = f"""
        SELECT encode(sha256(convert_to(CAST(tags AS text), 'UTF8')), 'hex') AS id, tags,
            sum(quantity) AS quantity, sum(amount_pico) AS amount_pico, count(*) AS num_requests
        FROM (
            SELECT quantity, amount_pico, coalesce(t.tags, '{{}}') AS tags
            FROM ({query}) p LEFT JOIN event_tags t ON t.event_id = p.id
        ) g GROUP BY tags
    """
    columns = (sa.Column("id", sa.Text), sa.Column("tags", JSONB))
    return _selected(grouped, named, *columns, *_sums())


def has_requests(line: InvoiceLine) -> bool:
    """True if a line is about requests; an adjustment is not."""
    return line.component in COMPONENTS
