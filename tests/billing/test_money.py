"""Money goes in and comes out exactly, or is refused by name."""

from __future__ import annotations

from decimal import Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import MoneyError
from billing.money import PICO_PER_USD, format_usd, per_million, to_decimal, usd

picos = st.integers(-(10**38), 10**38)


def test_a_dollar_is_a_million_million_pico() -> None:
    assert (
        usd("1")
        == usd(1)
        == usd(Decimal("1.000"))
        == usd("1.0000000000000")
        == PICO_PER_USD
        == 10**12
    )


@pytest.mark.parametrize(
    ("price", "pico"),
    [("0.15", 150_000), ("0.000001", 1), ("15", 15_000_000), ("0", 0), ("1e1", 10_000_000)],
)
def test_usd_per_million_tokens_is_pico_per_token(price: str, pico: int) -> None:
    assert per_million(price, "output") == pico


@pytest.mark.parametrize(
    "price", ["0.0000001", "-1", "nan", "inf", "a lot", "", "1e50", "1" * 60, "0." + "1" * 60]
)
def test_a_price_that_is_not_whole_is_refused_by_name(price: str) -> None:
    with pytest.raises(MoneyError, match=r"^penny\.output: "):
        per_million(price, "penny.output")


@given(picos)
def test_pico_to_usd_and_back_is_exact(pico: int) -> None:
    with localcontext(prec=3):  # the context's precision must not matter
        assert usd(to_decimal(pico)) == usd(format_usd(pico)) == pico
    assert "e" not in format_usd(pico).lower()


@given(st.decimals(-(10**9), 10**9, places=12, allow_nan=False, allow_infinity=False))
def test_decimals_survive(amount: Decimal) -> None:
    assert to_decimal(usd(amount)) == amount


@given(st.integers(0, 10**15), st.integers(0, 10**6))
def test_a_million_tokens_cost_the_price(micro_usd: int, tokens: int) -> None:
    """per_million(p) * 1e6 == p, and prices scale with tokens without rounding."""
    price = to_decimal(micro_usd * 10**6)
    assert per_million(price, "x") * 10**6 == usd(price)
    assert usd(price) * tokens == per_million(price, "x") * tokens * 10**6


def test_formatting_for_people() -> None:
    assert format_usd(150_000) == "0.00000015"
    assert format_usd(-2 * PICO_PER_USD) == "-2"
    assert format_usd(0) == "0"
