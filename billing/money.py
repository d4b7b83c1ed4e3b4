"""Money is an integer count of pico-USD: 1 USD = 10^12 pico. Conversions are exact; nothing rounds.

Published prices per token are whole numbers of pico-USD, but often not of nano-USD; floats drift.
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
"""A number beyond 10^+-40 USD is refused as a mistake: its integer would take too much memory."""


def usd(amount: str | int | Decimal) -> Pico:
    """Convert USD to pico-USD.

    Raises: MoneyError when `amount` is not a finite decimal or has more than 12 decimal places.
    """
    return _shifted(amount, PICO_DIGITS)


def per_million(amount: str | int | Decimal, name: str) -> Pico:
    """Convert USD per million tokens to pico-USD per token ($0.15/M = 150_000).

    Raises: MoneyError, naming `name`, when negative, not a number, or not a whole number of pico.
    """
    return _price(amount, PICO_DIGITS - MILLION_DIGITS, name)


def basis_points(percent: str | int | Decimal) -> int:
    """Convert a percentage to basis points (hundredths of a percent).

    Raises: MoneyError when it has more than two decimal places.
    """
    try:
        return _shifted(percent, 2)
    except MoneyError:
        raise MoneyError(f"{percent!r} is not a percentage of at most two places") from None


def per_call(amount: str | int | Decimal, name: str) -> Pico:
    """Convert USD per call to pico-USD. Raises: as `per_million`."""
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
    """Convert pico-USD to USD, exactly in any decimal context, without trailing zeros."""
    if pico == 0:
        return Decimal(0)
    digits = str(pico)
    num_zeros = min(len(digits) - len(digits.rstrip("0")), PICO_DIGITS)
    return Decimal(f"{digits[: len(digits) - num_zeros]}E{num_zeros - PICO_DIGITS}")


def format_usd(pico: Pico) -> str:
    """Format pico-USD as USD, a plain decimal such as "0.00015"."""
    return format(to_decimal(pico), "f")


def _shifted(amount: str | int | Decimal, digits: int) -> int:
    """Return amount * 10^digits. Raises: MoneyError when that is not an integer."""
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
    """Return the median in whole pico-USD, without floats, which have too few digits."""
    return (median_low(amounts) + median_high(amounts)) // 2
