"""Money as an integer count of pico-USD: 1 USD = 10^12 pico. Exact in and out; nothing rounds.

Knows no price and no tenant. Real per-token prices are integral in pico-USD and often not in nano,
and floats drift, hence this unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from statistics import median_high, median_low

from billing.errors import MoneyError

Pico = int
"""A count of pico-USD."""

PICO_DIGITS = 12
PICO_PER_USD: Pico = 10**PICO_DIGITS
MILLION_DIGITS = 6
MAX_EXPONENT = 40
"""Beyond 10^+-40 USD a number is a mistake, and its integer would eat memory."""


def usd(amount: str | int | Decimal) -> Pico:
    """USD -> pico-USD.

    Raises: MoneyError when `amount` is not a finite decimal or has more than 12 decimal places.
    """
    return _shifted(amount, PICO_DIGITS)


def per_million(amount: str | int | Decimal, name: str) -> Pico:
    """ "USD per million tokens" -> pico-USD per token ($0.15/M = 150_000).

    Raises: MoneyError, naming `name`, when negative, not a number, or not a whole number of pico.
    """
    return _price(amount, PICO_DIGITS - MILLION_DIGITS, name)


def basis_points(percent: str | int | Decimal) -> int:
    """Hundredths of a percent. Raises: MoneyError for what is no whole number of them."""
    try:
        return _shifted(percent, 2)
    except MoneyError:
        raise MoneyError(f"{percent!r} is not a percentage of at most two places") from None


def per_call(amount: str | int | Decimal, name: str) -> Pico:
    """USD per call -> pico-USD. Raises: as `per_million`."""
    return _price(amount, PICO_DIGITS, name)


def _price(amount: str | int | Decimal, digits: int, name: str) -> Pico:
    try:
        pico = _shifted(amount, digits)
    except MoneyError as error:
        raise MoneyError(f"{name}: {error}") from None
    if pico < 0:
        raise MoneyError(f"{name}: {amount} is negative")
    return pico


def to_decimal(pico: Pico) -> Decimal:
    """Pico-USD -> USD, exactly, whatever the decimal context; no trailing zeros."""
    sign, whole = int(pico < 0), abs(pico)
    exponent = -PICO_DIGITS
    while exponent < 0 and whole % 10 == 0:
        whole //= 10
        exponent += 1
    return Decimal((sign, tuple(int(digit) for digit in str(whole)), exponent))


def format_usd(pico: Pico) -> str:
    """Pico-USD -> a plain decimal such as "0.00015"; never scientific."""
    return format(to_decimal(pico), "f")


def _shifted(amount: str | int | Decimal, digits: int) -> int:
    """amount * 10^digits as an integer, or MoneyError."""
    try:
        number = Decimal(amount)
    except ArithmeticError:
        raise MoneyError(f"{amount!r} is not a decimal number") from None
    sign, figures, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        raise MoneyError(f"{amount!r} is not a finite number")
    if abs(exponent) > MAX_EXPONENT or len(figures) > MAX_EXPONENT:
        raise MoneyError(f"{amount!r} has more than {MAX_EXPONENT} places")
    whole = int("".join(map(str, figures)))
    power = exponent + digits
    if power >= 0:
        whole *= int(10**power)
    else:
        whole, rest = divmod(whole, int(10**-power))
        if rest:
            raise MoneyError(f"{amount} is not a whole number of pico-USD")
    return -whole if sign else whole


def median(amounts: Sequence[Pico]) -> Pico:
    """Return the median in whole pico-USD: a float has too few digits."""
    return (median_low(amounts) + median_high(amounts)) // 2
