"""Quantities are disjoint and every token is priced once or named as unpriced."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.events import CALLS, COMPONENTS, TOKENS, Band, Price, PriceSet, Quantities
from billing.pricing.rating import RatedUsage, price_of, rate
from gateway.fleet.upstream.usage_claim import read_claim
from gateway.inference.metering import to_quantities
from tests.billing.samples import PRICES, an_attempt, quantities

picos = st.integers(0, 2**63 - 1)
bands = st.lists(
    st.builds(Band, st.integers(1, 2**42), st.text(min_size=1), picos), max_size=3
).map(lambda found: tuple(sorted(found, key=lambda band: band.min_total_input)))
price_sets = st.dictionaries(
    st.sampled_from(COMPONENTS), st.builds(Price, st.text(min_size=1), picos, bands)
)


@given(quantities, price_sets)
def test_lines_sum_to_the_total_and_nothing_is_left_out(used: Quantities, prices: PriceSet) -> None:
    rated = rate(used, prices)
    assert rated.amount_pico == sum(line.amount_pico for line in rated.lines)
    assert rated.amount_pico == sum(rated.amount_of(component) for component in COMPONENTS)
    assert all(line.amount_pico >= 0 for line in rated.lines)
    for line in rated.lines:
        price = price_of(line.component, prices)
        assert price is not None and line.quantity == getattr(used, line.component)
        chosen = price.of(used.input_total)
        assert (line.price_id, line.amount_pico) == (
            chosen.price_id,
            line.quantity * chosen.pico_per_token,
        )
    free = {call for call in CALLS if call not in prices}
    named = [line.component for line in rated.lines] + list(rated.unpriced)
    assert sorted(named) == sorted(c for c in COMPONENTS if getattr(used, c) and c not in free)
    assert all(price_of(component, prices) is None for component in rated.unpriced)


@given(quantities)
def test_the_parts_are_disjoint_and_sum_to_the_whole(used: Quantities) -> None:
    assert used.total == sum(getattr(used, component) for component in TOKENS)
    assert used.total == used.input_total + used.output_total
    assert set(TOKENS) | set(CALLS) == set(COMPONENTS) and len(TOKENS) + len(CALLS) == 9


@given(
    prompt=st.integers(1, 2**40),
    cached=st.integers(0, 2**40),
    written=st.integers(0, 2**40),
    completion=st.integers(0, 2**40),
    reasoning=st.integers(0, 2**40),
)
def test_a_vendors_overlapping_counts_become_disjoint_ones(
    prompt: int, cached: int, written: int, completion: int, reasoning: int
) -> None:
    """A vendor's prompt_tokens hold the cached ones, its completion_tokens the reasoning: none is
    counted twice, whatever it says."""
    told = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    metered = read_claim(msgspec.json.encode(told))
    assert metered is not None
    used = to_quantities(metered, an_attempt())
    assert (used.input_total, used.output_total) == (prompt, completion)
    assert used.cache_read == min(prompt, cached)
    assert used.reasoning_output == min(completion, reasoning)
    flat: PriceSet = dict.fromkeys(TOKENS, Price("flat", 7))
    assert rate(used, flat).amount_pico == 7 * (prompt + completion)


def test_a_large_request_is_priced_whole_in_the_band_of_its_input() -> None:
    band = Band(200_001, "m:uncached_input:large", 20)
    prices: PriceSet = {
        "uncached_input": Price("m:uncached_input", 10, (band,)),
        "cache_read": Price("m:cache_read", 1),
        "output": Price("m:output", 100, (Band(200_001, "m:output:large", 150),)),
    }
    small = rate(Quantities(uncached_input=100_000, cache_read=100_000, output=3), prices)
    large = rate(Quantities(uncached_input=100_000, cache_read=100_001, output=3), prices)
    assert small.amount_pico == 100_000 * 10 + 100_000 * 1 + 3 * 100
    assert large.amount_pico == 100_000 * 20 + 100_001 * 1 + 3 * 150
    assert [line.price_id for line in large.lines] == [
        "m:uncached_input:large", "m:cache_read", "m:output:large",
    ]  # fmt: skip
    part = rate(Quantities(output=3), prices, total_input=200_001)
    assert part.amount_pico == 450, "a part of a request is priced by the size of all of it"
    assert prices["output"].dearest_pico(200_000) == 100
    assert prices["output"].dearest_pico(200_001) == 150


def test_reasoning_and_embeddings_cost_what_they_are_part_of_until_they_have_a_price() -> None:
    used = Quantities(reasoning_output=2, embedding_input=3)
    assert rate(used, PRICES).amount_pico == 2 * 400_000 + 3 * 100_000
    dear: PriceSet = {**PRICES, "reasoning_output": Price("r", 5), "embedding_input": Price("e", 7)}
    assert rate(used, dear).amount_pico == 2 * 5 + 3 * 7


def test_a_call_is_free_where_a_priced_model_says_nothing_of_it() -> None:
    used = Quantities(tool_call=2, batch_queue=1)
    assert rate(used, PRICES) == RatedUsage(lines=(), amount_pico=0, unpriced=())
    assert rate(used, {}) == RatedUsage(lines=(), amount_pico=0, unpriced=())
    assert rate(used, {**PRICES, "tool_call": Price("t", 10**10)}).amount_pico == 2 * 10**10


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
