"""Adjust a whole period by a tenant's terms: free allowances, graduated and volume prices,
committed use. Pure integer arithmetic over sums of usage; it knows no time.

The ledger books each event at the price of its admission (the list price less the tenant's
discount). Terms that depend on the quantity of the whole period are applied when it is invoiced:
`adjustments` returns the amounts to add. Booked plus adjustments is due.

    1. Free allowance   The first `quantity` units of its lines are free; their booked amount is
                        given back. Lines count in the given order, which should be that of time.
                        A line that is free in part gives back its average price, rounded down to
                        a pico-USD: exact if the whole line had one price. `divided` finds lines
                        that are too coarse for that. Nothing else depends on the order.
    2. Tiered price     The rest of its lines costs the prices of the steps instead: graduated,
                        each unit at the price of its own step; volume, all units at the price of
                        the step that the whole quantity falls into. `up_to` belongs to its step.
    3. Commitment       If its lines cost less than the promised amount, the shortfall is due. The
                        rate that is granted for the promise is a discount of the price list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Literal

import msgspec

from billing.errors import PriceBookError
from billing.events import Component, Tier
from billing.money import Pico

Kind = Literal["free_allowance", "graduated", "volume", "shortfall"]
MAX_STEPS = 32


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The usage that a rule applies to. None: any."""

    model: str | None = None
    tier: Tier | None = None
    component: Component | None = None

    def overlaps(self, other: Scope) -> bool:
        return all(mine in (None, its) or its is None for mine, its in self._pairs(other))

    def covers(self, other: Scope | UsageLine) -> bool:
        return all(mine in (None, its) for mine, its in self._pairs(other))

    def _pairs(self, other: Scope | UsageLine) -> Iterable[tuple[str | None, str | None]]:
        yield self.model, other.model
        yield self.tier, other.tier
        yield self.component, other.component


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """The booked usage and amount of one component, over any span of time."""

    model: str
    tier: str
    component: str
    quantity: int
    amount_pico: Pico


class LineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one span of time, in no order among themselves."""

    lines: tuple[UsageLine, ...]
    divisible: bool
    """True if the span can be read in shorter spans."""


class FreeAllowance(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    scope: Scope
    quantity: int


class Step(msgspec.Struct, frozen=True):
    """The price of the units up to and including the `up_to`th. None: of all further units."""

    up_to: int | None
    pico_per_unit: Pico


class TieredPrice(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    scope: Scope
    kind: Literal["graduated", "volume"]
    steps: tuple[Step, ...]

    def amount_of(self, quantity: int) -> Pico:
        if self.kind == "graduated":
            return graduated_pico(self.steps, quantity)
        return volume_pico(self.steps, quantity)


class Commitment(msgspec.Struct, frozen=True, kw_only=True):
    """The least amount that is due for the lines of a scope."""

    id: str
    scope: Scope
    amount_pico: Pico


class PeriodTerms(msgspec.Struct, frozen=True, kw_only=True):
    """All rules of one price list in one period.

    Raises: PriceBookError if two rules price the same usage, or a commitment counts a part of a
    tiered price.
    """

    allowances: tuple[FreeAllowance, ...] = ()
    tiered: tuple[TieredPrice, ...] = ()
    commitments: tuple[Commitment, ...] = ()

    @classmethod
    def of_rules(cls, rules: Sequence[FreeAllowance | TieredPrice | Commitment]) -> PeriodTerms:
        """Group rules by their kind. Raises: PriceBookError."""
        return cls(
            allowances=tuple(it for it in rules if isinstance(it, FreeAllowance)),
            tiered=tuple(it for it in rules if isinstance(it, TieredPrice)),
            commitments=tuple(it for it in rules if isinstance(it, Commitment)),
        )

    def __post_init__(self) -> None:
        for rule in self.tiered:
            check_steps(rule)
        _refuse_overlaps(self.tiered)
        _refuse_overlaps(self.commitments)
        for commitment in self.commitments:
            for rule in self.tiered:
                inside = commitment.scope.covers(rule.scope)
                if not inside and commitment.scope.overlaps(rule.scope):
                    raise PriceBookError(f"{commitment.id} counts a part of {rule.id}")


class Adjustment(msgspec.Struct, frozen=True, kw_only=True):
    """An amount to add to what was booked; a negative one is given back."""

    kind: Kind
    rule_id: str
    scope: Scope
    quantity: int
    """The units that are adjusted; 0 for a shortfall."""
    amount_pico: Pico


def _refuse_overlaps(rules: Sequence[TieredPrice | Commitment]) -> None:
    for one, other in combinations(rules, 2):
        if one.scope.overlaps(other.scope):
            raise PriceBookError(f"{one.id} and {other.id} price the same usage")


def check_steps(rule: TieredPrice) -> None:
    """Check that the steps are in order and complete. Raises: PriceBookError."""
    ends = [step.up_to for step in rule.steps]
    if not 0 < len(ends) <= MAX_STEPS or ends[-1] is not None:
        raise PriceBookError(f"{rule.id}: 1 to {MAX_STEPS} steps, the last one without up_to")
    bounds = [0, *(end for end in ends[:-1] if end is not None)]
    if len(bounds) != len(ends) or any(b <= a for a, b in zip(bounds, bounds[1:], strict=False)):
        raise PriceBookError(f"{rule.id}: each step but the last needs a larger up_to")
    if any(step.pico_per_unit < 0 for step in rule.steps):
        raise PriceBookError(f"{rule.id}: a step has a negative price")


def graduated_pico(steps: Sequence[Step], quantity: int) -> Pico:
    """Price each unit at the price of its own step."""
    amount, begun = 0, 0
    for step in steps:
        end = quantity if step.up_to is None else min(quantity, step.up_to)
        amount += max(0, end - begun) * step.pico_per_unit
        begun = max(begun, end)
    return amount


def volume_pico(steps: Sequence[Step], quantity: int) -> Pico:
    """Price all units at the price of the step that `quantity` falls into."""
    for step in steps:
        if step.up_to is None or quantity <= step.up_to:
            return quantity * step.pico_per_unit
    raise AssertionError("the last step has no end")


def adjustments(terms: PeriodTerms, lines: Iterable[UsageLine]) -> list[Adjustment]:
    """Return an adjustment for each rule that changes the amount due, in the order of the rules.
    `lines`: everything that was booked for the tenant in the period, in the order of time."""
    left = list(lines)
    found = [_make_free(allowance, left) for allowance in terms.allowances]
    found += [_reprice(rule, left) for rule in terms.tiered]
    found += [_fill_up(commitment, terms, left) for commitment in terms.commitments]
    return [each for each in found if each.amount_pico]


def divided(terms: PeriodTerms, spans: Sequence[LineGroup]) -> int | None:
    """Return the position of the first divisible span in which an allowance ends. None: no span
    has to be divided. `spans`: in the order of time."""
    left = [list(span.lines) for span in spans]
    for allowance in terms.allowances:
        free = allowance.quantity
        for position, (span, lines) in enumerate(zip(spans, left, strict=True)):
            if span.divisible and free < sum(_covered(allowance.scope, lines)):
                return position
            rest = msgspec.structs.replace(allowance, quantity=free)
            free -= _make_free(rest, lines).quantity
            if not free:
                break
    return None


def _covered(scope: Scope, lines: Iterable[UsageLine]) -> Iterator[int]:
    return (line.quantity for line in lines if scope.covers(line))


def _make_free(allowance: FreeAllowance, left: list[UsageLine]) -> Adjustment:
    """Take the free units out of `left`, and return the adjustment for them."""
    free, amount = allowance.quantity, 0
    for position, line in enumerate(left):
        if not line.quantity or not allowance.scope.covers(line):
            continue
        taken = min(free, line.quantity)
        part = line.amount_pico * taken // line.quantity
        left[position] = msgspec.structs.replace(
            line, quantity=line.quantity - taken, amount_pico=line.amount_pico - part
        )
        free, amount = free - taken, amount + part
    return Adjustment(
        kind="free_allowance",
        rule_id=allowance.id,
        scope=allowance.scope,
        quantity=allowance.quantity - free,
        amount_pico=-amount,
    )


def _reprice(rule: TieredPrice, left: Sequence[UsageLine]) -> Adjustment:
    quantity, booked = _sum(rule.scope, left)
    return Adjustment(
        kind=rule.kind,
        rule_id=rule.id,
        scope=rule.scope,
        quantity=quantity,
        amount_pico=rule.amount_of(quantity) - booked,
    )


def _fill_up(commitment: Commitment, terms: PeriodTerms, left: Sequence[UsageLine]) -> Adjustment:
    _, cost = _sum(commitment.scope, left)
    for rule in terms.tiered:
        if commitment.scope.covers(rule.scope):
            cost += _reprice(rule, left).amount_pico
    return Adjustment(
        kind="shortfall",
        rule_id=commitment.id,
        scope=commitment.scope,
        quantity=0,
        amount_pico=max(0, commitment.amount_pico - cost),
    )


def _sum(scope: Scope, lines: Sequence[UsageLine]) -> tuple[int, Pico]:
    covered = [line for line in lines if scope.covers(line)]
    return sum(line.quantity for line in covered), sum(line.amount_pico for line in covered)
