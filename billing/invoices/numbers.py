"""Numbers without gaps."""

from __future__ import annotations

from typing import Literal

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.invoices.tables import invoice_counters

Series = Literal["invoice", "credit_note"]
MARKS: dict[Series, str] = {"invoice": "", "credit_note": "CN-"}
MIN_DIGITS = 6


async def next_number(conn: AsyncConnection, issuer: str, series: Series) -> tuple[int, str]:
    """Take it last: who else is about to number waits for the transaction's end."""
    first = insert(invoice_counters).values(issuer=issuer, series=series, last=1)
    grown = first.on_conflict_do_update(
        index_elements=["issuer", "series"], set_={"last": invoice_counters.c.last + 1}
    )
    sequence = (await conn.execute(grown.returning(invoice_counters.c.last))).scalar_one()
    return sequence, f"{issuer}-{MARKS[series]}{sequence:0{MIN_DIGITS}}"
