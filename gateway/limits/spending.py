"""Says what hard caps on spending mean for one request: which counters it must fit in, and how much
of each it holds. Pure.

Counters are nano-USD, rounded up; periods are days and months of UTC, and follow the admission.

Held is the worst case: the whole input at the dearest price of any input, and all that may be
written at the dearest of any output, in whichever size band the request may end up. Our engine
reads and writes no token more. An upstream counts by itself: of its input a bound is held, never
the estimate, it is always told what was held of its output (`fleet.upstream.bounds`), and what it
claims beyond is not billed (`fleet.upstream.usage_claim`). Settled is what it cost by the same
prices, so never more than was held. A component that the price book leaves out costs nothing until
it is priced; the input and the output must have a price, or nobody could bound what a request costs
(`UnpricedModel`); the input alone, if nothing may be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from billing.events import INPUTS, OUTPUTS, Component, PriceSet
from gateway.principal import CapPeriod, CapScope, Principal, SpendCap

PICO_PER_NANO = 1000
MAX_NANO = 2**53 - 1
"""Up to which Lua counts exactly; no cap is larger (`tenancy.spend_caps`)."""
MAX_PICO_PER_TOKEN = 10**12
"""A dollar; `admit.lua` does not say how many tokens of dearer ones fit."""
KEPT = timedelta(days=2)
"""A counter outlives its period by so much: requests end later than they begin."""
SCOPES: tuple[CapScope, ...] = ("key", "project", "org")
PERIODS: tuple[CapPeriod, ...] = ("day", "month", "total")


class UnpricedModel(Exception):
    """Says that a model has no price, and what may be spent is capped: nobody could bound what it
    costs."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class Counter(msgspec.Struct, frozen=True):
    """The counter of what one owner spends in one period, `start` to `end` (None: from ever, for
    ever)."""

    scope: CapScope
    owner_id: str
    period: CapPeriod
    start: datetime | None
    end: datetime | None

    def key(self, org_id: str) -> str:
        begun = "" if self.start is None else f":{self.start:%Y-%m-%d}"
        tag = f"tollgate:{{{org_id}}}:spent"
        return f"{tag}:{self.scope}:{self.owner_id}:{self.period}{begun}"

    @property
    def kept_until_ms(self) -> int:
        """Return until when the counter is kept. 0: for ever."""
        return 0 if self.end is None else int((self.end + KEPT).timestamp() * 1000)


class Cap(msgspec.Struct, frozen=True):
    counter: Counter
    amount_nano: int
    is_funded: bool = False
    """And no more than is leased of the org's balance (`funding`)."""


class SpendReservation(msgspec.Struct, frozen=True, kw_only=True):
    """The most that one request may cost, and the caps that it must fit under."""

    caps: tuple[Cap, ...]
    input_pico: int
    """The highest price of an input token."""
    output_pico: int
    hold_nano: int
    input_nano: int
    """The input's part of `hold_nano`, including a batch's queueing cost."""
    min_output_tokens: int
    """The fewest that are worth running it for, where nobody said how many; 0: as many as were
    asked for, or none."""
    model: str
    """The model, since a part of a balance may be restricted to it."""
    share: int = 1_000_000
    """The part of each cap that is for this cell, as `CounterCap` has it."""

    def cost_nano(self, input_tokens: int, output_tokens: int) -> int:
        """Return the cost at most; exact is only the bill."""
        return to_nano(input_tokens * self.input_pico + output_tokens * self.output_pico)

    def most_nano(self, max_output_tokens: int) -> int:
        """Return the most that what was admitted costs, if it may write so much."""
        return self.input_nano + self.cost_nano(0, max_output_tokens)

    @property
    def funded(self) -> Cap | None:
        return next((cap for cap in self.caps if cap.is_funded), None)

    def exceeded(self, left_nano: Sequence[int], amounts_nano: Sequence[int]) -> list[Cap]:
        """The caps that have not left what it holds at least, were they all funded.
        `amounts_nano`: each as far as it is; `left_nano`: of that."""
        written_nano = self.cost_nano(0, self.min_output_tokens)
        least = min(self.hold_nano, self.input_nano + written_nano)
        least_nano = least if self.min_output_tokens else self.hold_nano
        found = zip(self.caps, left_nano, amounts_nano, strict=True)
        return [cap for cap, left, amount in found if cap.amount_nano - amount + left < least_nano]

    def to_script(self, *, is_final: bool) -> tuple[list[Any], list[Any]]:
        """Return what is capped, and what is to be held of it, as `admit.lua` reads them.
        `is_final`: no more will be leased for it."""
        caps = [(cap.amount_nano, int(cap.is_funded), self.share) for cap in self.caps]
        held = [self.hold_nano, self.input_nano, self.output_pico, self.min_output_tokens]
        return caps, [*held, self.model, int(is_final)]


