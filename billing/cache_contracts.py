"""Cache contracts decide how much of a prompt is billed as read from the cache and as written to
it. Each model has one. Pure.

    native      reads in blocks of 16 tokens, without a minimum; no writes
    automatic   reads from 1,024 tokens, in steps of 128; no writes
    implicit    reads from 1,024 tokens, to the token; no writes
    explicit    reads what the engine kept for earlier requests with breakpoints (`cache_control`),
                as far as a breakpoint of this request or the 20 content blocks before it reach;
                writes what the engine keeps for the lifetime of a breakpoint

A contract never bills tokens as read that the engine did not reuse, nor tokens as written that it
did not promise to keep. The price book has the prices.

Knows no engine: callers pass what was reused and kept.
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
"""An earlier request's breakpoint counts up to so many content blocks before one of this
request."""
EXPLICIT_PRICES_BPS: dict[Component, int] = {
    "cache_read": 1_000,
    "cache_write_5m": 12_500,
    "cache_write_1h": 20_000,
}
"""Prices under `cache_prices = "explicit"`, in basis points of the price of uncached input."""


class Floor(msgspec.Struct, frozen=True):
    """The rounding down of reads: they are counted from `min_tokens`, in steps of `step`."""

    min_tokens: int
    step: int

    def round_down(self, reused: int) -> int:
        return 0 if reused < self.min_tokens else reused - reused % self.step


FLOORS: dict[ContractName, Floor] = {
    "native": Floor(0, 16),
    "automatic": Floor(1024, 128),
    "implicit": Floor(1024, 1),
    "explicit": Floor(1024, 1),
}


class Breakpoint(msgspec.Struct, frozen=True):
    """A request to keep the first `position` tokens of the prompt."""

    position: int
    ttl: Ttl = "5m"
    since: int = 0
    """The end of the content block MAX_LOOKBACK before this one: tokens that were kept count if
    they reach this far."""


class InputSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The disjoint parts of a prompt, in tokens; they add up to the prompt."""

    uncached: int
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0

    def plus(self, other: InputSplit) -> InputSplit:
        """Return the parts of two prompts together."""
        return InputSplit(
            uncached=self.uncached + other.uncached,
            cache_read=self.cache_read + other.cache_read,
            cache_write_5m=self.cache_write_5m + other.cache_write_5m,
            cache_write_1h=self.cache_write_1h + other.cache_write_1h,
        )


NO_INPUT = InputSplit(uncached=0)


def split_input(contract: ContractName, prompt_tokens: int, reused: int) -> InputSplit:
    """Split the prompt of a request without breakpoints, which reads nothing under an explicit
    contract. `reused`: the length of the prefix that the engine did not compute again."""
    assert 0 <= reused <= prompt_tokens
    read = 0 if contract == "explicit" else FLOORS[contract].round_down(reused)
    return InputSplit(uncached=prompt_tokens - read, cache_read=read)


def split_kept(
    prompt_tokens: int, kept: int, written: Sequence[int], breakpoints: Sequence[Breakpoint]
) -> InputSplit:
    """Split the prompt of a request with breakpoints under an explicit contract. `kept`: the length
    of the prefix that had been kept, up to the last breakpoint. `written`: the tokens that will be
    kept for each of `breakpoints`."""
    read = FLOORS["explicit"].round_down(_within_reach(kept, breakpoints))
    writes = [*zip(written, breakpoints, strict=True)]
    by_ttl = {ttl: sum(num for num, each in writes if each.ttl == ttl) for ttl in TTL_S}
    assert kept + sum(written) <= prompt_tokens
    return InputSplit(
        uncached=prompt_tokens - read - sum(written),
        cache_read=read,
        cache_write_5m=by_ttl["5m"],
        cache_write_1h=by_ttl["1h"],
    )


def _within_reach(kept: int, breakpoints: Sequence[Breakpoint]) -> int:
    """Return the part of `kept` that a breakpoint looks back to, else the position of the last
    breakpoint before its end."""
    if any(each.since <= kept <= each.position for each in breakpoints):
        return kept
    return max((each.position for each in breakpoints if each.position <= kept), default=0)
