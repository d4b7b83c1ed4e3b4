"""Price lists: the terms of tenants, over the prices of everybody. Pure.

    [[discount]]
    price_list = "acme"
    percent = "15"                   # off the list price; the rest must be whole pico-USD
    model = "penny"                  # optional, as are tier and component; default: all
    valid_from = "2026-11-01"        # as in a [[price]]; the next one of its scope ends it
    valid_to = "2027-01-01"          # optional

    [[free_allowance]]               # the first units of a period
    price_list = "acme"              # "default": everybody's
    component = "output"
    quantity = 1_000_000
    valid_from = "2026-11-01"

    [[tiered_price]]
    price_list = "acme"
    kind = "graduated"               # or "volume"
    component = "output"             # required: the component that is counted
    steps = [{ up_to = 1_000_000, price = "0.40" }, { price = "0.30" }]     # as in a [[price]]
    valid_from = "2026-11-01"

    [[commitment]]
    price_list = "acme"
    amount = "1000.00"               # USD a period, used or not
    percent = "20"                   # optional: the discount that is granted for it
    valid_from = "2026-11-01"

The most specific of several discounts applies: first one that names the model, then the component,
then the tier. A discount is a price with an id of its own, at which events are booked
(`discounted`). The other terms hold for a whole period, as they are in force when it begins
(`terms_of`), and become lines of its invoice (`adjustments`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from itertools import groupby
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from billing.errors import MoneyError, PriceBookError
from billing.events import Component, Price, Tier
from billing.money import PICO_PER_USD, Pico, basis_points, usd
from billing.pricing.adjustments import (
    Commitment,
    FreeAllowance,
    PeriodTerms,
    Scope,
    Step,
    TieredPrice,
    check_steps,
)
from billing.pricing.entries import (
    DEFAULT_LIST,
    DatedEntry,
    PriceEntry,
    decimal_of,
    moment_text,
    read_pico,
    read_validity,
    starts_of,
    timeline,
)

WHOLE_BPS = 10_000
MAX_QUANTITY = 2**62
MAX_AMOUNT_PICO = 10**15 * PICO_PER_USD
DISCOUNTED = "@"
"""Separates, in the id of a discounted price, the id of the list price from the name of the price
list, which cannot contain it, and the moment."""
ListName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Quantity = Annotated[int, Meta(ge=1, le=MAX_QUANTITY)]


Kind = Literal["discount", "free_allowance", "tiered_price", "commitment"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Rule(DatedEntry, frozen=True, kw_only=True):
    """A term of a price list. At any time, at most one rule of a `slot` is in force."""

    id: str
    slot: str
    price_list: str
    scope: Scope


class Discount(Rule, frozen=True, kw_only=True):
    bps: int
    """Basis points: hundredths of a percent."""

    @property
    def rank(self) -> tuple[bool, ...]:
        """How specific the discount is: the highest rank applies."""
        scope = self.scope
        return tuple(each is not None for each in (scope.model, scope.component, scope.tier))

    def apply_to(self, price: Price) -> int:
        """Return the discounted price in pico-USD. Raises: PriceBookError."""
        pico, rest = divmod(price.pico_per_token * (WHOLE_BPS - self.bps), WHOLE_BPS)
        if rest:
            raise PriceBookError(
                f"{self.where}: {price.price_id} less {Decimal(self.bps) / 100} percent is not a"
                " whole number of pico-USD"
            )
        return pico


class PeriodRule(Rule, frozen=True, kw_only=True):
    content: FreeAllowance | TieredPrice | Commitment


class PriceLists:
    """All rules of all price lists; each open rule ends with the next one of its slot.

    Raises: PriceBookError if two rules of a slot overlap.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        by_slot: dict[str, list[Rule]] = {}
        for rule in rules:
            by_slot.setdefault(rule.slot, []).append(rule)
        self.rules = [rule for slot, found in by_slot.items() for rule in timeline(found, slot)]
        self.names = {DEFAULT_LIST, *(rule.price_list for rule in self.rules)}
        for name in self.names:  # find a mistake when the book is read, not at an invoice
            for start in starts_of(rule for rule in self.rules if rule.price_list == name):
                self.terms_of(name, start)

    def terms_of(self, price_list: str, unix_time: float) -> PeriodTerms:
        """Return the terms of a period that begins at a moment. Raises: PriceBookError."""
        return PeriodTerms.of_rules(
            [
                rule.content
                for rule in self.rules
                if isinstance(rule, PeriodRule)
                and rule.price_list == price_list
                and rule.covers(unix_time)
            ]
        )

    def discounted(self, entries: Iterable[PriceEntry]) -> Iterator[PriceEntry]:
        """Yield the discounted entries of each list. `entries`: those of the default list, each
        with its end. Raises: PriceBookError."""
        by_list: dict[str, list[Discount]] = {}
        for rule in self.rules:
            if isinstance(rule, Discount):
                by_list.setdefault(rule.price_list, []).append(rule)
        for entry in entries:
            for price_list, discounts in by_list.items():
                for component, price in entry.prices.items():
                    yield from _discounted(price_list, entry, component, price, discounts)


