"""Write the lines of an invoice as CSV (RFC 4180), page by page, with exact and rounded amounts.

Names of models and projects are chosen by tenants: one that a spreadsheet would run as a formula
gets an apostrophe in front.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import IO

from billing.invoices.documents.document import Bill, Page, moment
from billing.invoices.invoice import InvoiceLine
from billing.money import format_usd

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
LINE_HEAD = (
    *("invoice", "line", "kind", "usage_start", "usage_end", "project", "model", "tier"),
    *("component", "price_id"),
)
"""The columns that identify a line."""
HEAD = (
    *(*LINE_HEAD, "unit_usd", "quantity", "num_requests", "exact_usd", "currency", "amount"),
    "residual_usd",
)


def write_lines(bill: Bill, pages: Iterable[Page], file: IO[bytes]) -> None:
    write_csv(HEAD, (_row(bill, line) for page in pages for line in page.lines), file)


def write_csv(head: Sequence[str], rows: Iterable[Sequence[str]], file: IO[bytes]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    csv.writer(text).writerows(chain([head], rows))
    text.detach()  # the caller closes the file


def line_cells(bill: Bill, line: InvoiceLine) -> list[str]:
    """Return the values of LINE_HEAD."""
    return [
        bill.number,
        str(line.position),
        line.kind,
        moment(line.usage_start),
        moment(line.usage_end),
        *map(inert, (line.project, line.model, line.tier, line.component, line.price_id)),
    ]


def _row(bill: Bill, line: InvoiceLine) -> list[str]:
    return [
        *line_cells(bill, line),
        "" if line.pico_per_token is None else format_usd(line.pico_per_token),
        str(line.quantity),
        str(line.num_requests),
        format_usd(line.exact_pico),
        bill.invoice.currency,
        bill.money(line.amount_coins),
        format_usd(line.residual_pico or 0),
    ]


def inert(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULAS) else text
