"""Takes prices up that operators store: into Postgres in the transaction of the change, where
neither a price nor a term changes once it was loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.errors import PriceBookError
from billing.ledger.price_sets import (
    PriceBookChanges,
    content_of,
    sync_prices,
    to_price_changed,
)
from billing.pricing.drafts import changes_of
from billing.pricing.entries import DEFAULT_LIST, PriceEntry
from billing.pricing.price_book import PriceBook
from gateway.audit.log import SETTINGS, record
from gateway.settings.file import one_line
from gateway.settings.load import Settings
from gateway.settings.prices import load_prices
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.orgs import find_operator

PAST = "begins in the past; what was admitted is priced"


async def record_prices(conn: AsyncConnection, loaded: PriceBookChanges) -> None:
    """Record the price books in the operator's audit log."""
    operator = await find_operator(conn)
    if operator is not None:
        await record(
            conn,
            org_id=operator,
            actor=SETTINGS,
            action="prices.loaded",
            target="price_book",
            after={"added": loaded.added, "closed": loaded.closed},
        )


async def take_up_prices(
    conn: AsyncConnection, settings: Settings, before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """Load the prices that are stored `after` a change, beside those of the files of `settings`;
    return what they change, a line each. Raises: InvalidField."""
    old = await _load(settings, before)
    new = await _load(settings, after)
    lines = list(_changes(old, new))
    try:
        await sync_prices(conn, new, note=record_prices)
    except IntegrityError as error:
        raise _refused(to_price_changed(error)) from None
    except PriceBookError as error:
        raise _refused(error) from None
    return lines


async def _load(settings: Settings, stored: Mapping[str, Any]) -> PriceBook:
    wanted = msgspec.structs.replace(settings, stored_prices=dict(stored))
    try:
        return await asyncio.to_thread(load_prices, wanted)
    except PriceBookError as error:
        raise _refused(error) from None


def _refused(error: PriceBookError) -> InvalidField:
    return InvalidField(
        "content", one_line(str(error)), detail="It does not fit the prices that there are"
    )


def _changes(old: PriceBook, new: PriceBook) -> Iterator[str]:
    """Yield what is new, a line each. Raises: InvalidField."""
    known = {price.price_id for entry in old for price in entry.prices.values()}
    added = [
        entry
        for entry in new
        if entry.price_list == DEFAULT_LIST
        and any(price.price_id not in known for price in entry.prices.values())
    ]
    for entry in added:
        if entry.valid_from.timestamp() <= time.time() and _had_a_price(entry, old):
            raise InvalidField("content.valid_from", f"{entry.where}: {PAST}", detail=PAST)
    yield from map(str, changes_of(added, old))
    terms = {rule.id for rule in old.lists.rules}
    for rule in new.lists.rules:
        if rule.id not in terms:
            if rule.valid_from.timestamp() <= time.time():
                raise InvalidField("content.valid_from", f"{rule.where}: {PAST}", detail=PAST)
            yield f"+ {rule.id}: {msgspec.json.encode(content_of(rule)).decode()}"


def _had_a_price(entry: PriceEntry, book: PriceBook) -> bool:
    """Tell whether the model had another price since the entry begins: then it was used."""
    begun, now = entry.valid_from.timestamp(), time.time()
    moments = [begun, now, *(each for each in book.starts if begun < each < now)]
    return any(book.at(entry.model, moment, entry.tier) for moment in moments)
