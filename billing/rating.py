"""Quantities times prices. Pure; the only multiplication that makes money out of tokens.

Above: `ingest`, `reconcile`. Below: `events`. Knows no account and no time: the prices were chosen
at admission.
"""

from __future__ import annotations

import msgspec

from billing.events import COMPONENTS, Component, PriceSet, Quantities
from billing.money import Pico


class RatedLine(msgspec.Struct, frozen=True):
    """One priced component; `amount_pico` = quantity (tokens) x the price named."""

    component: Component
    quantity: int
    price_id: str
    amount_pico: Pico


class Rated(msgspec.Struct, frozen=True, kw_only=True):
    lines: tuple[RatedLine, ...]
    amount_pico: Pico
    """The sum of the lines."""
    unpriced: tuple[Component, ...]
    """Used and without a price: for the suspense account."""

    def amount_of(self, component: Component) -> Pico:
        return sum(line.amount_pico for line in self.lines if line.component == component)


def rate(quantities: Quantities, prices: PriceSet) -> Rated:
    """Every component that was used becomes a line, or stands in `unpriced`. Nothing is rounded."""
    lines: list[RatedLine] = []
    unpriced: list[Component] = []
    for component in COMPONENTS:
        quantity: int = getattr(quantities, component)
        if quantity == 0:
            continue
        price = prices.get(component)
        if price is None:
            unpriced.append(component)
        else:
            amount = quantity * price.pico_per_token
            lines.append(RatedLine(component, quantity, price.price_id, amount))
    total = sum(line.amount_pico for line in lines)
    return Rated(lines=tuple(lines), amount_pico=total, unpriced=tuple(unpriced))
