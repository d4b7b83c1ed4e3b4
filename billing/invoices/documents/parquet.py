"""Write the cost rows of FOCUS as Parquet, with exact decimals and moments in UTC.

arro3 takes a fifth of the disk and a third of the memory of pyarrow; the gateway loads it with the
first export. Pages are converted one at a time, and at most one row group is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

import arro3.io
from arro3.core import Array, DataType, Field, RecordBatch, RecordBatchReader, Schema

from billing.invoices.documents.document import Bill, Page
from billing.invoices.documents.focus import (
    COLUMNS,
    MOMENTS,
    NUM_PLACES,
    NUMBERS,
    VERSION,
    focus_rows,
    to_text,
)

PRECISION = 38
"""The digits of a decimal128; without NUM_PLACES enough are left for any invoice."""
ROW_GROUP_LINES = 10_000
TEXT = DataType.string()


def _type(column: str) -> DataType:
    if column in NUMBERS:
        return DataType.decimal128(PRECISION, NUM_PLACES)
    return DataType.timestamp("us", tz="UTC") if column in MOMENTS else TEXT


TYPES = {name: _type(name) for name in COLUMNS}
SCHEMA = Schema([Field(name, kind) for name, kind in TYPES.items()])


def write_parquet(bill: Bill, pages: Iterable[Page], file: IO[bytes]) -> None:
    rows = RecordBatchReader.from_batches(SCHEMA, (_batch(bill, page) for page in pages))
    arro3.io.write_parquet(
        rows,
        file,
        compression="zstd(3)",
        key_value_metadata={"focus_version": VERSION, "invoice": bill.number},
        max_row_group_size=ROW_GROUP_LINES,
    )


def _batch(bill: Bill, page: Page) -> RecordBatch:
    """Convert a page. Numbers and moments are cast from text, which is exact."""
    rows = list(focus_rows(bill, page))
    columns = []
    for name, kind in TYPES.items():
        texts = Array([to_text(row[name]) for row in rows], type=TEXT)
        columns.append(texts if kind == TEXT else texts.cast(kind))
    return RecordBatch(columns, schema=SCHEMA)
