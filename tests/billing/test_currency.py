"""Rounding happens once, half up, and what it leaves is known to the last pico."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.currency import (
    coin_of,
    exponent_of,
    format_coins,
    round_half_up,
    to_coins,
    usd_coin,
)
from billing.errors import MoneyError

amounts = st.integers(-(10**24), 10**24)
coins = st.integers(1, 10**15)


@given(amounts, coins)
def test_nothing_is_lost_by_rounding(amount: int, coin: int) -> None:
    rounded, residual = round_half_up(amount, coin)
    assert rounded * coin + residual == amount
    assert 2 * abs(residual) <= coin
    assert round_half_up(-amount, coin) == (-rounded, -residual)


@given(st.integers(-(10**14), 10**14))
def test_a_cent_is_rounded_as_decimals_are(amount: int) -> None:
    expected = (Decimal(amount) / usd_coin()).quantize(Decimal(1), ROUND_HALF_UP)
    assert round_half_up(amount, usd_coin())[0] == expected


@given(amounts, st.sampled_from(["USD", "JPY", "BHD", "CLF"]))
def test_coins_are_written_and_read(amount: int, currency: str) -> None:
    assert to_coins(Decimal(format_coins(amount % 10**20, currency)), currency) == amount % 10**20


def test_a_currency_has_the_places_of_its_smallest_coin() -> None:
    found = [exponent_of(currency) for currency in ("USD", "EUR", "JPY", "BHD", "CLF")]
    assert found == [2, 2, 0, 3, 4]
    assert [format_coins(-1205, each) for each in ("USD", "JPY", "BHD")] == [
        "-12.05", "-1205", "-1.205",
    ]  # fmt: skip


def test_a_rate_is_a_whole_number_of_pico_for_a_coin() -> None:
    assert usd_coin() == 10**10
    assert coin_of("EUR", "1.0845") == 10_845_000_000
    assert coin_of("JPY", "0.0066") == 6_600_000_000


@pytest.mark.parametrize(
    ("currency", "rate"),
    [("EUR", "0"), ("EUR", "-1"), ("EUR", "1.00000000001"), ("XAU", "2000"), ("XYZ", "1")],
)
def test_no_rate_is_refused(currency: str, rate: str) -> None:
    with pytest.raises(MoneyError):
        coin_of(currency, rate)


@pytest.mark.parametrize("amount", ["1.005", "a lot", "NaN", "Infinity"])
def test_half_a_cent_is_no_amount(amount: str) -> None:
    with pytest.raises(MoneyError):
        to_coins(amount, "USD")