_CONTENT: dict[str, type[FreeAllowance | TieredPrice | Commitment]] = {
    "free_allowance": FreeAllowance,
    "tiered_price": TieredPrice,
    "commitment": Commitment,
}


def stored_terms(rows: Iterable[tuple[str, str, Mapping[str, Any]]]) -> PeriodTerms:
    """Return the terms of the stored rules of one list at one moment. `rows`: id, slot and content.
    Raises: PriceBookError."""
    found: list[FreeAllowance | TieredPrice | Commitment] = []
    for rule_id, slot, content in rows:
        _, kind, place = slot.split(":", 2)
        if kind == "discount":
            continue
        parts = (None if part == "*" else part for part in place.rsplit(":", 2))
        scope = dict(zip(("model", "tier", "component"), parts, strict=True))
        found.append(msgspec.convert({**content, "id": rule_id, "scope": scope}, _CONTENT[kind]))
    return PeriodTerms.of_rules(found)


def _discounted(
    price_list: str,
    entry: PriceEntry,
    component: Component,
    price: Price,
    discounts: Sequence[Discount],
) -> Iterator[PriceEntry]:
    """Yield an entry for each span of time in which the same discount applies."""
    scope = Scope(model=entry.model, tier=entry.tier, component=component)
    matching = [each for each in discounts if each.scope.covers(scope)]

    def best(at: float) -> Discount | None:
        in_force = (each for each in matching if each.covers(at))
        return max(in_force, key=lambda each: each.rank, default=None)

    starts = [at for at in starts_of((entry, *matching)) if entry.covers(at)]
    spans = [
        (discount, datetime.fromtimestamp(next(moments), UTC))
        for discount, moments in groupby(starts, key=best)
    ]
    ends = [*(begin for _, begin in spans[1:]), entry.valid_to]
    for (discount, begin), end in zip(spans, ends, strict=True):
        if discount is not None:
            price_id = f"{price.price_id}{DISCOUNTED}{price_list}:{moment_text(begin)}"
            yield msgspec.structs.replace(
                entry,
                price_list=price_list,
                valid_from=begin,
                valid_to=end,
                prices={component: Price(price_id, discount.apply_to(price))},
                where=discount.where,
            )


def undiscounted(price_id: str) -> str | None:
    """Return the id of the list price. None: the price has no discount."""
    list_price_id, found, _ = price_id.rpartition(DISCOUNTED)
    return list_price_id if found else None


