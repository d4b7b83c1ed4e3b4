"""The lines of an invoice as CSV (RFC 4180): every column that a line has, exact and rounded.

Above: the gateway's exports. Below: `document`. Texts that a spreadsheet would run as a formula are
led by an apostrophe: names of models and projects are their makers' own.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from billing.invoices.documents.document import Document, moment
from billing.money import format_usd

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
HEAD = (
    *("invoice", "line", "kind", "usage_start", "usage_end", "project", "model", "tier"),
    *("component", "price_id", "unit_usd", "quantity", "num_requests", "exact_usd", "currency"),
    *("amount", "residual_usd"),
)


def lines_as_csv(document: Document) -> str:
    rows = [
        [
            document.number,
            str(line.position),
            line.kind,
            moment(line.usage_start),
            moment(line.usage_end),
            *map(inert, (line.project, line.model, line.tier, line.component, line.price_id)),
            "" if line.pico_per_token is None else format_usd(line.pico_per_token),
            str(line.quantity),
            str(line.num_requests),
            format_usd(line.exact_pico),
            document.invoice.currency,
            document.money(line.amount_coins),
            format_usd(line.residual_pico or 0),
        ]
        for line in document.lines
    ]
    return to_csv(HEAD, rows)


def inert(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULAS) else text


def to_csv(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    written = io.StringIO()
    csv.writer(written).writerows([head, *rows])
    return written.getvalue()
