"""A whole period is rated unit by unit where a simple count can say what it costs, and at each
boundary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import PriceBookError
from billing.events import Component
from billing.pricing.adjustments import (
    Adjustment,
    Commitment,
    FreeAllowance,
    PeriodTerms,
    Scope,
    Step,
    TieredPrice,
    UsageLine,
    adjustments,
)

OUTPUT = Scope(component="output")
prices = st.integers(0, 2**40)


def line(quantity: int, pico: int, component: Component = "output", model: str = "m") -> UsageLine:
    return UsageLine(
        model=model,
        tier="default",
        component=component,
        quantity=quantity,
        amount_pico=quantity * pico,
    )


def due(terms: PeriodTerms, *lines: UsageLine) -> int:
    booked = sum(each.amount_pico for each in lines)
    return booked + sum(each.amount_pico for each in adjustments(terms, lines))


def free(quantity: int, scope: Scope = OUTPUT) -> FreeAllowance:
    return FreeAllowance(id="free", scope=scope, quantity=quantity)


@st.composite
def step_lists(draw: st.DrawFn) -> tuple[Step, ...]:
    ends = sorted(draw(st.sets(st.integers(1, 60), max_size=4)))
    return (*(Step(end, draw(prices)) for end in ends), Step(None, draw(prices)))


def price_of_unit(steps: tuple[Step, ...], number: int) -> int:
    """The oracle: of the `number`th unit, from 1."""
    return next(s.pico_per_unit for s in steps if s.up_to is None or number <= s.up_to)


@given(st.lists(st.tuples(st.integers(0, 30), prices), max_size=5), st.integers(0, 90))
def test_the_first_units_of_the_period_are_free_and_no_others(
    used: list[tuple[int, int]], quantity: int
) -> None:
    units = [pico for count, pico in used for _ in range(count)]
    terms = PeriodTerms(allowances=(free(quantity),))
    other = line(7, 11, "uncached_input")
    assert due(terms, *(line(*each) for each in used), other) == sum(units[quantity:]) + 77


@given(step_lists(), st.integers(0, 90), st.integers(0, 40), prices)
def test_tiers_price_each_unit_or_all_of_them_after_what_is_free(
    steps: tuple[Step, ...], quantity: int, allowance: int, booked_at: int
) -> None:
    paid = max(0, quantity - allowance)
    graduated = TieredPrice(id="g", scope=OUTPUT, kind="graduated", steps=steps)
    volume = TieredPrice(id="v", scope=OUTPUT, kind="volume", steps=steps)
    expected = sum(price_of_unit(steps, number + 1) for number in range(paid))
    for tiered, cost in ((graduated, expected), (volume, paid * price_of_unit(steps, paid))):
        terms = PeriodTerms(allowances=(free(allowance),), tiered=(tiered,))
        assert due(terms, line(quantity, booked_at)) == cost


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**60)), max_size=6),
    st.integers(0, 2**42),
    step_lists(),
    prices,
)
def test_nobody_is_paid_for_using_and_a_commitment_is_a_floor(
    used: list[tuple[int, int]], allowance: int, steps: tuple[Step, ...], committed: int
) -> None:
    """Also where a line had several prices, so that its average is no whole pico."""
    lines = [mixed_line(quantity, amount if quantity else 0) for quantity, amount in used]
    alone = PeriodTerms(allowances=(free(allowance),))
    assert 0 <= due(alone, *lines) <= sum(each.amount_pico for each in lines)
    if sum(each.quantity for each in lines) <= allowance:
        assert due(alone, *lines) == 0
    tiered = TieredPrice(id="g", scope=OUTPUT, kind="graduated", steps=steps)
    promise = Commitment(id="c", scope=Scope(), amount_pico=committed)
    without = PeriodTerms(allowances=(free(allowance),), tiered=(tiered,))
    terms = PeriodTerms(allowances=(free(allowance),), tiered=(tiered,), commitments=(promise,))
    assert due(terms, *lines) == max(committed, due(without, *lines))


def mixed_line(quantity: int, amount_pico: int) -> UsageLine:
    return UsageLine(
        model="m", tier="default", component="output", quantity=quantity, amount_pico=amount_pico
    )


def test_what_is_given_back_and_asked_for_says_for_what() -> None:
    terms = PeriodTerms(
        allowances=(free(1_000_000),),
        commitments=(Commitment(id="c", scope=Scope(model="m"), amount_pico=5_000_000_000_000),),
    )
    lines = [line(1_500_000, 400_000), line(9, 9, model="another")]
    assert adjustments(terms, lines) == [
        Adjustment(
            kind="free_allowance", rule_id="free", scope=OUTPUT, quantity=1_000_000,
            amount_pico=-400_000_000_000,
        ),
        Adjustment(
            kind="shortfall", rule_id="c", scope=Scope(model="m"), quantity=0,
            amount_pico=5_000_000_000_000 - 500_000 * 400_000,
        ),
    ]  # fmt: skip
    assert adjustments(PeriodTerms(), lines) == []


def tiers(rule_id: str, *steps: Step, scope: Scope = OUTPUT) -> TieredPrice:
    return TieredPrice(id=rule_id, scope=scope, kind="volume", steps=steps)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([tiers("a")], "a: 1 to 32 steps"),
        ([tiers("a", Step(1, 1))], "the last one without up_to"),
        ([tiers("a", Step(None, 1), Step(None, 1))], "a larger up_to"),
        ([tiers("a", Step(5, 1), Step(5, 1), Step(None, 1))], "a larger up_to"),
        ([tiers("a", Step(0, 1), Step(None, 1))], "a larger up_to"),
        ([tiers("a", Step(None, -1))], "negative price"),
        (
            [tiers("a", Step(None, 1)), tiers("b", Step(None, 1), scope=Scope(model="m"))],
            "a and b price the same usage",
        ),
    ],
)
def test_tiers_that_mean_nothing_are_refused(rules: list[TieredPrice], message: str) -> None:
    with pytest.raises(PriceBookError, match=message):
        PeriodTerms(tiered=tuple(rules))


def test_a_commitment_counts_a_tiered_price_whole_or_not_at_all() -> None:
    promise = Commitment(id="c", scope=Scope(model="m"), amount_pico=1)
    apart = tiers("a", Step(None, 1), scope=Scope(model="x"))
    PeriodTerms(tiered=(apart,), commitments=(promise,))
    with pytest.raises(PriceBookError, match="c counts a part of b"):
        PeriodTerms(tiered=(tiers("b", Step(None, 1)),), commitments=(promise,))
