"""What of a prompt is billed as read from the cache and as written to it: the contracts of the
market, chosen per model. Pure.

    native      what the engine reused, in blocks of 16; no minimum, nothing to write
    automatic   from 1,024 tokens, in steps of 128; nothing to write
    implicit    from 1,024 tokens, to the token; nothing to write
    explicit    up to a breakpoint that the request sets (`cache_control`), or one that an earlier
                request set at most 20 content blocks before it; what lies between what was read
                and the last breakpoint of a lifetime is written for that lifetime

Whatever the contract says, nothing is billed as read that the engine did not reuse: the contract
is a floor under what was really saved, never more. What the components cost says the price book.

Above: the gateway's replicas, which count by it; `price_entries` (`EXPLICIT_PRICES_BPS`). Below:
nothing. Knows no engine: how much was reused, and whether what was written is kept, it is told.
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
    lookback: tuple[int, ...] = ()
    """Where the content blocks before it end, in tokens; the last MAX_LOOKBACK of them count."""

    @property
    def candidates(self) -> tuple[int, ...]:
        """Where a prefix of it may have been kept before."""
        return (*sorted(self.lookback)[-MAX_LOOKBACK:], self.position)


class InputSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Of a prompt, disjoint; their sum is the prompt."""

    uncached: int
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0


def split_input(
    contract: ContractName,
    prompt_tokens: int,
    reused: int,
    breakpoints: Sequence[Breakpoint] = (),
) -> InputSplit:
    """`reused`: tokens from the first one on that the engine did not compute again. `breakpoints`:
    of the request, checked (`what_is_wrong`); only an explicit contract looks at them."""
    assert 0 <= reused <= prompt_tokens
    if contract != "explicit":
        read = FLOORS[contract].of(reused)
        return InputSplit(uncached=prompt_tokens - read, cache_read=read)
    floor = FLOORS[contract]
    candidates = (at for each in breakpoints for at in each.candidates if at <= reused)
    read = floor.of(max(candidates, default=0))
    kept = [each for each in breakpoints if each.position >= floor.min_tokens]
    hour = max((each.position for each in kept if each.ttl == "1h"), default=0)
    last = max((each.position for each in kept), default=0)
    written_1h = max(0, hour - read)
    written_5m = max(0, last - read - written_1h)
    return InputSplit(
        uncached=prompt_tokens - read - written_1h - written_5m,
        cache_read=read,
        cache_write_5m=written_5m,
        cache_write_1h=written_1h,
    )


def what_is_wrong(breakpoints: Sequence[Breakpoint], prompt_tokens: int) -> str | None:
    """With the breakpoints of a request, in their order; None: nothing."""
    if len(breakpoints) > MAX_BREAKPOINTS:
        return f"at most {MAX_BREAKPOINTS} breakpoints"
    positions = [each.position for each in breakpoints]
    if positions != sorted(positions) or any(not 0 < at <= prompt_tokens for at in positions):
        return "breakpoints must be in order and within the prompt"
    ttls = [each.ttl for each in breakpoints]
    if ttls != sorted(ttls):  # "1h" < "5m"
        return "breakpoints of 1h must come before those of 5m"
    return None
