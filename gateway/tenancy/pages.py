"""One page of a listing, by keyset: what comes after an id, in the order of ids, never by offset.

Above: the listings of `tenancy`. Below: SQLAlchemy. Ids sort by age, so the order of ids is the
order of creation, and what is added while somebody pages is neither skipped nor shown twice.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.tenancy.errors import InvalidField

MAX_LIMIT = 100
DEFAULT_LIMIT = 20

Order = Literal["asc", "desc"]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Which page is wanted: up to `limit` rows behind the row `after`, or from the start."""

    after: str | None = None
    limit: int = DEFAULT_LIMIT
    order: Order = "asc"


FIRST = Cursor()


async def read_page(
    conn: AsyncConnection,
    listed: sa.Select[Any],
    key: sa.ColumnElement[str],
    cursor: Cursor,
) -> tuple[list[sa.Row[Any]], bool]:
    """Its rows, and whether there are more behind them. `key` is unique in `listed`.

    Raises: InvalidField (limit).
    """
    if not 1 <= cursor.limit <= MAX_LIMIT:
        raise InvalidField("limit", f"must be 1 to {MAX_LIMIT}")
    descending = cursor.order == "desc"
    if cursor.after is not None:
        listed = listed.where(key < cursor.after if descending else key > cursor.after)
    ordered = listed.order_by(key.desc() if descending else key.asc())
    rows = (await conn.execute(ordered.limit(cursor.limit + 1))).all()
    return list(rows[: cursor.limit]), len(rows) > cursor.limit
