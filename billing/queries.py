"""Asks the database for several things at once: one statement, one way there and back.

    balance, wanted = await ask_all(conn, balance_query(org), settings_query(org))

Each query is a part of a UNION ALL whose columns stand beside each other, so each row has the
types, the names and the place in the order that it has where its query is asked alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.engine.result import IteratorResult, SimpleResultMetaData
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.tables import AnyRow

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


@dataclass(frozen=True)
class Query(Generic[T]):
    """A SELECT, and what makes something of its rows."""

    select: sa.Select[Any] | sa.CompoundSelect[Any] | sa.TextualSelect
    read: Callable[[Sequence[AnyRow]], T]


async def ask(conn: AsyncConnection, query: Query[T]) -> T:
    """Raises: what the query's `read` raises."""
    return query.read((await conn.execute(query.select)).all())


@overload
async def ask_all(conn: AsyncConnection, a: Query[A], b: Query[B], /) -> tuple[A, B]: ...
@overload
async def ask_all(
    conn: AsyncConnection, a: Query[A], b: Query[B], c: Query[C], /
) -> tuple[A, B, C]: ...
@overload
async def ask_all(
    conn: AsyncConnection, a: Query[A], b: Query[B], c: Query[C], d: Query[D], /
) -> tuple[A, B, C, D]: ...
async def ask_all(conn: AsyncConnection, /, *queries: Query[Any]) -> tuple[Any, ...]:
    """Ask several queries in one statement. Raises: what their `read` raises, in their order."""
    names = [query.select.selected_columns.keys() for query in queries]
    begins = [*accumulate(map(len, names), initial=2)]
    found: list[list[tuple[Any, ...]]] = [[] for _ in queries]
    for row in await conn.execute(_together(queries)):
        part = row[0]
        found[part].append(tuple(row[begins[part] : begins[part] + len(names[part])]))
    return tuple(
        query.read(IteratorResult(SimpleResultMetaData(keys), iter(rows)).all())
        for query, keys, rows in zip(queries, names, found, strict=True)
    )


def _together(queries: Sequence[Query[Any]]) -> sa.Select[Any]:
    parts = [query.select.subquery(f"part_{n}") for n, query in enumerate(queries)]
    whole = sa.union_all(*(sa.select(*_columns(n, parts)) for n in range(len(parts)))).subquery()
    part, place = list(whole.c)[:2]
    return sa.select(whole).order_by(part, place)


def _columns(number: int, parts: Sequence[sa.Subquery]) -> Iterator[sa.ColumnElement[Any]]:
    """Yield the columns of one part, and NULL for those of the others."""
    yield sa.literal_column(str(number), sa.Integer).label("part")
    yield sa.func.row_number().over().label("place")
    for n, part in enumerate(parts):
        for column in part.c:
            name = f"c{n}_{column.key}"
            own = column if n == number else sa.cast(sa.null(), column.type)
            yield own.label(name)
