"""The columns that tables of the gateway are made of, and those that are sealed: they hold what
tenants wrote and were answered.

What is true of the database says its migration; nothing here makes a table. A sealed text stands as
base64 in a text column and as a JSON string in a JSON column. What is empty is not sealed. Each
value is bound to its table, column and row. `seal_some` walks over rows that are not sealed, or
under an older secret.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from cryptography.exceptions import InvalidTag
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.secret import Cipher, UnknownSecret

log = logging.getLogger(__name__)

SEALED_AT_ONCE = 20
"""Rows of a transaction: each may have half a megabyte and more."""
EMPTY = (None, "", b"")
UNREADABLE = (UnknownSecret, InvalidTag, ValueError)
"""Opening raises these: the secret is gone, or the value was changed."""

Row = Mapping[str, Any]


def text(name: str, *, nullable: bool = False, key: bool = False) -> sa.Column[Any]:
    """Return a text column; key: of the primary key."""
    return sa.Column(name, sa.Text, nullable=nullable, primary_key=key)


def texts(name: str) -> sa.Column[list[str]]:
    return sa.Column(name, ARRAY(sa.Text), nullable=False)


def limits(names: Iterable[str]) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=True) for name in names]


def moment(name: str, *, nullable: bool = True) -> sa.Column[datetime]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), nullable=nullable)


def moment_made(name: str = "created_at") -> sa.Column[datetime]:
    """Return a column with the time of the transaction that adds the row, unless it says
    otherwise."""
    made = sa.TIMESTAMP(timezone=True)
    return sa.Column(name, made, nullable=False, server_default=sa.func.now())


class SealedColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a table that are sealed together, under the secret that another column names.

    `place`: columns that tell the row. `context`: what a value is bound to; by default to table,
    column and place. Where `secret` is null the columns are not sealed.
    """

    table: sa.Table
    columns: tuple[str, ...]
    place: tuple[str, ...]
    purpose: str
    secret: str = "secret_id"
    context: Callable[[Row], bytes] | None = None

    def context_of(self, row: Row, column: str) -> bytes:
        if self.context is not None:
            return self.context(row)
        return "\n".join((self.table.name, column, *(str(row[it]) for it in self.place))).encode()

    def seal(self, cipher: Cipher, row: Row) -> dict[str, Any]:
        """Return the columns as they are stored. `row`: their values and the place."""
        stored: dict[str, Any] = {}
        for name in self.columns:
            value = row[name]
            stored[name] = value
            if value not in EMPTY:
                column = self.table.c[name]
                sealed = cipher.seal(_to_plain(column, value), self.context_of(row, name))
                stored[name] = _to_stored(column, sealed.data)
        stored[self.secret] = cipher.current_id
        return stored

    def open(self, cipher: Cipher, row: Row) -> dict[str, Any]:
        """Return the values of the columns. Raises: UNREADABLE."""
        secret_id = row[self.secret]
        found = {name: row[name] for name in self.columns}
        if secret_id is None:
            return found
        for name, value in found.items():
            if value not in EMPTY:
                column = self.table.c[name]
                data = _from_stored(column, value)
                plain = cipher.open(data, self.context_of(row, name), secret_id)
                found[name] = _from_plain(column, plain)
        return found

    @property
    def is_unsealed(self) -> sa.ColumnElement[bool]:
        """Select rows that have something and are not sealed."""
        has_something = [_has_something(self.table.c[name]) for name in self.columns]
        return sa.and_(self.table.c[self.secret].is_(None), sa.or_(*has_something))


class SealedRows(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step of a walk."""

    num_sealed: int
    unreadable: dict[str, str]
    """The rows that do not open, and why."""
    last: tuple[Any, ...] | None
    """The key to go on behind; None: the walk is over."""


async def seal_some(
    conn: AsyncConnection,
    found: SealedColumns,
    cipher: Cipher,
    *,
    after: tuple[Any, ...] | None = None,
    is_rotation: bool = False,
    most: int = SEALED_AT_ONCE,
) -> SealedRows:
    """Seal the next rows that are not sealed, of all tenants; `is_rotation`: and those that are
    sealed under an older secret. Rows that somebody else holds are left for the next walk."""
    table = found.table
    key = [column.name for column in table.primary_key.columns]
    wanted = _wanted(found, cipher, is_rotation=is_rotation)
    names = dict.fromkeys((*key, *found.place, *found.columns, found.secret))
    asked = sa.select(*(table.c[name] for name in names)).where(wanted)
    keys = sa.tuple_(*(table.c[name] for name in key))
    if after is not None:
        asked = asked.where(keys > after)
    asked = asked.order_by(*(table.c[name] for name in key)).limit(most)
    rows = (await conn.execute(asked.with_for_update(skip_locked=True))).all()
    num_sealed, unreadable = 0, dict[str, str]()
    for row in rows:
        values = dict(row._mapping)
        place = tuple(values[name] for name in key)
        try:
            plain = found.open(cipher, values)
        except UNREADABLE as error:
            log.error("%s %s does not open: %r", table.name, place, error)
            unreadable[f"{table.name} {'/'.join(map(str, place))}"] = _reason_of(error)
            continue
        sealed = found.seal(cipher, {**values, **plain})
        changed = sa.update(table).where(*(table.c[name] == values[name] for name in key))
        await conn.execute(changed.values(**sealed))
        num_sealed += 1
    last = tuple(rows[-1]._mapping[name] for name in key) if len(rows) == most else None
    return SealedRows(num_sealed=num_sealed, unreadable=unreadable, last=last)


async def count_left(conn: AsyncConnection, found: SealedColumns, cipher: Cipher) -> int:
    """Count the rows that are not sealed, or under an older secret, whoever holds them."""
    wanted = _wanted(found, cipher, is_rotation=True)
    asked = sa.select(sa.func.count()).select_from(found.table).where(wanted)
    return int((await conn.execute(asked)).scalar_one())


def _wanted(found: SealedColumns, cipher: Cipher, *, is_rotation: bool) -> sa.ColumnElement[bool]:
    if not is_rotation:
        return found.is_unsealed
    return sa.or_(found.is_unsealed, found.table.c[found.secret] != cipher.current_id)


def _reason_of(error: Exception) -> str:
    if isinstance(error, UnknownSecret):
        return f"it was sealed under {error}, which the secret's file does not have"
    return "it was changed since it was sealed"


def _has_something(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    if isinstance(column.type, JSONB):
        return sa.func.jsonb_typeof(column).in_(("object", "array"))
    return column != (b"" if isinstance(column.type, sa.LargeBinary) else "")


def _to_plain(column: sa.Column[Any], value: Any) -> bytes:
    if isinstance(column.type, JSONB):
        return msgspec.json.encode(value)
    return value.encode() if isinstance(value, str) else bytes(value)


def _from_plain(column: sa.Column[Any], plain: bytes) -> Any:
    if isinstance(column.type, JSONB):
        return msgspec.json.decode(plain)
    return plain if isinstance(column.type, sa.LargeBinary) else plain.decode()


def _to_stored(column: sa.Column[Any], data: bytes) -> str | bytes:
    return data if isinstance(column.type, sa.LargeBinary) else base64.b64encode(data).decode()


def _from_stored(column: sa.Column[Any], value: str | bytes) -> bytes:
    if isinstance(column.type, sa.LargeBinary):
        return bytes(value)  # type: ignore[arg-type]
    return base64.b64decode(value, validate=True)
