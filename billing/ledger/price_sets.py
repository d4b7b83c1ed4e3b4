"""Load the price book into Postgres: ranges cannot overlap, and nothing that was loaded changes,
neither a price nor a term of a price list.
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


class PriceBookChanges(msgspec.Struct, frozen=True):
    """Ids of prices and rules that were added, and of those whose range a new entry has closed."""

    added: list[str]
    closed: list[str]


Note = Callable[[AsyncConnection, PriceBookChanges], Awaitable[None]]
"""Called in the transaction, where there is anything to tell."""


async def notify_nobody(connection: AsyncConnection, loaded: PriceBookChanges) -> None:
    """Do nothing: nobody is to be told."""


async def sync_price_book(db: AsyncEngine, book: PriceBook, *, note: Note = notify_nobody) -> int:
    """Add what is new and close ranges that a new entry ends; returns the number of both added.

    Raises: PriceChanged when an entry that was loaded once reads otherwise now, or overlaps one
    that the book no longer holds. Nothing is changed then.
    """
    try:
        async with db.begin() as connection:
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK_KEY)))
            closed: list[str] = []
            # Closing comes first: a new range may begin only where the old one has ended.
            new = [
                (entry, component, price)
                for entry in book
                for component, price in entry.prices.items()
                if not await _stands(connection, entry, price, closed)
            ]
            for entry, component, price in new:
                await _add(connection, entry, component, price)
            rules = [
                rule
                for rule in book.lists.rules
                if not await _rule_stands(connection, rule, closed)
            ]
            for rule in rules:
                await _add_rule(connection, rule)
            added = [*(price.price_id for *_, price in new), *(rule.id for rule in rules)]
            if added or closed:
                await note(connection, PriceBookChanges(added, closed))
    except IntegrityError as error:
        raise PriceChanged(f"a price overlaps one that was loaded before: {error.orig}") from error
    return len(added)


async def _stands(
    connection: AsyncConnection, entry: PriceEntry, price: Price, closed: list[str]
) -> bool:
    """Whether the price is there already, after closing its range if the book now does: then it is
    one more of the `closed`."""
    row = (
        await connection.execute(sa.select(prices).where(prices.c.price_id == price.price_id))
    ).one_or_none()
    if row is None:
        return False
    known = Price(row.price_id, row.pico_per_token)
    if known != price:
        raise PriceChanged(
            f"{entry.where}: {price.price_id} was loaded as {known.pico_per_token} pico per token,"
            f" now reads {price.pico_per_token}; add an entry with a later valid_from"
        )
    if _is_to_close(row.valid, entry, price.price_id):
        closing = prices.update().where(prices.c.price_id == price.price_id)
        await connection.execute(closing.values(valid=_valid(entry)))
        closed.append(price.price_id)
    return True


async def _rule_stands(connection: AsyncConnection, rule: Rule, closed: list[str]) -> bool:
    """As `_stands`."""
    query = sa.select(price_rules).where(price_rules.c.rule_id == rule.id)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        return False
    if row.content != content_of(rule):
        raise PriceChanged(
            f"{rule.where}: {rule.id} was loaded as {row.content}, now reads {content_of(rule)};"
            " add one with a later valid_from"
        )
    if _is_to_close(row.valid, rule, rule.id):
        closing = price_rules.update().where(price_rules.c.rule_id == rule.id)
        await connection.execute(closing.values(valid=_valid(rule)))
        closed.append(rule.id)
    return True


def _is_to_close(known: Range[datetime], now: DatedEntry, name: str) -> bool:
    """Raises: PriceChanged, where an end that was loaded reads otherwise now."""
    if known.upper == now.valid_to:
        return False
    if known.upper is not None:
        raise PriceChanged(
            f"{now.where}: {name} was loaded until {known.upper}, now reads"
            f" {now.valid_to or 'open'}"
        )
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
    """Return what a rule says, beside where and when."""
    if isinstance(rule, Discount):
        return {"discount_bps": rule.bps}
    assert isinstance(rule, PeriodRule)
    # As JSON has it, which is how it is read again: it knows no tuple.
    content: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(rule.content)))
    return {name: value for name, value in content.items() if name not in ("id", "scope")}


def _valid(entry: DatedEntry) -> Range[datetime]:
    return Range(entry.valid_from, entry.valid_to)