class _RuleFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of every rule as TOML has them. Dates and money are parsed later."""

    price_list: ListName
    valid_from: Any = None
    valid_to: Any = None
    model: Annotated[str, Meta(min_length=1)] | None = None
    tier: Tier | None = None
    component: Component | None = None


class _WrittenDiscount(_RuleFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    percent: Any


class _WrittenAllowance(_RuleFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    quantity: Quantity


class _WrittenStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    price: Any
    up_to: Quantity | None = None


class _WrittenTiers(_RuleFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["graduated", "volume"]
    component: Component
    steps: list[_WrittenStep]


class _WrittenCommitment(_RuleFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    amount: Any
    percent: Any = None


_WRITTEN: dict[Kind, type[_RuleFields]] = {
    "discount": _WrittenDiscount,
    "free_allowance": _WrittenAllowance,
    "tiered_price": _WrittenTiers,
    "commitment": _WrittenCommitment,
}
TERM_KEYS = frozenset(name for each in _WRITTEN.values() for name in each.__struct_fields__)
"""The keys of all kinds of tables."""


def read_rules(kind: Kind, table: Mapping[str, Any], where: str) -> Iterator[Rule]:
    """Read a table of a kind; a commitment with a discount yields two rules.

    Raises: PriceBookError.
    """
    try:
        yield from _rules_of(kind, msgspec.convert(table, _WRITTEN[kind]), where)
    except (msgspec.ValidationError, MoneyError) as error:
        raise PriceBookError(f"{where}: {error}") from error


def _rules_of(kind: Kind, written: _RuleFields, where: str) -> Iterator[Rule]:
    dates = {"valid_from": written.valid_from, "valid_to": written.valid_to}
    valid_from, valid_to = read_validity(dates, where)
    scope = Scope(model=written.model, tier=written.tier, component=written.component)

    def common(kind: Kind) -> dict[str, Any]:
        parts = (written.price_list, kind, *msgspec.structs.astuple(scope))
        slot = ":".join(part or "*" for part in parts)
        return {
            "id": f"{slot}:{moment_text(valid_from)}",
            "slot": slot,
            "price_list": written.price_list,
            "scope": scope,
            "valid_from": valid_from,
            "valid_to": valid_to,
            "where": where,
        }

    fields = common(kind)
    match written:
        case _WrittenAllowance(quantity=quantity):
            allowance = FreeAllowance(id=fields["id"], scope=scope, quantity=quantity)
            yield PeriodRule(content=allowance, **fields)
        case _WrittenTiers():
            steps = tuple(
                Step(step.up_to, read_pico(written.component, step.price, f"{where}: steps: price"))
                for step in written.steps
            )
            tiers = TieredPrice(id=fields["id"], scope=scope, kind=written.kind, steps=steps)
            check_steps(tiers)
            yield PeriodRule(content=tiers, **fields)
        case _WrittenCommitment(amount=amount):
            promised = read_amount(amount, f"{where}: amount")
            commitment = Commitment(id=fields["id"], scope=scope, amount_pico=promised)
            yield PeriodRule(content=commitment, **fields)
    percent = getattr(written, "percent", None)
    if percent is not None:
        if written.price_list == DEFAULT_LIST:
            raise PriceBookError(f"{where}: percent: the default list has no discounts")
        bps = read_percent(percent, f"{where}: percent")
        yield Discount(bps=bps, **common("discount"))


def read_amount(value: object, name: str) -> Pico:
    """Read an amount in USD. Raises: PriceBookError, MoneyError."""
    amount = usd(decimal_of(value, name))
    if not 0 < amount <= MAX_AMOUNT_PICO:
        raise PriceBookError(f"{name}: must be more than 0 and at most 10^15 USD")
    return amount


def read_percent(value: object, name: str) -> int:
    """Read a percentage as basis points. Raises: PriceBookError, MoneyError."""
    bps = basis_points(decimal_of(value, name))
    if not 0 < bps <= WHOLE_BPS:
        raise PriceBookError(f"{name}: must be more than 0 and at most 100")
    return bps
