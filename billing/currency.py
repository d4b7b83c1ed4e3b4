"""Currencies: the value of their smallest coin in pico-USD, and the one place where money is
rounded. Pure, no I/O.

    coin = usd_coin()                                       # 10^10 pico: a cent
    coin_of("EUR", "1.0845")                                # a cent of a euro
    round_half_up(15_000_000_001, coin)                     # (2, -4_999_999_999)

An exchange rate is a whole number of pico-USD for the smallest coin, so rounding loses nothing:
exact = rounded x coin + residual, in integers.
"""

from __future__ import annotations

from decimal import Decimal
from functools import cache

from billing.errors import MoneyError
from billing.money import PICO_PER_USD, Pico, usd

USD = "USD"
MAX_COIN_PICO = 10**24
"""A coin worth more than a trillion USD is refused as a mistake."""


@cache
def exponent_of(currency: str) -> int:
    """Return the number of decimal places of a currency: USD 2, JPY 0, BHD 3.

    Raises: MoneyError for a code that is not in ISO 4217, or that has no smallest coin.
    """
    from iso4217 import Currency  # 2 MB of each process: it reads the standard's XML

    try:
        exponent = Currency(currency).exponent
    except ValueError:
        raise MoneyError(f"{currency!r} is not a currency of ISO 4217") from None
    if exponent is None:
        raise MoneyError(f"{currency!r} has no smallest coin")
    return int(exponent)


def usd_coin() -> Pico:
    """Return a cent in pico-USD."""
    return PICO_PER_USD // int(10 ** exponent_of(USD))


def coin_of(currency: str, usd_per_unit: str | Decimal) -> Pico:
    """Return the value of a currency's smallest coin at an exchange rate.

    Raises: MoneyError when that is not positive, or not a whole number of pico-USD.
    """
    unit, coins = usd(usd_per_unit), int(10 ** exponent_of(currency))
    coin, rest = divmod(unit, coins)
    if rest:
        raise MoneyError(f"{usd_per_unit} USD per {currency} has too many decimal places")
    if not 0 < coin <= MAX_COIN_PICO:
        raise MoneyError(f"{usd_per_unit} USD per {currency} is out of range")
    return coin


def round_half_up(amount: Pico, coin: Pico) -> tuple[int, Pico]:
    """Round to whole coins, half a coin away from zero. Return the coins and the residual, which is
    negative where the amount was rounded up."""
    assert coin > 0
    whole = (2 * abs(amount) + coin) // (2 * coin)
    rounded = -whole if amount < 0 else whole
    return rounded, amount - rounded * coin


def format_coins(amount: int, currency: str) -> str:
    """Format coins as a decimal with all places of the currency: 1250 -> "12.50"."""
    digits = tuple(int(digit) for digit in str(abs(amount)))
    return format(Decimal((int(amount < 0), digits, -exponent_of(currency))), "f")


def to_coins(amount: str | Decimal, currency: str) -> int:
    """Parse a decimal into coins: "12.50" -> 1250.

    Raises: MoneyError when it is not a number or has more places than the currency.
    """
    try:
        coins = Decimal(amount).scaleb(exponent_of(currency))
        if coins.is_finite() and coins == coins.to_integral_value():
            return int(coins)
    except ArithmeticError:
        raise MoneyError(f"{amount!r} is not a decimal number") from None
    raise MoneyError(f"{amount} is not a whole number of {currency}'s smallest coin")
