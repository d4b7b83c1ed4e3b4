"""Read a final invoice for its documents.

A `Document` has all of it at once. Tables take a `Bill` and read the lines, which no longer change,
page by page, so that a long invoice needs neither much memory nor one long transaction.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.currency import format_coins
from billing.errors import InvoicingConflict
from billing.invoices.collection import CreditNote, notes_of, payments_of
from billing.invoices.invoice import (
    Invoice,
    InvoiceLine,
    Payment,
    amounts_of,
    get_invoice,
    get_lines,
    lines_of,
    to_line,
)
from billing.invoices.states import DRAFT, Amounts
from billing.invoices.tables import credit_note_lines, credit_notes, invoice_lines
from billing.pricing.lists import undiscounted
from billing.tables import prices

PAGE_LINES = 1000


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """A final invoice without its lines."""

    invoice: Invoice
    org_name: str
    project_names: Mapping[str, str]

    @property
    def number(self) -> str:
        assert self.invoice.number is not None
        return self.invoice.number

    @property
    def coin_pico(self) -> int:
        assert self.invoice.coin_pico is not None
        return self.invoice.coin_pico

    @property
    def finalized_at(self) -> datetime:
        assert self.invoice.finalized_at is not None
        return self.invoice.finalized_at

    def money(self, coins: int | None) -> str:
        """Format coins in the invoice's currency."""
        assert coins is not None
        return format_coins(coins, self.invoice.currency)


class Document(Bill, frozen=True, kw_only=True):
    lines: list[InvoiceLine]
    amounts: Amounts
    notes: list[CreditNote]
    payments: list[Payment]


class LineReversal(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a line that a credit note takes back."""

    note: str
    """The number of the credit note."""
    reason: str
    line: InvoiceLine
    amount_coins: int


class Page(msgspec.Struct, frozen=True, kw_only=True):
    lines: Sequence[InvoiceLine] = ()
    list_pico: Mapping[str, int] = {}
    """The list price per token, by the id of the discounted price that the org pays."""
    taken_back: Sequence[LineReversal] = ()


_NAMES = sa.text("""
    SELECT '' AS id, name FROM orgs WHERE id = :org_id
    UNION ALL SELECT id, name FROM projects WHERE org_id = :org_id
""")


async def read_bill(conn: AsyncConnection, *, org_id: str, invoice_id: str) -> Bill:
    """Read a bill. Raises: NoInvoice; InvoicingConflict of a draft."""
    invoice = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
    if invoice.state == DRAFT:
        raise InvoicingConflict("invoice_id", "is a draft")
    names = {row.id: row.name for row in await conn.execute(_NAMES, {"org_id": org_id})}
    return Bill(invoice=invoice, org_name=names.pop("", org_id), project_names=names)


async def read_document(conn: AsyncConnection, *, org_id: str, invoice_id: str) -> Document:
    """Read a document. Raises: as `read_bill`."""
    bill = await read_bill(conn, org_id=org_id, invoice_id=invoice_id)
    return Document(
        **msgspec.structs.asdict(bill),
        lines=await get_lines(conn, org_id=org_id, invoice_id=invoice_id),
        amounts=await amounts_of(conn, bill.invoice),
        notes=await notes_of(conn, org_id=org_id, invoice_id=invoice_id),
        payments=await payments_of(conn, org_id=org_id, invoice_id=invoice_id),
    )


async def read_pages(db: AsyncEngine, bill: Bill) -> AsyncIterator[Page]:
    """Yield all lines in order, and behind them the parts that credit notes have taken back."""
    own, after = invoice_lines.c.position, 0
    following = lines_of(bill.invoice.org_id, bill.invoice.id).order_by(own).limit(PAGE_LINES)
    while True:
        async with db.connect() as conn:
            found = await conn.execute(following.where(own > after))
            lines = [to_line(row) for row in found]
            list_pico = await _list_prices(conn, lines)
        if not lines:
            break
        yield Page(lines=lines, list_pico=list_pico)
        after = lines[-1].position
    behind = (0, 0)
    while True:
        async with db.connect() as conn:
            rows = (await conn.execute(_taken_back(bill.invoice, behind))).all()
        if not rows:
            return
        parts = [
            LineReversal(note=it.number, reason=it.reason, line=to_line(it), amount_coins=it.taken)
            for it in rows
        ]
        yield Page(taken_back=parts)
        behind = (rows[-1].sequence, rows[-1].position)


def _taken_back(invoice: Invoice, behind: tuple[int, int]) -> sa.Select[Any]:
    """Return the query of the next reversals in the order of the notes; a note that is issued
    meanwhile comes last, as a whole."""
    own, note, part = invoice_lines.c, credit_notes.c, credit_note_lines.c
    taken = sa.cast(part.amount_coins, sa.BigInteger).label("taken")
    found = sa.select(invoice_lines, note.number, note.sequence, note.reason, taken)
    found = found.join(credit_note_lines, part.line_id == own.id)
    found = found.join(credit_notes, note.id == part.credit_note_id)
    found = found.where(own.org_id == invoice.org_id, note.invoice_id == invoice.id)
    place = sa.tuple_(note.sequence, own.position)
    ordered = found.where(place > behind).order_by(note.sequence, own.position)
    return ordered.limit(PAGE_LINES)


async def _list_prices(conn: AsyncConnection, lines: Sequence[InvoiceLine]) -> dict[str, int]:
    listed = {line.price_id: undiscounted(line.price_id) for line in lines}
    wanted = {found for found in listed.values() if found is not None}
    if not wanted:
        return {}
    own = prices.c
    found = sa.select(own.price_id, own.pico_per_token).where(own.price_id.in_(wanted))
    pico = {row.price_id: row.pico_per_token for row in await conn.execute(found)}
    return {paid: pico[of] for paid, of in listed.items() if of in pico}


def moment(at: datetime) -> str:
    """Format a moment as ISO 8601 in UTC."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
