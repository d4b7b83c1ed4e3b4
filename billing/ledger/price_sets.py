"""Load the price book into Postgres, where ranges of time cannot overlap, and neither a price nor a
term of a price list changes once it was loaded.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Range, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.errors import PriceChanged
from billing.events import Component, Price
from billing.pricing.entries import DatedEntry, PriceEntry
from billing.pricing.lists import Discount, PeriodRule, Rule
from billing.pricing.price_book import PriceBook
from billing.tables import price_keys, price_rules, prices

LOCK_KEY = 0x7072696365730001
"""pg_advisory_xact_lock: gateways that start together load one after the other."""


_PRICE = (prices.c.price_id, prices.c.pico_per_token)
_RULE = (price_rules.c.rule_id, price_rules.c.content)


class PriceBookChanges(msgspec.Struct, frozen=True):
    """Ids of the prices and rules that were added, and of those that a new entry has ended."""

    added: list[str]
    closed: list[str]


Note = Callable[[AsyncConnection, PriceBookChanges], Awaitable[None]]
"""Records the changes in their transaction."""


async def sync_price_book(db: AsyncEngine, book: PriceBook, *, note: Note | None = None) -> int:
    """Add new prices and rules in a transaction of their own, as `sync_prices` does."""
    try:
        async with db.begin() as connection:
            return await sync_prices(connection, book, note=note)
    except IntegrityError as error:
        raise to_price_changed(error) from error


async def sync_prices(
    connection: AsyncConnection, book: PriceBook, *, note: Note | None = None
) -> int:
    """Add new prices and rules, and end those that a new entry follows. Return the number added.

    Raises: PriceChanged when a loaded entry was edited, IntegrityError (`to_price_changed`) when a
    new one overlaps a loaded one that the book no longer has. Nothing may be kept then.
    """
    await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK_KEY)))
    closed: list[str] = []
    # Loaded ranges are closed first: a new one may begin only where the old one ends.
    new = [
        (entry, component, price)
        for entry in book
        for component, price in entry.prices.items()
        if not await _is_loaded(
            connection, _PRICE, price.price_id, price.pico_per_token, entry, closed
        )
    ]
    for entry, component, price in new:
        await _add(connection, entry, component, price)
    rules = [
        rule
        for rule in book.lists.rules
        if not await _is_loaded(connection, _RULE, rule.id, content_of(rule), rule, closed)
    ]
    for rule in rules:
        await _add_rule(connection, rule)
    added = [*(price.price_id for *_, price in new), *(rule.id for rule in rules)]
    if note is not None and (added or closed):
        await note(connection, PriceBookChanges(added, closed))
    return len(added)


def to_price_changed(error: IntegrityError) -> PriceChanged:
    return PriceChanged(f"a price overlaps one that was loaded before: {error.orig}")


async def _is_loaded(
    connection: AsyncConnection,
    columns: tuple[sa.Column[str], sa.Column[Any]],
    name: str,
    content: object,
    entry: DatedEntry,
    closed: list[str],
) -> bool:
    """Tell whether an entry is loaded already. Its range is closed if the book now ends it; then
    its name is added to `closed`. Raises: PriceChanged."""
    id_column, content_column = columns
    table = id_column.table
    assert isinstance(table, sa.Table)
    found = sa.select(content_column, table.c.valid).where(id_column == name)
    row = (await connection.execute(found)).one_or_none()
    if row is None:
        return False
    loaded, valid = row
    if loaded != content:
        raise PriceChanged(
            f"{entry.where}: {name} was loaded as {loaded}, now reads {content};"
            " add an entry with a later valid_from"
        )
    if valid.upper == entry.valid_to:
        return True
    if valid.upper is not None:
        raise PriceChanged(
            f"{entry.where}: {name} was loaded until {valid.upper}, now reads"
            f" {entry.valid_to or 'open'}"
        )
    closing = table.update().where(id_column == name)
    await connection.execute(closing.values(valid=_valid(entry)))
    closed.append(name)
    return True


async def _add(
    connection: AsyncConnection, entry: PriceEntry, component: Component, price: Price
) -> None:
    key = {
        "price_list": entry.price_list,
        "model": entry.model,
        "tier": entry.tier,
        "component": component,
        "min_total_input": entry.min_total_input,
    }
    await connection.execute(insert(price_keys).values(key).on_conflict_do_nothing())
    key_id = sa.select(price_keys.c.id).filter_by(**key).scalar_subquery()
    row = {"price_id": price.price_id, "pico_per_token": price.pico_per_token}
    await connection.execute(prices.insert().values(key_id=key_id, valid=_valid(entry), **row))


async def _add_rule(connection: AsyncConnection, rule: Rule) -> None:
    row = {
        "rule_id": rule.id,
        "price_list": rule.price_list,
        "slot": rule.slot,
        "content": content_of(rule),
        "valid": _valid(rule),
    }
    await connection.execute(price_rules.insert().values(row))


def content_of(rule: Rule) -> dict[str, Any]:
    """Return the content of a rule as JSON, without its scope and dates."""
    if isinstance(rule, Discount):
        return {"discount_bps": rule.bps}
    assert isinstance(rule, PeriodRule)
    # Postgres returns lists where the struct has tuples.
    content: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(rule.content)))
    return {name: value for name, value in content.items() if name not in ("id", "scope")}


def _valid(entry: DatedEntry) -> Range[datetime]:
    return Range(entry.valid_from, entry.valid_to)
