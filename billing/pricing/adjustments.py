"""Adjust a whole period by a tenant's terms: free allowances, graduated and volume prices,
committed use. Pure integer arithmetic over what the rollups say; nothing is known of time.

The ledger books each event when it is admitted, at the price of that moment (list, less the
tenant's discount). What depends on the quantity of the whole period cannot be known then, and is
not guessed: when the period is invoiced, `adjustments` says what has to be added to what was
booked. Booked plus adjustments is what is due.

    1. Free allowance   the first `quantity` units of its lines cost nothing: what was booked for
                        them is given back. Lines are taken in the order in which they are given,
                        so give them in the order of time. Of a line that is free in part, the part
                        is of the line's average price, rounded down to a pico-USD: exact where
                        all of the line had one price. `divided` says where lines are too coarse
                        for that. Nothing else depends on the order.
    2. Tiered price     what is left of its lines costs what the steps say instead: graduated, each
                        unit at the price of the step that it falls into; volume, all of them at
                        the price of the step that the whole quantity falls into. `up_to` belongs
                        to its step.
    3. Commitment       where what its lines cost in the end is less than what was promised, the
                        shortfall is due. The rate that was granted for the promise is a discount
                        of the price list, booked with each event.
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
    """The usage that a rule is about; None: any."""

    model: str | None = None
    tier: Tier | None = None
    component: Component | None = None

    def overlaps(self, other: Scope) -> bool:
        return all(mine in (None, its) or its is None for mine, its in _pairs(self, other))

    def covers(self, other: Scope | UsageLine) -> bool:
        place = (other.model, other.tier, other.component)
        mine = (self.model, self.tier, self.component)
        return all(one in (None, its) for one, its in zip(mine, place, strict=True))


def _pairs(one: Scope, other: Scope) -> Iterable[tuple[str | None, str | None]]:
    return zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """Usage and money booked of one component; as fine (an hour) or as coarse (a period) as the
    caller likes."""

    model: str
    tier: str
    component: str
    quantity: int
    amount_pico: Pico


class LineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Lines that are in no order among themselves, where it is `divisible`: into finer ones."""

    lines: tuple[UsageLine, ...]
    divisible: bool


class FreeAllowance(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    scope: Scope
    quantity: int


class Step(msgspec.Struct, frozen=True):
    """Up to and with the `up_to`th unit; None: all further ones."""

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
    """So much is due for its lines in any case."""

    id: str
    scope: Scope
    amount_pico: Pico


class PeriodTerms(msgspec.Struct, frozen=True, kw_only=True):
    """All rules of one price list in one period.

    Raises: PriceBookError where two rules would price the same usage, or a commitment would count
    a part of a tiered price.
    """

    allowances: tuple[FreeAllowance, ...] = ()
    tiered: tuple[TieredPrice, ...] = ()
    commitments: tuple[Commitment, ...] = ()

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
    """To be added to what was booked; negative: given back."""

    kind: Kind
    rule_id: str
    scope: Scope
    quantity: int
    """Units that it is about; 0 for a shortfall."""
    amount_pico: Pico


def _refuse_overlaps(rules: Sequence[TieredPrice | Commitment]) -> None:
    for one, other in combinations(rules, 2):
        if one.scope.overlaps(other.scope):
            raise PriceBookError(f"{one.id} and {other.id} price the same usage")


def check_steps(rule: TieredPrice) -> None:
    """Raises: PriceBookError."""
    ends = [step.up_to for step in rule.steps]
    if not 0 < len(ends) <= MAX_STEPS or ends[-1] is not None:
        raise PriceBookError(f"{rule.id}: 1 to {MAX_STEPS} steps, the last one without up_to")
    bounds = [0, *(end for end in ends[:-1] if end is not None)]
    if len(bounds) != len(ends) or any(b <= a for a, b in zip(bounds, bounds[1:], strict=False)):
        raise PriceBookError(f"{rule.id}: each step but the last needs a larger up_to")
    if any(step.pico_per_unit < 0 for step in rule.steps):
        raise PriceBookError(f"{rule.id}: a step has a negative price")


def graduated_pico(steps: Sequence[Step], quantity: int) -> Pico:
    """Each unit at the price of its own step."""
    amount, begun = 0, 0
    for step in steps:
        end = quantity if step.up_to is None else min(quantity, step.up_to)
        amount += max(0, end - begun) * step.pico_per_unit
        begun = max(begun, end)
    return amount


def volume_pico(steps: Sequence[Step], quantity: int) -> Pico:
    """All units at the price of the step that `quantity` falls into."""
    for step in steps:
        if step.up_to is None or quantity <= step.up_to:
            return quantity * step.pico_per_unit
    raise AssertionError("the last step has no end")


def adjustments(terms: PeriodTerms, lines: Iterable[UsageLine]) -> list[Adjustment]:
    """One for each rule that changes what is due, in the order of the rules. `lines`: all that was
    booked for the tenant in the period, in the order of time."""
    left = list(lines)
    found = [_make_free(allowance, left) for allowance in terms.allowances]
    found += [_reprice(rule, left) for rule in terms.tiered]
    found += [_fill_up(commitment, terms, left) for commitment in terms.commitments]
    return [each for each in found if each.amount_pico]


def divided(terms: PeriodTerms, spans: Sequence[LineGroup]) -> int | None:
    """The first that an allowance ends in and that is too coarse to say with which unit.

    `spans`: in the order of time.
    """
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
    """Takes what is free out of `left`."""
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
