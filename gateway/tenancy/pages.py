"""One page of a listing, by keyset: what comes after an id, in the order of ids, never by offset.

Ids sort by age, so the order of ids is the order of creation, and what is added while somebody
pages is neither skipped nor shown twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.queries import Query, ask
from gateway.tenancy.errors import InvalidField

R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")

MAX_LIMIT = 100
DEFAULT_LIMIT = 20

Order = Literal["asc", "desc"]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The page that is wanted: up to `limit` rows behind the row `after`, or from the start."""

    after: str | None = None
    limit: int = DEFAULT_LIMIT
    order: Order = "asc"


FIRST = Cursor()


def keyset(
    listed: sa.Select[Any],
    key: sa.ColumnElement[str],
    *,
    after: str | None,
    limit: int,
    order: Order,
) -> sa.Select[Any]:
    """The rows of the page, and one more where there is one. `key` is unique in `listed`."""
    descending = order == "desc"
    if after is not None:
        listed = listed.where(key < after if descending else key > after)
    return listed.order_by(key.desc() if descending else key.asc()).limit(limit + 1)


async def read_page(
    conn: AsyncConnection,
    listed: sa.Select[Any],
    key: sa.ColumnElement[str],
    cursor: Cursor,
) -> tuple[list[sa.Row[Any]], bool]:
    """Return the rows of a page, and whether there are more behind them. `key` is unique in
    `listed`.

    Raises: InvalidField (limit).
    """
    return await ask(conn, page_query(listed, key, cursor, lambda row: row))


def page_query(
    listed: sa.Select[Any],
    key: sa.ColumnElement[str],
    cursor: Cursor,
    of: Callable[[sa.Row[Any]], T],
) -> Query[tuple[list[T], bool]]:
    """Return the query of a page: what `of` makes of its rows, and whether there are more behind
    them. `key` is unique in `listed`. Raises: InvalidField (limit)."""
    limit = cursor.limit
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidField("limit", f"must be 1 to {MAX_LIMIT}")

    def read(rows: Sequence[sa.Row[Any]]) -> tuple[list[T], bool]:
        return [of(row) for row in rows[:limit]], len(rows) > limit

    page = keyset(listed, key, after=cursor.after, limit=limit, order=cursor.order)
    return Query(page, read)


async def read_all(
    conn: AsyncConnection, listed: sa.Select[Any], key: sa.ColumnElement[str], kind: type[R]
) -> AsyncIterator[R]:
    """Yield all rows as structs with their columns, read a page at a time."""
    cursor, more = Cursor(limit=MAX_LIMIT), True
    while more:
        rows, more = await read_page(conn, listed, key, cursor)
        for row in rows:
            yield kind(**row._mapping)
        if rows:
            cursor = Cursor(limit=MAX_LIMIT, after=rows[-1].id)


def like(column: sa.ColumnElement[str], text: str) -> sa.ColumnElement[bool]:
    """Select whether a text stands in a column, in whatever case."""
    return column.ilike(f"%{escaped(text)}%", escape="\\")


def ends(column: sa.ColumnElement[str], text: str) -> sa.ColumnElement[bool]:
    """Select whether a column ends with a text, such as the end of an id."""
    return column.like(f"%{escaped(text)}", escape="\\")


def escaped(text: str) -> str:
    """Return a text that LIKE takes for itself."""
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
