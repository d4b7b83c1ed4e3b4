"""Cache contracts decide how much of a prompt is billed as read from the cache and as written to
it. A model chooses one of the contracts that the market has. Pure.

    native      what the engine reused, in blocks of 16; no minimum, nothing to write
    automatic   from 1,024 tokens, in steps of 128; nothing to write
    implicit    from 1,024 tokens, to the token; nothing to write
    explicit    what the engine had kept for earlier requests with breakpoints (`cache_control`), as
                far as a breakpoint of this one or the 20 content blocks before it reach; and what
                it keeps from now on for the lifetime of a breakpoint is written for that

Whatever the contract says, nothing is billed as read that the engine did not reuse: the contract
is a floor under what was really saved, never more. Nor is anything billed as written that it did
not promise to keep. What the components cost says the price book.

Knows no engine: what was reused, had been kept and is kept, it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from billing.events import Component

ContractName = Literal["native", "automatic", "explicit", "implicit"]
CONTRACTS: tuple[ContractName, ...] = get_args(ContractName)
DEFAULT_CONTRACT: ContractName = "native"
Ttl = Literal["5m", "1h"]
TTL_S: dict[Ttl, float] = {"5m": 300.0, "1h": 3600.0}
WRITES: dict[Ttl, Component] = {"5m": "cache_write_5m", "1h": "cache_write_1h"}
MAX_BREAKPOINTS = 4
MAX_LOOKBACK = 20
"""Content blocks before a breakpoint in which an earlier request may have set one."""
EXPLICIT_PRICES_BPS: dict[Component, int] = {
    "cache_read": 1_000,
    "cache_write_5m": 12_500,
    "cache_write_1h": 20_000,
}
"""Of the price of uncached input."""


class Floor(msgspec.Struct, frozen=True):
    """Reads are counted from `min_tokens`, in steps of `step`."""

    min_tokens: int
    step: int

    def of(self, reused: int) -> int:
        return 0 if reused < self.min_tokens else reused - reused % self.step


FLOORS: dict[ContractName, Floor] = {
    "native": Floor(0, 16),
    "automatic": Floor(1024, 128),
    "implicit": Floor(1024, 1),
    "explicit": Floor(1024, 1),
}


class Breakpoint(msgspec.Struct, frozen=True):
    """The first `position` tokens of the prompt are to be kept."""

    position: int
    ttl: Ttl = "5m"
    since: int = 0
    """Where the content block ends that is MAX_LOOKBACK before it: what was kept counts if it
    reaches so far."""


class InputSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Disjoint parts of a prompt, in tokens; their sum is the prompt."""

    uncached: int
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0


def split_input(contract: ContractName, prompt_tokens: int, reused: int) -> InputSplit:
    """`reused`: tokens from the first one on that the engine did not compute again. Of an explicit
    contract: of a request without breakpoints, which has no part in what others had kept."""
    assert 0 <= reused <= prompt_tokens
    read = 0 if contract == "explicit" else FLOORS[contract].of(reused)
    return InputSplit(uncached=prompt_tokens - read, cache_read=read)


def split_kept(
    prompt_tokens: int, kept: int, written: Sequence[int], breakpoints: Sequence[Breakpoint]
) -> InputSplit:
    """Split the prompt of a request under an explicit contract. `kept`: tokens from the first one
    on, up to the last breakpoint, that had been kept. `written`: for each of `breakpoints`, those
    that will be."""
    read = FLOORS["explicit"].of(_within_reach(kept, breakpoints))
    asked = [*zip(written, breakpoints, strict=True)]
    lasting = {ttl: sum(num for num, each in asked if each.ttl == ttl) for ttl in TTL_S}
    assert kept + sum(written) <= prompt_tokens
    return InputSplit(
        uncached=prompt_tokens - read - sum(written),
        cache_read=read,
        cache_write_5m=lasting["5m"],
        cache_write_1h=lasting["1h"],
    )


def _within_reach(kept: int, breakpoints: Sequence[Breakpoint]) -> int:
    """Return the part of `kept` that a breakpoint looks back to, else the position of the last
    breakpoint before its end."""
    if any(each.since <= kept <= each.position for each in breakpoints):
        return kept
    return max((each.position for each in breakpoints if each.position <= kept), default=0)
