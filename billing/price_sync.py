"""Load the price book into Postgres, where ranges cannot overlap and nothing loaded changes.

Above: the gateway's start. Below: `price_book`, `tables`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Range, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.errors import PriceChanged
from billing.events import Component, Price
from billing.price_book import PriceBook, PriceEntry
from billing.tables import price_keys, prices

LOCK_KEY = 0x7072696365730001
"""pg_advisory_xact_lock: gateways that start together load one after the other."""


class Loaded(msgspec.Struct, frozen=True):
    """Ids of prices that were added, and of those whose range a new entry has closed."""

    added: list[str]
    closed: list[str]


Note = Callable[[AsyncConnection, Loaded], Awaitable[None]]
"""Called in the transaction, where there is anything to tell."""


async def nobody(connection: AsyncConnection, loaded: Loaded) -> None:
    """Where nobody is to be told."""


async def sync_price_book(db: AsyncEngine, book: PriceBook, *, note: Note = nobody) -> int:
    """Add what is new and close ranges that a new entry ends; returns the number of prices added.

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
            if new or closed:
                await note(connection, Loaded([price.price_id for *_, price in new], closed))
    except IntegrityError as error:
        raise PriceChanged(f"a price overlaps one that was loaded before: {error.orig}") from error
    return len(new)


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
    if row.valid.upper == entry.valid_to:
        return True
    if row.valid.upper is not None:
        raise PriceChanged(
            f"{entry.where}: {price.price_id} was loaded until {row.valid.upper},"
            f" now reads {entry.valid_to or 'open'}"
        )
    await connection.execute(
        prices.update().where(prices.c.price_id == price.price_id).values(valid=_valid(entry))
    )
    closed.append(price.price_id)
    return True


async def _add(
    connection: AsyncConnection, entry: PriceEntry, component: Component, price: Price
) -> None:
    key = {
        "model": entry.model,
        "tier": entry.tier,
        "component": component,
        "min_total_input": entry.min_total_input,
    }
    await connection.execute(insert(price_keys).values(key).on_conflict_do_nothing())
    key_id = sa.select(price_keys.c.id).filter_by(**key).scalar_subquery()
    row = {"price_id": price.price_id, "pico_per_token": price.pico_per_token}
    await connection.execute(prices.insert().values(key_id=key_id, valid=_valid(entry), **row))


def _valid(entry: PriceEntry) -> Range[object]:
    return Range(entry.valid_from, entry.valid_to)
