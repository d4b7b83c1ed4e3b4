"""A final invoice in the forms that others read, and a journal of all that an org has to do with.

All are made in threads of their own, of which there are few: the largest invoice is seconds of
work. What has a row for each line is written to a file, for which the lines are read page by page,
so that neither they nor a slow reader hold memory, a thread or a connection; what fails, fails
before its first byte.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Literal, TypeVar

import msgspec
from litestar import Response
from litestar.response import Stream
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.invoices.documents.advances import read_advances
from billing.invoices.documents.document import (
    Bill,
    Document,
    Page,
    read_bill,
    read_document,
    read_pages,
)
from billing.invoices.documents.focus import write_focus
from billing.invoices.documents.journal import (
    of_advance,
    of_document,
    to_beancount,
    to_hledger,
)
from billing.invoices.documents.pdf import to_pdf
from billing.invoices.documents.tables import write_lines
from billing.invoices.documents.usage_by_tag import read_tagged, write_tagged
from billing.invoices.invoice import final_invoices_of
from gateway.routes.shared.media_types import CSV, JSON, PDF
from gateway.wire.admin.billing.invoices import InvoiceDocument, to_document

T = TypeVar("T")
Ledgers = Literal["beancount", "hledger"]
Format = Literal["json", "csv", "tags", "pdf", "focus", "parquet", "beancount", "hledger"]
PARQUET = "application/vnd.apache.parquet"
BEANCOUNT, HLEDGER = "text/x-beancount", "text/x-hledger"
SAID: dict[str, type] = {
    JSON: InvoiceDocument,
    **dict.fromkeys((CSV, PARQUET, PDF, BEANCOUNT, HLEDGER), str),
}
THREADS = ThreadPoolExecutor(2, thread_name_prefix="invoice-export")
CHUNK_BYTES = 64 * 1024
PAGE_TIMEOUT_S = 60.0
"""Beyond what Postgres is given; a loop that has ended answers nobody."""


def write_parquet(bill: Bill, pages: Iterable[Page], file: IO[bytes]) -> None:
    from billing.invoices.documents import parquet  # with what it loads, which few gateways need

    parquet.write_parquet(bill, pages, file)


DOCUMENTS: dict[Format, tuple[str, Callable[[Document], bytes]]] = {
    "json": (JSON, lambda it: msgspec.json.encode(to_document(it))),
    "pdf": (PDF, to_pdf),
    "beancount": (BEANCOUNT, lambda it: to_beancount(of_document(it)).encode()),
    "hledger": (HLEDGER, lambda it: to_hledger(of_document(it)).encode()),
}
JOURNALS = {"beancount": (BEANCOUNT, to_beancount), "hledger": (HLEDGER, to_hledger)}
Read = Callable[[AsyncEngine, Bill], AsyncIterator[Any]]
Write = Callable[[Bill, Iterable[Any], IO[bytes]], None]
"""Writes the rows that `Read` yields, in the format of the export."""
TABLES: dict[Format, tuple[str, Read, Write]] = {
    "csv": (CSV, read_pages, write_lines),
    "focus": (CSV, read_pages, write_focus),
    "parquet": (PARQUET, read_pages, write_parquet),
    "tags": (CSV, read_tagged, write_tagged),
}


async def exported(
    db: AsyncEngine, *, org_id: str, invoice_id: str, format: Format
) -> Response[Any]:
    """Raises: NoInvoice; InvoicingConflict of a draft."""
    if format in TABLES:
        media_type, read, write = TABLES[format]
        async with db.connect() as conn:
            bill = await read_bill(conn, org_id=org_id, invoice_id=invoice_id)
        file = await _written(bill, read(db, bill), write)
        return Stream(_chunks(file), media_type=media_type)
    async with db.connect() as conn:
        document = await read_document(conn, org_id=org_id, invoice_id=invoice_id)
    media_type, make = DOCUMENTS[format]
    loop = asyncio.get_running_loop()
    made = await loop.run_in_executor(THREADS, make, document)
    return Response(made, media_type=media_type)


async def journal(db: AsyncEngine, *, org_id: str, format: Ledgers) -> Response[Any]:
    """Write the journal of all invoices: one at a time is held, and of each no more than its
    entries."""
    loop = asyncio.get_running_loop()
    async with db.connect() as conn:
        found = [of_advance(each) for each in await read_advances(conn, org_id=org_id)]
        invoices = await final_invoices_of(conn, org_id=org_id)
    for invoice_id in invoices:
        async with db.connect() as conn:
            document = await read_document(conn, org_id=org_id, invoice_id=invoice_id)
        found += await loop.run_in_executor(THREADS, lambda it: list(of_document(it)), document)
    media_type, write = JOURNALS[format]
    made = await loop.run_in_executor(THREADS, write, found)
    return Response(made.encode(), media_type=media_type)


async def _written(bill: Bill, found: AsyncIterator[Any], write: Write) -> IO[bytes]:
    loop = asyncio.get_running_loop()
    file = tempfile.TemporaryFile()  # whoever sends it closes it
    pages = _from_a_thread(found, loop)
    try:
        await loop.run_in_executor(THREADS, write, bill, pages, file)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file


def _from_a_thread(found: AsyncIterator[T], loop: asyncio.AbstractEventLoop) -> Iterator[T]:
    async def following() -> T | None:
        return await anext(found, None)

    def awaited() -> T | None:
        return asyncio.run_coroutine_threadsafe(following(), loop).result(PAGE_TIMEOUT_S)

    while (each := awaited()) is not None:
        yield each


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