def to_nano(pico: int) -> int:
    """Convert pico-USD to nano-USD, rounded up."""
    return -(-pico // PICO_PER_NANO)


def counter_of(scope: CapScope, owner_id: str, period: CapPeriod, admitted_at: float) -> Counter:
    """Return the counter of a scope's owner in a period. `admitted_at`: Unix seconds."""
    if period == "total":
        return Counter(scope, owner_id, period, None, None)
    day = datetime.fromtimestamp(admitted_at, UTC).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    if period == "day":
        return Counter(scope, owner_id, period, day, day + timedelta(days=1))
    first = day.replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return Counter(scope, owner_id, period, first, following)


def counters_of(
    *, org_id: str, project_id: str, key_id: str, admitted_at: float
) -> tuple[Counter, ...]:
    """Return all counters that a request of these could be counted in."""
    owners: dict[CapScope, str] = {"key": key_id, "project": project_id, "org": org_id}
    return tuple(
        counter_of(scope, owners[scope], period, admitted_at)
        for scope in SCOPES
        for period in PERIODS
    )


def caps_of(caps: Iterable[SpendCap], admitted_at: float) -> tuple[Cap, ...]:
    """Return the tightest cap of each counter."""
    least: dict[Counter, Cap] = {}
    for cap in caps:
        counter = counter_of(cap.scope, cap.owner_id, cap.period, admitted_at)
        known = least.get(counter, Cap(counter, MAX_NANO))
        amount = min(cap.amount_nano, known.amount_nano)
        least[counter] = Cap(counter, amount, cap.is_funded or known.is_funded)
    return tuple(least.values())


def dearest_pico(prices: PriceSet, components: Iterable[Component], most_input: int) -> int:
    """Return the highest price of a token of any of them, in a request of at most so much input."""
    found = (prices[component] for component in components if component in prices)
    return max(price.dearest_pico(most_input) for price in found)


def spending_of(
    principal: Principal,
    model: str,
    prices: PriceSet,
    *,
    input_tokens: int,
    max_output_tokens: int,
    min_output_tokens: int,
    admitted_at: float,
    num_tool_calls: int = 0,
) -> SpendReservation | None:
    """Return what a request may spend under the caps that bind it. None: no cap binds it.
    `num_tool_calls`: it is nothing but these. Raises: UnpricedModel."""
    caps = caps_of(principal.spend_caps, admitted_at)
    if not caps:
        return None
    if num_tool_calls:
        return spending_of_calls(caps, model, prices, num_tool_calls)
    if "uncached_input" not in prices or ("output" not in prices and max_output_tokens):
        raise UnpricedModel(model)
    input_pico = dearest_pico(prices, INPUTS, input_tokens)
    output_pico = dearest_pico(prices, OUTPUTS, input_tokens)
    queue = prices.get("batch_queue")
    input_total = input_tokens * input_pico + (queue.dearest_pico(input_tokens) if queue else 0)
    return SpendReservation(
        caps=caps,
        model=model,
        input_pico=input_pico,
        output_pico=output_pico,
        hold_nano=min(MAX_NANO, to_nano(input_total + max_output_tokens * output_pico)),
        input_nano=min(MAX_NANO, to_nano(input_total)),
        min_output_tokens=min_output_tokens if output_pico <= MAX_PICO_PER_TOKEN else 0,
    )


def spending_of_calls(
    caps: tuple[Cap, ...], model: str, prices: PriceSet, num_tool_calls: int
) -> SpendReservation:
    """Return the spending of tool calls, whose cost is known; without a price they are free."""
    price = prices.get("tool_call")
    total = 0 if price is None else num_tool_calls * price.dearest_pico(0)
    hold = min(MAX_NANO, to_nano(total))
    return SpendReservation(
        caps=caps,
        model=model,
        input_pico=0,
        output_pico=0,
        hold_nano=hold,
        input_nano=hold,
        min_output_tokens=0,
    )


def counter_keys(org_id: str, caps: Sequence[Cap]) -> list[str]:
    return [cap.counter.key(org_id) for cap in caps]
