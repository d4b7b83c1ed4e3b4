"""Currencies: what one unit of their smallest coin is worth in pico-USD, and the one place where
money is rounded. Pure, no I/O.

    coin = usd_coin()                                       # 10^10 pico: a cent
    coin_of("EUR", "1.0845")                                # a cent of a euro
    round_half_up(15_000_000_001, coin)                     # (2, -4_999_999_999)

A rate is kept as whole pico-USD for the smallest coin, so what was rounded is worth a whole number
of pico again: exact = rounded x coin + residual, always in integers, and what is left over is known
to the last one.
"""

from __future__ import annotations

from decimal import Decimal

from iso4217 import Currency

from billing.errors import MoneyError
from billing.money import PICO_PER_USD, Pico, usd

USD = "USD"
MAX_COIN_PICO = 10**24
"""A coin worth a trillion USD is a mistake."""


def exponent_of(currency: str) -> int:
    """Decimal places of its smallest coin: USD 2, JPY 0, BHD 3.

    Raises: MoneyError for what is no currency that somebody can be billed in.
    """
    try:
        exponent = Currency(currency).exponent
    except ValueError:
        raise MoneyError(f"{currency!r} is no currency of ISO 4217") from None
    if exponent is None:
        raise MoneyError(f"{currency!r} has no smallest coin")
    return int(exponent)


def usd_coin() -> Pico:
    """A cent."""
    return PICO_PER_USD // int(10 ** exponent_of(USD))


def coin_of(currency: str, usd_per_unit: str | Decimal) -> Pico:
    """Return what a currency's smallest coin is worth, where one unit is worth `usd_per_unit`.

    Raises: MoneyError where that is not positive, or no whole number of pico-USD.
    """
    unit, coins = usd(usd_per_unit), int(10 ** exponent_of(currency))
    coin, rest = divmod(unit, coins)
    if rest:
        raise MoneyError(f"{usd_per_unit} USD for a {currency} is too fine for its smallest coin")
    if not 0 < coin <= MAX_COIN_PICO:
        raise MoneyError(f"{usd_per_unit} USD for a {currency} is no rate")
    return coin


def round_half_up(amount: Pico, coin: Pico) -> tuple[int, Pico]:
    """To whole coins, half a coin away from zero, and the residual: what was left out, or, where it
    was rounded up, added too much (negative)."""
    assert coin > 0
    whole = (2 * abs(amount) + coin) // (2 * coin)
    rounded = -whole if amount < 0 else whole
    return rounded, amount - rounded * coin


def format_coins(amount: int, currency: str) -> str:
    """Coins -> a plain decimal of the currency with all its places: 1250 -> "12.50"."""
    digits = tuple(int(digit) for digit in str(abs(amount)))
    return format(Decimal((int(amount < 0), digits, -exponent_of(currency))), "f")


def to_coins(amount: str | Decimal, currency: str) -> int:
    """The reverse. Raises: MoneyError when it has more places than the currency, or is no
    number."""
    try:
        coins = Decimal(amount).scaleb(exponent_of(currency))
        if coins.is_finite() and coins == coins.to_integral_value():
            return int(coins)
    except ArithmeticError:
        raise MoneyError(f"{amount!r} is not a decimal number") from None
    raise MoneyError(f"{amount} is not a whole number of {currency}'s smallest coin")
