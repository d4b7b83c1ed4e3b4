"""Print an invoice as PDF: A4, in a monospaced font, with its lines in columns. The same invoice
makes the same bytes, since the PDF has no date of its own.

The fonts are the built-in ones of PDF, so a character that is not in Windows-1252 is written as its
code.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import pydyf

from billing.invoices.documents.document import Document, moment
from billing.invoices.invoice import InvoiceLine
from billing.money import format_usd

WIDTH, HEIGHT = 595, 842
"""The size of A4 in points."""
MARGIN, FONT_SIZE, LEADING = 36, 8, 11
LINES_PER_PAGE = (HEIGHT - 2 * MARGIN) // LEADING - 2
COLUMNS = (10, 16, 24, 18, 15, 15, 10)
"""The characters of each column: 108, each 0.6 of the font's size, fill the page."""
HEAD = ("kind", "project", "model, tier", "component", "quantity", "exact USD", "amount")
NUM_TEXTS = 4
"""So many columns have text, aligned to the left."""


def to_pdf(document: Document) -> bytes:
    pdf = pydyf.PDF()
    fonts = {"F1": _font(pdf, "Courier"), "F2": _font(pdf, "Courier-Bold")}
    texts = list(_texts(document))
    starts = range(0, max(1, len(texts)), LINES_PER_PAGE)
    for number, begun in enumerate(starts, 1):
        part = texts[begun : begun + LINES_PER_PAGE]
        _add_page(pdf, fonts, part, f"{document.number}, page {number} of {len(starts)}")
    written = io.BytesIO()
    pdf.write(written)
    return written.getvalue()


def _font(pdf: pydyf.PDF, name: str) -> pydyf.Dictionary:
    font = pydyf.Dictionary(
        {
            "Type": "/Font",
            "Subtype": "/Type1",
            "BaseFont": f"/{name}",
            "Encoding": "/WinAnsiEncoding",
        }
    )
    pdf.add_object(font)
    return font


def _add_page(
    pdf: pydyf.PDF,
    fonts: dict[str, pydyf.Dictionary],
    texts: Sequence[tuple[str, str]],
    foot: str,
) -> None:
    stream = pydyf.Stream()
    stream.begin_text()
    for row, (font, text) in enumerate([*texts, *[("F1", "")], ("F1", foot)]):
        stream.set_font_size(font, FONT_SIZE)
        stream.set_text_matrix(1, 0, 0, 1, MARGIN, HEIGHT - MARGIN - row * LEADING)
        stream.show_text_string(to_windows_1252(text))
    stream.end_text()
    pdf.add_object(stream)
    used = pydyf.Dictionary({name: font.reference for name, font in fonts.items()})
    pdf.add_page(
        pydyf.Dictionary(
            {
                "Type": "/Page",
                "Parent": pdf.pages.reference,
                "Contents": stream.reference,
                "MediaBox": pydyf.Array([0, 0, WIDTH, HEIGHT]),
                "Resources": pydyf.Dictionary({"Font": used}),
            }
        )
    )


def to_windows_1252(text: str) -> bytes:
    return text.encode("cp1252", "backslashreplace")


def _texts(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the font and text of each printed line."""
    invoice, amounts = document.invoice, document.amounts
    assert invoice.due_at is not None
    yield "F2", f"Invoice {document.number}"
    yield "F1", f"Issued by {invoice.issuer} to {invoice.org_id}"
    yield "F1", f"Issued {moment(document.finalized_at)}, due {moment(invoice.due_at)}"
    yield "F1", f"Period {moment(invoice.period_start)} to {moment(invoice.period_end)}"
    coin = format_usd(document.coin_pico)
    yield "F1", f"Amounts in {invoice.currency}; its smallest coin at {coin} USD"
    yield "F1", ""
    yield "F2", _columns(HEAD)
    for line in document.lines:
        yield "F1", _columns(_cells(document, line))
    yield "F1", ""
    yield "F2", _columns(("Total", "", "", "", "", "", document.money(amounts.total)))
    for note in document.notes:
        yield "F1", f"Credit note {note.number}: -{document.money(note.total_coins)}"
    for payment in document.payments:
        yield "F1", f"Settled ({payment.method}): -{document.money(payment.amount_coins)}"
    yield "F2", f"Left to pay: {document.money(amounts.due)} {invoice.currency}"


def _cells(document: Document, line: InvoiceLine) -> tuple[str, ...]:
    return (
        line.kind,
        line.project,
        f"{line.model}, {line.tier}",
        line.component,
        str(line.quantity),
        format_usd(line.exact_pico),
        document.money(line.amount_coins),
    )


def _columns(cells: Sequence[str]) -> str:
    """Align cells in columns; a long text is cut and ends with a tilde, a number is never cut."""
    parts = []
    for position, (cell, width) in enumerate(zip(cells, COLUMNS, strict=True)):
        if position < NUM_TEXTS:
            cut = cell if len(cell) < width else f"{cell[: width - 2]}~"
            parts.append(cut.ljust(width))
        else:
            parts.append(cell.rjust(width))
    return "".join(parts).rstrip()
