"""Quantities are disjoint and every token is priced once or named as unpriced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.events import COMPONENTS, Price, Quantities
from billing.rating import rate

from .samples import PRICES, quantities

price_sets = st.dictionaries(
    st.sampled_from(COMPONENTS), st.builds(Price, st.text(min_size=1), st.integers(0, 2**63 - 1))
)


@given(quantities, price_sets)
def test_lines_sum_to_the_total_and_nothing_is_left_out(used: Quantities, prices: dict) -> None:
    rated = rate(used, prices)
    assert rated.amount_pico == sum(line.amount_pico for line in rated.lines)
    assert rated.amount_pico == sum(rated.amount_of(component) for component in COMPONENTS)
    for line in rated.lines:
        assert line.quantity == getattr(used, line.component)
        assert line.amount_pico == line.quantity * prices[line.component].pico_per_token
    named = [line.component for line in rated.lines] + list(rated.unpriced)
    assert sorted(named) == sorted(c for c in COMPONENTS if getattr(used, c))
    assert all(component not in prices for component in rated.unpriced)


@given(quantities)
def test_the_parts_sum_to_the_whole(used: Quantities) -> None:
    assert used.total == sum(getattr(used, component) for component in COMPONENTS)
    assert used.total == used.input_total + used.output


def test_a_cached_token_costs_the_difference_less() -> None:
    cold = rate(Quantities(uncached_input=1000, output=5), PRICES)
    warm = rate(Quantities(uncached_input=40, cache_read=960, output=5), PRICES)
    assert cold.amount_pico - warm.amount_pico == 960 * (100_000 - 10_000)


def test_what_has_no_price_is_named() -> None:
    rated = rate(Quantities(cache_write_1h=3, output=2), PRICES)
    assert (rated.amount_pico, rated.unpriced) == (800_000, ("cache_write_1h",))


def test_negative_counts_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="negative output"):
        Quantities(output=-1)
