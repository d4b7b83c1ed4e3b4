"""Usage events: the quantities of one attempt and the event that bills them. Pure, no I/O. No
struct here can be part of a cycle, so the garbage collector need not look at it (`gc=False`)."""

from __future__ import annotations

from typing import Literal, get_args
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec
from msgspec import UNSET, UnsetType

Component = Literal[
    "uncached_input",
    "cache_read",
    "cache_write_5m",
    "cache_write_1h",
    "output",
    "reasoning_output",
    "embedding_input",
    "tool_call",
    "batch_queue",
]
COMPONENTS: tuple[Component, ...] = get_args(Component)
INPUTS: tuple[Component, ...] = (
    *("uncached_input", "cache_read", "cache_write_5m", "cache_write_1h"),
    "embedding_input",
)
OUTPUTS: tuple[Component, ...] = ("output", "reasoning_output")
TOKENS: tuple[Component, ...] = (*INPUTS, *OUTPUTS)
CALLS: tuple[Component, ...] = ("tool_call", "batch_queue")
"""Counted in calls, not in tokens: tools that were called, and requests that were taken from the
batch queue."""

Tier = Literal["default", "priority", "flex", "batch"]
"""What a request is served as; each may have prices of its own. `batch`: what a batch brings; no
request that waits for its answer is served as that."""
TIERS: tuple[Tier, ...] = get_args(Tier)


class Quantities(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Counts, disjoint: those of tokens sum to prompt + completion."""

    uncached_input: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    output: int = 0
    """Without reasoning."""
    reasoning_output: int = 0
    embedding_input: int = 0
    """What was read to make embeddings of it."""
    tool_call: int = 0
    batch_queue: int = 0

    def __post_init__(self) -> None:
        for component in COMPONENTS:
            assert getattr(self, component) >= 0, f"negative {component}"

    @property
    def prompt_total(self) -> int:
        cached = self.cache_read + self.cache_write_5m + self.cache_write_1h
        return self.uncached_input + cached

    @property
    def input_total(self) -> int:
        return self.prompt_total + self.embedding_input

    @property
    def output_total(self) -> int:
        return self.output + self.reasoning_output

    @property
    def total(self) -> int:
        """Tokens."""
        return self.input_total + self.output_total


class Band(msgspec.Struct, frozen=True, gc=False):
    """The price of a component in requests of at least so much input."""

    min_total_input: int
    price_id: str
    pico_per_token: int


class Price(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One row of the price book as chosen at admission, and those of larger requests: how large one
    is turns out when it has run."""

    price_id: str
    pico_per_token: int
    """Of a component that counts calls: per call."""
    bands: tuple[Band, ...] = ()
    """In order of their least input."""

    def of(self, total_input: int) -> Band:
        """The one by which a request of so much input is priced, whole."""
        for band in reversed(self.bands):
            if total_input >= band.min_total_input:
                return band
        return Band(0, self.price_id, self.pico_per_token)

    def dearest_pico(self, most_input: int) -> int:
        """Per token, whatever the input turns out to be, up to `most_input`."""
        reached = (it.pico_per_token for it in self.bands if it.min_total_input <= most_input)
        return max(self.pico_per_token, *reached, 0)


PriceSet = dict[Component, Price]
Tags = dict[str, str]
"""What a client has its requests counted by (`ledger.tags`)."""
Kind = Literal["usage", "waste"]
"""waste: generated, never delivered; paid by the house."""
Finish = Literal["done", "disconnect", "error", "recovered"]


class Attempt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
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
    price_list: str = "default"
    """By which it is priced."""
    prices: PriceSet
    """Empty for a model without prices: its usage goes to suspense, never lost."""
    admitted_at: float
    """Unix seconds; price, hour and period follow it."""
    tags: Tags | UnsetType = UNSET
    """Of who has none nothing is written."""


class UsageEvent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A finished attempt. The same id with other content is an alarm, never a silent skip."""

    attempt: Attempt
    quantities: Quantities
    occurred_at: float
    """Unix seconds of the end."""
    kind: Kind = "usage"
    estimated: bool = False
    finish: Finish = "done"

    @property
    def id(self) -> str:
        return self.attempt.id


def stop_waste_id(attempt_id: str) -> str:
    """The id of the event for what an attempt generated behind a stop string."""
    return str(uuid5(NAMESPACE_OID, f"{UUID(attempt_id)}:stop"))
