"""Entries of a price book: their fields, how to read one from TOML, and timelines of dated entries,
in which an open entry ends with the next one and none overlap. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from billing.cache_contracts import EXPLICIT_PRICES_BPS
from billing.errors import MoneyError, PriceBookError
from billing.events import CALLS, COMPONENTS, TIERS, Component, Price, PriceSet, Tier
from billing.money import per_call, per_million

DEFAULT_LIST = "default"
"""The price list of everybody who has no terms of their own."""
MAX_PICO_PER_TOKEN = 2**63 - 1
"""The largest number that fits into a msgpack integer and a bigint; over $9 M per token."""

COMPONENT_OF_KEY: dict[str, Component] = {
    "cache_write" if component == "cache_write_5m" else component: component
    for component in COMPONENTS
}
PLACE = {"model", "tier", "min_total_input", "valid_from", "valid_to"}
CACHE_PRICES = "cache_prices"
KEYS = {*PLACE, CACHE_PRICES, *COMPONENT_OF_KEY}
MAX_TOTAL_INPUT = 2**40
DECIMAL = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""A decimal as text; Python's parser would accept many other notations."""


class DatedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that is in force from `valid_from` until `valid_to` (exclusive; None: open)."""

    valid_from: datetime
    valid_to: datetime | None
    where: str
    """The file and the entry, for error messages."""

    def covers(self, unix_time: float) -> bool:
        started = self.valid_from.timestamp() <= unix_time
        return started and (self.valid_to is None or unix_time < self.valid_to.timestamp())


D = TypeVar("D", bound=DatedEntry)


class PriceEntry(DatedEntry, frozen=True, kw_only=True):
    """The prices of one model and tier, for requests with at least `min_total_input` tokens."""

    price_list: str = DEFAULT_LIST
    model: str
    tier: Tier = "default"
    min_total_input: int = 0
    prices: PriceSet


def timeline(entries: Iterable[D], name: str) -> list[D]:
    """Sort entries by time and end each open one where the next begins.

    Raises: PriceBookError when two entries overlap.
    """
    ordered = sorted(entries, key=lambda entry: entry.valid_from)
    for position, (entry, following) in enumerate(zip(ordered, ordered[1:], strict=False)):
        end = following.valid_from if entry.valid_to is None else entry.valid_to
        if entry.valid_from == following.valid_from or end > following.valid_from:
            raise PriceBookError(
                f"{following.where}: {name} from {following.valid_from:%Y-%m-%d}"
                f" overlaps the entry at {entry.where}"
            )
        ordered[position] = msgspec.structs.replace(entry, valid_to=end)
    return ordered


def starts_of(entries: Iterable[DatedEntry]) -> list[float]:
    """Return every moment (Unix seconds) at which an entry begins or ends."""
    moments = (at for entry in entries for at in (entry.valid_from, entry.valid_to))
    return sorted({moment.timestamp() for moment in moments if moment is not None})


def read_entry(table: Mapping[str, Any], where: str) -> PriceEntry:
    """Read a [[price]] table. Raises: PriceBookError."""
    if unknown := sorted(set(table) - KEYS):
        raise PriceBookError(f"{where}: unknown key {unknown[0]}")
    model = table.get("model")
    if not isinstance(model, str) or not model:
        raise PriceBookError(f"{where}: model must be a name")
    tier = table.get("tier", "default")
    if tier not in TIERS:
        raise PriceBookError(f"{where}: tier must be {', '.join(TIERS[:-1])} or {TIERS[-1]}")
    valid_from, valid_to = read_validity(table, where)
    least = _min_total_input(table, where)
    # The suffix follows the moment: no model's name can look like it there.
    suffix = ("" if tier == "default" else f":{tier}") + (f":{least}" if least else "")
    prices: PriceSet = {
        component: Price(f"{model}:{component}:{moment_text(valid_from)}{suffix}", pico)
        for component, pico in _picos(table, where).items()
    }
    if not prices:
        raise PriceBookError(f"{where}: {model} has no price at all")
    return PriceEntry(
        model=model,
        tier=tier,
        min_total_input=least,
        valid_from=valid_from,
        valid_to=valid_to,
        prices=prices,
        where=where,
    )


def _picos(table: Mapping[str, Any], where: str) -> dict[Component, int]:
    picos = {
        component: read_pico(component, table[key], f"{where}: {key}")
        for key, component in COMPONENT_OF_KEY.items()
        if key in table
    }
    if CACHE_PRICES not in table:
        return picos
    if table[CACHE_PRICES] != "explicit" or "uncached_input" not in picos:
        raise PriceBookError(f"{where}: {CACHE_PRICES} must be explicit, beside uncached_input")
    for component, bps in EXPLICIT_PRICES_BPS.items():
        pico, rest = divmod(picos["uncached_input"] * bps, 10_000)
        if rest and component not in picos:
            raise PriceBookError(f"{where}: {component} is not whole pico-USD; write its price")
        picos.setdefault(component, pico)
    return picos


def _min_total_input(table: Mapping[str, Any], where: str) -> int:
    value = table.get("min_total_input", 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOTAL_INPUT:
        raise PriceBookError(f"{where}: min_total_input must be a count of tokens")
    return value


def decimal_of(value: object, name: str) -> str | int | Decimal:
    """Check that a value of a book is a number. Raises: PriceBookError."""
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise PriceBookError(f"{name}: must be a decimal such as '0.15'")
    if isinstance(value, str) and not DECIMAL.fullmatch(value):
        raise PriceBookError(f"{name}: {value!r} is not a decimal number such as '0.15'")
    return value


def read_pico(component: Component, value: object, name: str) -> int:
    """Read a price per million tokens, or per call for a component that counts calls.

    Raises: PriceBookError.
    """
    return exact_pico(per_call if component in CALLS else per_million, value, name)


def exact_pico(read: Callable[[str | int | Decimal, str], int], value: object, name: str) -> int:
    """Read a price by one of the functions of `money`. Raises: PriceBookError, naming the row."""
    try:
        pico = read(decimal_of(value, name), name)
    except MoneyError as error:
        raise PriceBookError(str(error)) from error
    if pico > MAX_PICO_PER_TOKEN:
        raise PriceBookError(f"{name}: {value} is too large")
    return pico


def read_validity(table: Mapping[str, Any], where: str) -> tuple[datetime, datetime | None]:
    """Read `valid_from` and `valid_to`. Raises: PriceBookError."""
    valid_from = _moment(table, "valid_from", where)
    valid_to = None if table.get("valid_to") is None else _moment(table, "valid_to", where)
    if valid_to is not None and valid_to <= valid_from:
        raise PriceBookError(f"{where}: valid_to must be after valid_from")
    return valid_from, valid_to


def moment_text(moment: datetime) -> str:
    """Format a moment as the ids of prices and rules have it."""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _moment(table: Mapping[str, Any], key: str, where: str) -> datetime:
    """Read a moment in UTC, in whole seconds. Raises: PriceBookError."""
    value = table.get(key)
    try:
        moment = datetime.fromisoformat(value if isinstance(value, str) else str(value))
        # A bare date is midnight UTC; a bare time of day would be a guess.
        if moment.tzinfo is None and moment.time() == datetime.min.time():
            moment = moment.replace(tzinfo=UTC)
        in_utc = moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise PriceBookError(f"{where}: {key} must be a date such as '2026-11-01'") from None
    if moment.tzinfo is None:
        raise PriceBookError(f"{where}: {key} needs a time zone; write it in UTC with Z")
    if moment.microsecond:
        raise PriceBookError(f"{where}: {key} must be a whole second")
    return in_utc
