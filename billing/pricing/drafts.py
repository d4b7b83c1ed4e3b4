"""Drafts of prices: published prices as a price book that a person reviews, edits and applies.
Pure.

The digest of a draft covers the draft and the differences that were shown; applying it takes that
digest. So a draft that was edited since, or a book that has changed since, has to be shown again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal

import msgspec

from billing.events import CALLS, COMPONENTS, TIERS, Component, Tier
from billing.pricing.entries import COMPONENT_OF_KEY, PriceEntry, moment_text
from billing.pricing.price_book import PriceBook
from billing.pricing.sources import Place, PublishedPrices

PICO_PER_MICRO = 1_000_000
KEY_OF_COMPONENT = {component: key for key, component in COMPONENT_OF_KEY.items()}
Prices = Mapping[Place, Mapping[Component, int]]


class Difference(msgspec.Struct, frozen=True, order=True):
    """The change of one component's price in pico-USD. None: it has no price."""

    model: str
    tier: Tier
    min_total_input: int
    component: Component
    before: int | None
    after: int | None
    valid_from: datetime | None = None
    """None: they are compared, and nothing begins."""

    def __str__(self) -> str:
        size = f" from {self.min_total_input} tokens" if self.min_total_input else ""
        before, after = (_amount(self.component, pico) for pico in (self.before, self.after))
        change = ""
        if self.before and self.after is not None:
            percent = Decimal(100 * (self.after - self.before)) / self.before
            change = f" ({percent:+.1f} %)"
        begins = ""
        if self.valid_from is not None:
            begins = f", from {moment_text(self.valid_from).removesuffix('T00:00:00Z')}"
        return (
            f"{self.model} {self.tier}{size} {self.component}: {before} -> {after}{change}{begins}"
        )


def _amount(component: Component, pico: int | None) -> str:
    return "none" if pico is None else format_price(component, pico)


def format_price(component: str, pico: int) -> str:
    """Format a price as books have it: USD per million tokens, or per call."""
    if component in CALLS:
        return f"{Decimal(pico).scaleb(-12):f}"
    return f"{Decimal(pico) / PICO_PER_MICRO:f}"


def book_prices(book: PriceBook, model: str, unix_time: float) -> Prices:
    """Return the book's prices of a model at a moment, for the default tier and each tier that has
    its own prices."""
    found: dict[Place, dict[Component, int]] = {}
    for tier in TIERS:
        if tier != "default" and not book.sells(model, unix_time, tier):
            continue
        for component, price in book.at(model, unix_time, tier).items():
            found.setdefault((tier, 0), {})[component] = price.pico_per_token
            for band in price.bands:
                place = found.setdefault((tier, band.min_total_input), {})
                place[component] = band.pico_per_token
    return found


def differences(
    model: str, before: Prices, after: Prices, valid_from: datetime | None = None
) -> list[Difference]:
    return [
        Difference(model, tier, least, component, old, new, valid_from)
        for tier, least in sorted({*before, *after}, key=lambda place: (place[0], place[1]))
        for component in COMPONENTS
        if (old := before.get((tier, least), {}).get(component))
        != (new := after.get((tier, least), {}).get(component))
    ]


def draft_of(
    published: Mapping[str, PublishedPrices], book: PriceBook, valid_from: datetime, source: str
) -> str:
    """Return a price book with each entry that would change, as a whole: components that the
    source leaves out keep their price. Return an empty text if nothing would change. `published`:
    by our name of the model."""
    lines: list[str] = []
    for model, theirs in published.items():
        known = book_prices(book, model, valid_from.timestamp())
        if theirs.left_out:
            lines.append(f"# {model}: {source} also prices {', '.join(theirs.left_out)}\n")
        for place, prices in sorted(theirs.prices.items()):
            merged = {**_below(place, theirs), **known.get(place, {}), **prices}
            if merged != known.get(place):
                lines += _entry(model, place, merged, valid_from)
    if not any(line.startswith("[[price]]") for line in lines):
        return ""
    head = f"# From {source}. In USD per million tokens; a draft until it is applied.\n"
    return "".join([head, *lines])


def _below(place: Place, theirs: PublishedPrices) -> Mapping[Component, int]:
    """Return the default tier's prices, which a new entry of another tier has to repeat: an entry
    hides those of the default tier as a whole."""
    tier, least = place
    return {} if tier == "default" or least else theirs.prices.get(("default", 0), {})


def _entry(
    model: str, place: Place, prices: Mapping[Component, int], valid_from: datetime
) -> Sequence[str]:
    tier, least = place
    head = ["[[price]]\n", f"model = {json.dumps(model)}\n"]
    if tier != "default":
        head.append(f'tier = "{tier}"\n')
    if least:
        head.append(f"min_total_input = {least}\n")
    head.append(f'valid_from = "{moment_text(valid_from)}"\n')
    return head + [
        f'{KEY_OF_COMPONENT[component]} = "{format_price(component, prices[component])}"\n'
        for component in COMPONENTS
        if component in prices
    ]


def changes_of(draft: Iterable[PriceEntry], book: PriceBook) -> list[Difference]:
    """Return the differences between a draft and the book, at the moment each entry begins."""
    found: list[Difference] = []
    for entry in draft:
        place = (entry.tier, entry.min_total_input)
        known = book_prices(book, entry.model, entry.valid_from.timestamp()).get(place, {})
        after = {component: price.pico_per_token for component, price in entry.prices.items()}
        found += differences(entry.model, {place: known}, {place: after}, entry.valid_from)
    return sorted(
        found,
        key=lambda it: (it.model, it.valid_from, it.tier, it.min_total_input, it.component),
    )


def digest_of(draft: bytes, changes: Iterable[object]) -> str:
    """Return the SHA-256 of a draft and of the differences as they were shown."""
    shown = "\n".join(map(str, changes)).encode()
    return hashlib.sha256(hashlib.sha256(draft).digest() + shown).hexdigest()
