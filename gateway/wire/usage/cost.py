"""Shows what an answer cost, in the answer itself, where the request's `x-tollgate-cost: true`
asks, or its key or org is set to and the request does not say `false`.

Knows no HTTP but the header's name. Nothing of it is computed for who did not ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from billing.events import COMPONENT_KINDS, Component
from billing.money import Pico, format_usd
from billing.pricing.rating import RatedLine, RatedUsage
from gateway.request_errors import BadField

HEADER = "x-tollgate-cost"
"""A header: on a request it asks for the cost; on a non-streamed answer it holds the cost."""
_HEADER = HEADER.encode()
_ASKS = {b"true": True, b"1": True, b"false": False, b"0": False}
CURRENCY: Literal["USD"] = "USD"


class ComponentCost(msgspec.Struct, frozen=True, kw_only=True):
    """`amount` = quantity x the price that `price_id` names, as it was at the admission."""

    quantity: int
    unit: str
    amount: str
    price_id: str


class UsageCost(msgspec.Struct, frozen=True, kw_only=True):
    """Decimal strings, exact: the components sum to the amount, and that is booked."""

    amount: str
    currency: Literal["USD"] = CURRENCY
    components: dict[Component, ComponentCost]
    unpriced: tuple[Component, ...] = ()
    """Used, and without a price: charged once they have one."""


def to_usage_cost(rated: RatedUsage) -> UsageCost:
    return UsageCost(
        amount=format_usd(rated.amount_pico),
        components={line.component: to_component_cost(line) for line in rated.lines},
        unpriced=rated.unpriced,
    )


def to_component_cost(line: RatedLine) -> ComponentCost:
    return ComponentCost(
        quantity=line.quantity,
        unit=COMPONENT_KINDS[line.component].unit,
        amount=format_usd(line.amount_pico),
        price_id=line.price_id,
    )


def to_header(amount_pico: Pico) -> str:
    """`0.00001816 USD`."""
    return f"{format_usd(amount_pico)} {CURRENCY}"


def asks_cost(headers: Iterable[tuple[bytes, bytes]], unasked: bool) -> bool:
    """From ASGI's headers; `unasked`: where they say nothing. Raises: BadField."""
    for name, value in headers:
        if name == _HEADER:
            asked = _ASKS.get(value.strip().lower())
            if asked is None:
                message = f"Invalid value for '{HEADER}': expected true or false."
                raise BadField(message, param=HEADER)
            return asked
    return unasked
