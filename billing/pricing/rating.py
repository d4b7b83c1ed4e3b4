"""Rate usage: quantities times prices. Pure.

Knows no account and no time: the prices were chosen at admission.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from billing.events import COMPONENTS, TOKENS, Component, Price, PriceSet, Quantities
from billing.money import Pico

PRICED_AS: dict[Component, Component] = {
    "reasoning_output": "output",
    "embedding_input": "uncached_input",
}
"""The component whose price applies while a component has none of its own."""


class RatedLine(msgspec.Struct, frozen=True, gc=False):
    """A component with its price: `amount_pico` = quantity (tokens or calls) x price."""

    component: Component
    quantity: int
    price_id: str
    amount_pico: Pico


class RatedUsage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    lines: tuple[RatedLine, ...]
    amount_pico: Pico
    """The sum of the lines."""
    unpriced: tuple[Component, ...]
    """Components that were used and have no price; they are booked in suspense."""

    def amount_of(self, component: Component) -> Pico:
        return sum(line.amount_pico for line in self.lines if line.component == component)


def price_of(component: Component, prices: PriceSet) -> Price | None:
    return prices.get(component) or prices.get(PRICED_AS.get(component, component))


def prices_at(prices: PriceSet, total_input: int) -> PriceSet:
    """Return the prices of a request with so much input, whatever part of it is rated."""
    bands = {component: price.of(total_input) for component, price in prices.items()}
    return {name: Price(each.price_id, each.pico_per_token) for name, each in bands.items()}


def rate(quantities: Quantities, prices: PriceSet, *, total_input: int | None = None) -> RatedUsage:
    """Make a line of every component that was used and has a price, without rounding. Tokens
    without a price are `unpriced`; a call without a price is free.

    `total_input`: the input of the whole request, which chooses the size band, if `quantities` are
    a part of it.
    """
    size = quantities.input_total if total_input is None else total_input
    lines: list[RatedLine] = []
    unpriced: list[Component] = []
    total = 0
    for component in COMPONENTS:
        quantity: int = getattr(quantities, component)
        if quantity == 0:
            continue
        price = price_of(component, prices)
        if price is not None:
            chosen = price.of(size)
            amount = quantity * chosen.pico_per_token
            total += amount
            lines.append(RatedLine(component, quantity, chosen.price_id, amount))
        elif component in TOKENS:
            unpriced.append(component)
    return RatedUsage(lines=tuple(lines), amount_pico=total, unpriced=tuple(unpriced))


def rate_unkept(
    quantities: Quantities, prices: PriceSet, unkept: Mapping[Component, int]
) -> RatedUsage:
    """Rate a request of which the cache did not keep all written tokens. `unkept`: those tokens,
    which cost the price of uncached input."""
    rated, size = rate(quantities, prices), quantities.input_total
    lines = tuple(
        msgspec.structs.replace(
            line,
            amount_pico=line.amount_pico
            - premium(line.component, unkept.get(line.component, 0), prices, size),
        )
        for line in rated.lines
    )
    total = sum(line.amount_pico for line in lines)
    return RatedUsage(lines=lines, amount_pico=total, unpriced=rated.unpriced)


def premium(component: Component, num_tokens: int, prices: PriceSet, total_input: int) -> Pico:
    """Return the cost of a component's tokens beyond that of uncached input."""
    price, uncached = price_of(component, prices), price_of("uncached_input", prices)
    if price is None or uncached is None:
        return 0
    per_token = price.of(total_input).pico_per_token - uncached.of(total_input).pico_per_token
    return max(0, per_token) * num_tokens
