"""Tariffs: the prices by which a period is rated anew. A tariff has a book's prices during that
period, for the models, tiers and price lists that were used in it. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from billing.events import PriceSet, Tier
from billing.pricing.price_book import Place, PriceBook


class PriceSpan(msgspec.Struct, frozen=True):
    """Prices that are valid from `since` on (Unix seconds)."""

    since: float
    prices: PriceSet


class Fare(msgspec.Struct, frozen=True, kw_only=True):
    """The prices of a model in a tier, for events that were admitted by a price list."""

    price_list: str
    model: str
    tier: Tier
    spans: tuple[PriceSpan, ...]


class Tariff(msgspec.Struct, frozen=True):
    fares: tuple[Fare, ...]

    def by_place(self) -> dict[Place, tuple[PriceSpan, ...]]:
        return {(it.price_list, it.model, it.tier): it.spans for it in self.fares}


def tariff_of(
    book: PriceBook, places: Iterable[Place], start: float, end: float, *, price_list: str | None
) -> Tariff:
    """Make the tariff of a period, from `start` to `end` in Unix seconds. `price_list`: rates all
    events, instead of the list by which each was admitted."""
    starts = [start, *(each for each in book.starts if start < each < end)]
    return Tariff(
        tuple(
            Fare(
                price_list=admitted_by,
                model=model,
                tier=tier,
                spans=tuple(
                    PriceSpan(since, book.at(model, since, tier, price_list or admitted_by))
                    for since in starts
                ),
            )
            for admitted_by, model, tier in sorted(places)
        )
    )


def prices_at(spans: tuple[PriceSpan, ...], unix_time: float) -> PriceSet:
    """Return the prices in force at a moment."""
    position = bisect_right(spans, unix_time, key=lambda span: span.since) - 1
    return spans[max(0, position)].prices
