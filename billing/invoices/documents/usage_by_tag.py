"""Write the lines of an invoice by the sets of tags of their requests, as CSV. A line has one row
for each set, and one without tags, which add up to the line.

Amounts are exact: only a whole line is rounded to coins, which is why cost rows (`focus`) have no
tags. The sum of a tag is that of the sets with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import IO

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.invoices.documents.document import Bill, read_pages
from billing.invoices.documents.drilldown import has_requests, tags_of
from billing.invoices.documents.tables import LINE_HEAD, line_cells, write_csv
from billing.invoices.invoice import InvoiceLine
from billing.money import Pico, format_usd

PAGE_SETS = 1000
HEAD = (*LINE_HEAD, "tags", "quantity", "num_requests", "exact_usd")


class TagTotal(msgspec.Struct, frozen=True, kw_only=True):
    line: InvoiceLine
    tags: Mapping[str, str] = {}
    quantity: int
    num_requests: int
    exact_pico: Pico


async def read_tagged(db: AsyncEngine, bill: Bill) -> AsyncIterator[Sequence[TagTotal]]:
    """Yield the rows of each line in order."""
    async for page in read_pages(db, bill):
        for line in page.lines:
            if has_requests(line):
                async for parts in _parts(db, bill, line):
                    yield parts
            else:
                yield [
                    TagTotal(
                        line=line,
                        quantity=line.quantity,
                        num_requests=line.num_requests,
                        exact_pico=line.exact_pico,
                    )
                ]


async def _parts(
    db: AsyncEngine, bill: Bill, line: InvoiceLine
) -> AsyncIterator[Sequence[TagTotal]]:
    found = tags_of(bill.invoice, line)
    async with db.connect() as conn:
        async with conn.stream(found.order_by(found.selected_columns.id)) as rows:
            async for part in rows.partitions(PAGE_SETS):
                yield [
                    TagTotal(
                        line=line,
                        tags=row.tags,
                        quantity=int(row.quantity),
                        num_requests=row.num_requests,
                        exact_pico=int(row.amount_pico),
                    )
                    for row in part
                ]


def write_tagged(bill: Bill, pages: Iterable[Sequence[TagTotal]], file: IO[bytes]) -> None:
    write_csv(HEAD, (_row(bill, each) for page in pages for each in page), file)


def _row(bill: Bill, part: TagTotal) -> list[str]:
    return [
        *line_cells(bill, part.line),
        msgspec.json.encode(part.tags, order="sorted").decode(),
        str(part.quantity),
        str(part.num_requests),
        format_usd(part.exact_pico),
    ]
