"""What was used: the quantities of one attempt and the event that bills them. Pure, no I/O.

Above: `rating`, `spool`, `ingest` and, in the gateway, `inference` alone, which makes these from
the engine's usage.
"""

from __future__ import annotations

from typing import Literal
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec

Component = Literal["uncached_input", "cache_read", "cache_write_5m", "cache_write_1h", "output"]
COMPONENTS: tuple[Component, ...] = (
    "uncached_input",
    "cache_read",
    "cache_write_5m",
    "cache_write_1h",
    "output",
)


Tier = Literal["default", "priority", "flex"]
"""What a request is served as; each may have prices of its own."""
TIERS: tuple[Tier, ...] = ("default", "priority", "flex")


class Quantities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts, disjoint: their sum is prompt + completion."""

    uncached_input: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    output: int = 0

    def __post_init__(self) -> None:
        for component in COMPONENTS:
            assert getattr(self, component) >= 0, f"negative {component}"

    @property
    def input_total(self) -> int:
        return self.uncached_input + self.cache_read + self.cache_write_5m + self.cache_write_1h

    @property
    def total(self) -> int:
        return self.input_total + self.output


class Price(msgspec.Struct, frozen=True):
    """One row of the price book as chosen at admission."""

    price_id: str
    pico_per_token: int


PriceSet = dict[Component, Price]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One generation as it was admitted; stands in the spool's OPEN record. `id` is the idempotency
    key of its UsageEvent and the engine's request_id."""

    id: str
    """UUIDv7, made by the server, one per attempt."""
    request_id: str
    """What the client saw in x-request-id; several attempts may share it."""
    org: str
    project: str
    key: str
    model: str
    lane: str = "interactive"
    tier: Tier = "default"
    prices: PriceSet
    """Empty for a model without prices: its usage goes to suspense, never lost."""
    admitted_at: float
    """Unix seconds; price, hour and period follow it."""


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A finished attempt. The same id with other content is an alarm, never a silent skip."""

    attempt: Attempt
    quantities: Quantities
    occurred_at: float
    """Unix seconds of the end."""
    kind: Literal["usage", "waste"] = "usage"
    """waste: generated, never delivered; paid by the house."""
    estimated: bool = False
    finish: Literal["done", "disconnect", "error", "recovered"] = "done"

    @property
    def id(self) -> str:
        return self.attempt.id


def stop_waste_id(attempt_id: str) -> str:
    """The id of the event for what an attempt generated behind a stop string."""
    return str(uuid5(NAMESPACE_OID, f"{UUID(attempt_id)}:stop"))
