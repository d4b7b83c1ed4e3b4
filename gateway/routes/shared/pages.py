"""Lists by keyset pagination, the one way in which administration lists.

A page starts behind the id that `after` names, never at an offset: rows that come and go meanwhile
are neither shown twice nor left out. Ids are UUIDv7 behind a prefix, so their order is that of
creation.

    query = parse_query(request.url.query, PageQuery)          # gateway.wire.organization.usage
    async with tenant(db, org_id) as conn:
        rows = list(await conn.execute(keyset(sa.select(things), things.c.id, query)))
    return answer(request, to_listing([to_wire(row) for row in rows], query))

`keyset` asks for one row more than the page holds, and `to_listing` cuts it off: that is how it
knows whether there are more. A query with more parameters extends `PageQuery`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec
import sqlalchemy as sa

from gateway.tenancy import pages
from gateway.tenancy.pages import Order
from gateway.wire.organization.organization import ListQuery
from gateway.wire.shared.page_query import PageQuery as PageQuery

T = TypeVar("T")


class Listing(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """OpenAI's `list` object."""

    object: str = "list"
    data: Sequence[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def keyset(
    statement: sa.Select[Any], column: sa.ColumnElement[str], query: PageQuery | ListQuery
) -> sa.Select[Any]:
    """Select the rows of the page, and one more where there is one. `column` is unique."""
    order: Order = getattr(query, "order", "asc")
    return pages.keyset(statement, column, after=query.after, limit=query.limit, order=order)


def page_of(ids: Iterable[str], query: PageQuery) -> tuple[list[str], bool]:
    """Return the page of ids that stand in memory, and whether there are more behind it."""
    backwards = query.order == "desc"
    wanted = [
        each
        for each in ids
        if query.after is None or (each < query.after if backwards else each > query.after)
    ]
    return sorted(wanted, reverse=backwards)[: query.limit], len(wanted) > query.limit


def to_listing(
    items: Sequence[T], query: PageQuery, id_of: Callable[[T], str] = attrgetter("id")
) -> Listing[T]:
    """Make a listing. `items`: what `keyset` found, as clients see it."""
    data = items[: query.limit]
    return Listing(
        data=data,
        first_id=id_of(data[0]) if data else None,
        last_id=id_of(data[-1]) if data else None,
        has_more=len(items) > query.limit,
    )
