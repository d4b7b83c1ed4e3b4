"""Usage events: the quantities of one attempt and the event that bills them. Pure, no I/O. No
struct here can be part of a cycle, so the garbage collector need not look at it (`gc=False`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args
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
"""A part of a request's usage that may have a price of its own."""


class ComponentKind(NamedTuple):
    """How a component is counted, and the name of its line item in cost reports."""

    counts: Literal["input", "output", "calls"]
    line_item: str

    @property
    def unit(self) -> Literal["tokens", "calls"]:
        return "calls" if self.counts == "calls" else "tokens"


COMPONENT_KINDS: dict[Component, ComponentKind] = {
    "uncached_input": ComponentKind("input", "input_tokens"),
    "cache_read": ComponentKind("input", "cached_input_tokens"),
    "cache_write_5m": ComponentKind("input", "cache_write_5m_tokens"),
    "cache_write_1h": ComponentKind("input", "cache_write_1h_tokens"),
    "output": ComponentKind("output", "output_tokens"),
    "reasoning_output": ComponentKind("output", "reasoning_tokens"),
    "embedding_input": ComponentKind("input", "embedding_tokens"),
    "tool_call": ComponentKind("calls", "tool_calls"),
    "batch_queue": ComponentKind("calls", "batch_queue"),
}
"""All components, in the order of the fields of `Quantities` and of the type `usage_row`."""
COMPONENTS: tuple[Component, ...] = tuple(COMPONENT_KINDS)
INPUTS, OUTPUTS, CALLS = (
    tuple(name for name, kind in COMPONENT_KINDS.items() if kind.counts == counts)
    for counts in ("input", "output", "calls")
)
TOKENS = (*INPUTS, *OUTPUTS)

Tier = Literal["default", "priority", "flex", "batch"]
"""The service tier of a request; each may have its own prices. Only lines of a batch are served as
`batch`."""
TIERS: tuple[Tier, ...] = get_args(Tier)


class Quantities(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Disjoint counts of tokens and calls: the tokens add up to prompt + completion."""

    uncached_input: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    output: int = 0
    """Output tokens without those of reasoning."""
    reasoning_output: int = 0
    embedding_input: int = 0
    """Input tokens of embedding requests."""
    tool_call: int = 0
    batch_queue: int = 0
    """1 for a request that was taken from the batch queue."""

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
        """All tokens; calls are not counted."""
        return self.input_total + self.output_total


class Band(msgspec.Struct, frozen=True, gc=False):
    """The price of a component in requests with at least `min_total_input` input tokens."""

    min_total_input: int
    price_id: str
    pico_per_token: int


class Price(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A price that was chosen at admission, with its size bands: the size of a request is known
    only when it has run."""

    price_id: str
    pico_per_token: int
    """The price per call for a component that counts calls."""
    bands: tuple[Band, ...] = ()
    """Sorted by `min_total_input`."""

    def of(self, total_input: int) -> Band:
        """Return the band that prices a whole request with `total_input` input tokens."""
        for band in reversed(self.bands):
            if total_input >= band.min_total_input:
                return band
        return Band(0, self.price_id, self.pico_per_token)

    def dearest_pico(self, most_input: int) -> int:
        """Return the highest price per token of a request with at most `most_input` input
        tokens."""
        reached = (it.pico_per_token for it in self.bands if it.min_total_input <= most_input)
        return max(self.pico_per_token, *reached, 0)


PriceSet = dict[Component, Price]
Tags = dict[str, str]
"""Labels by which a client has its requests counted (`ledger.tags`)."""
Kind = Literal["usage", "waste"]
"""Waste was generated and never delivered; the house pays for it."""
Finish = Literal["done", "disconnect", "error", "recovered", "failover", "moved"]
"""The end of an attempt. `failover`: its replica was lost, and another attempt went on with what it
had begun; of waste, what that one computed or read again for it. `moved`: it computed the prompt
for another one, which goes on."""


class Attempt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One generation as it was admitted, which the spool's OPEN record holds. `id` is the
    idempotency key of its UsageEvent and the engine's request_id."""

    id: str
    """A UUIDv7 that the server makes for this attempt."""
    request_id: str
    """The client's x-request-id; several attempts may share it."""
    org: str
    project: str
    key: str
    model: str
    lane: str = "interactive"
    tier: Tier = "default"
    price_list: str = "default"
    prices: PriceSet
    """Empty for a model without prices, whose usage is booked in suspense."""
    admitted_at: float
    """Unix seconds; they decide the price, the hour and the billing period."""
    tags: Tags | UnsetType = UNSET
    """Unset without tags, so that they take no room in the spool."""


class DisputedUsage(msgspec.Struct, frozen=True, gc=False):
    """Counts the tokens that an upstream claimed of an attempt beyond what the request can have
    used: nobody is billed for them."""

    upstream: str
    """The replica's name."""
    input_tokens: int
    output_tokens: int


class UsageEvent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A finished attempt. A second event with its id and other content raises an alarm."""

    attempt: Attempt
    quantities: Quantities
    occurred_at: float
    """Unix seconds at which the attempt ended."""
    kind: Kind = "usage"
    estimated: bool = False
    finish: Finish = "done"
    disputed: DisputedUsage | UnsetType = UNSET
    """Unset where the upstream claimed nothing more, so that it takes no room in the spool."""

    @property
    def id(self) -> str:
        return self.attempt.id


def as_waste(events: Sequence[UsageEvent]) -> list[UsageEvent]:
    """Return as the house's waste what was used for an answer that nobody gets."""
    return [msgspec.structs.replace(each, kind="waste", finish="error") for each in events]


def stop_waste_id(attempt_id: str) -> str:
    """Return the id of the event for the tokens that an attempt generated behind a stop string."""
    return str(uuid5(NAMESPACE_OID, f"{UUID(attempt_id)}:stop"))


def failover_waste_id(attempt_id: str) -> str:
    """Return the id of the event for what an attempt computed again to go on with another one's."""
    return str(uuid5(NAMESPACE_OID, f"{UUID(attempt_id)}:failover"))
