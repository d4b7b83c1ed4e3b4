"""The price book: dated, append-only TOML files, in USD per million tokens. Reads files, no more.

    [[price]]
    model = "penny"
    tier = "priority"                # optional; default, priority, flex or batch
    min_total_input = 200_001        # optional; a band: requests of at least so much input
    valid_from = "2026-11-01"        # UTC; a date or a date-time ending in Z
    valid_to = "2027-01-01"          # optional, exclusive; else until the model's next entry
    uncached_input = "0.10"          # every component is optional; one that is missing is unpriced
    cache_read = "0.01"
    cache_write = "0.00"             # of the 5 minute cache
    cache_write_1h = "0.00"
    output = "0.40"
    reasoning_output = "0.40"        # where it is left out: what output costs
    embedding_input = "0.02"         # where it is left out: what uncached_input costs
    tool_call = "0.01"               # USD per call
    batch_queue = "0.001"            # USD per request that was taken from the batch queue

Above: the gateway's admission (`PriceBook.at`), `price_sync`. Below: `money`, `events`. Knows no
database. There is no wildcard: a model that is not named has no price, and its usage waits in
suspense. Only a model that is said to be based on another one costs what that one costs, for as
long as it has no price of its own; and a tier without prices of its own costs what the default
does. A band prices the whole request, and needs the price below it for as long as it is valid; what
it leaves out costs what it does below.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from billing.errors import MoneyError, PriceBookError
from billing.events import CALLS, COMPONENTS, TIERS, Band, Component, Price, PriceSet, Tier
from billing.money import per_call, per_million

SHIPPED = Path(__file__).parent / "price_books"
MAX_BOOK_BYTES = 4 * 1024 * 1024
MAX_PICO_PER_TOKEN = 2**63 - 1
"""What a msgpack integer and a bigint both hold; over $9 M per token."""

COMPONENT_OF_KEY: dict[str, Component] = {
    "cache_write" if component == "cache_write_5m" else component: component
    for component in COMPONENTS
}
PLACE = {"model", "tier", "min_total_input", "valid_from", "valid_to"}
KEYS = {*PLACE, *COMPONENT_OF_KEY}
MAX_TOTAL_INPUT = 2**40


class PriceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The prices of one model, in one tier, for requests of so much input, from `valid_from` until
    `valid_to` (exclusive; None: open)."""

    model: str
    tier: Tier = "default"
    min_total_input: int = 0
    valid_from: datetime
    valid_to: datetime | None
    prices: PriceSet
    where: str
    """File and entry, for messages."""

    def covers(self, unix_time: float) -> bool:
        started = self.valid_from.timestamp() <= unix_time
        return started and (self.valid_to is None or unix_time < self.valid_to.timestamp())


class PriceBook:
    """All prices of all times, looked up by model, moment and tier."""

    def __init__(
        self, entries: Iterable[PriceEntry], *, bases: Mapping[str, str] | None = None
    ) -> None:
        """`bases`: the model that another one is based on, by the name of the other. Raises:
        PriceBookError when two entries of a model and a tier overlap."""
        self._bases = dict(bases or {})
        by_place: dict[tuple[str, Tier], dict[int, list[PriceEntry]]] = {}
        for entry in entries:
            bands = by_place.setdefault((entry.model, entry.tier), {})
            bands.setdefault(entry.min_total_input, []).append(entry)
        self._timelines = [
            [_timeline(bands[least]) for least in sorted(bands)] for bands in by_place.values()
        ]
        self._spans = {
            place: _spans(timelines)
            for place, timelines in zip(by_place, self._timelines, strict=True)
        }

    @classmethod
    def load(
        cls,
        paths: Iterable[Path | str] = (SHIPPED,),
        *,
        bases: Mapping[str, str] | None = None,
    ) -> PriceBook:
        """Merge files; a folder stands for its *.toml. Raises: PriceBookError."""
        entries = (
            entry
            for path in map(Path, paths)
            for file in (sorted(path.glob("*.toml")) if path.is_dir() else (path,))
            for entry in _read(file)
        )
        return cls(entries, bases=bases)

    def at(self, model: str, unix_time: float, tier: Tier = "default") -> PriceSet:
        """The prices in force, shared and not to be changed; empty when there are none."""
        base = self._bases.get(model)
        return (
            self._own(model, unix_time, tier)
            or self._own(model, unix_time, "default")
            or (self.at(base, unix_time, tier) if base is not None else {})
        )

    def sells(self, model: str, unix_time: float, tier: Tier) -> bool:
        """Whether the tier has prices of its own there."""
        found = self.at(model, unix_time, tier)
        return bool(found) and found is not self.at(model, unix_time)

    def _own(self, model: str, unix_time: float, tier: Tier) -> PriceSet:
        spans = self._spans.get((model, tier))
        if spans is None:
            return {}
        position = bisect_right(spans.starts, unix_time) - 1
        return {} if position < 0 else spans.prices[position]

    def __iter__(self) -> Iterator[PriceEntry]:
        for timelines in self._timelines:
            for timeline in timelines:
                yield from timeline


class _Spans(NamedTuple):
    """What is in force from each start until the next."""

    starts: list[float]
    prices: list[PriceSet]


def _spans(timelines: Sequence[Sequence[PriceEntry]]) -> _Spans:
    """`timelines`: of one model and tier, one for each band. Raises: PriceBookError."""
    starts = {
        moment.timestamp()
        for timeline in timelines
        for entry in timeline
        for moment in (entry.valid_from, entry.valid_to)
        if moment is not None
    }
    spans = _Spans(sorted(starts), [])
    for start in spans.starts:
        in_force = [entry for line in timelines for entry in line if entry.covers(start)]
        spans.prices.append(_merged(in_force) if in_force else {})
    return spans


def _merged(in_force: Sequence[PriceEntry]) -> PriceSet:
    """`in_force`: at one moment, of each band at most one, in their order."""
    lowest, *larger = in_force
    if lowest.min_total_input:
        larger, prices = list(in_force), {}
    else:
        prices = dict(lowest.prices)
    for entry in larger:
        for component, price in entry.prices.items():
            below = prices.get(component)
            if below is None:
                raise PriceBookError(
                    f"{entry.where}: {component} of {entry.model} ({entry.tier}) has no price"
                    f" below {entry.min_total_input} all the while"
                )
            band = Band(entry.min_total_input, price.price_id, price.pico_per_token)
            prices[component] = msgspec.structs.replace(below, bands=(*below.bands, band))
    return prices


def _timeline(entries: list[PriceEntry]) -> list[PriceEntry]:
    """In order of time, each open entry ended by the next."""
    ordered = sorted(entries, key=lambda entry: entry.valid_from)
    for position, (entry, following) in enumerate(zip(ordered, ordered[1:], strict=False)):
        end = following.valid_from if entry.valid_to is None else entry.valid_to
        if entry.valid_from == following.valid_from or end > following.valid_from:
            raise PriceBookError(
                f"{following.where}: {entry.model} ({entry.tier})"
                f" from {following.valid_from:%Y-%m-%d}"
                f" overlaps the entry at {entry.where}"
            )
        ordered[position] = msgspec.structs.replace(entry, valid_to=end)
    return ordered


def _read(file: Path) -> Iterator[PriceEntry]:
    try:
        if file.stat().st_size > MAX_BOOK_BYTES:
            raise PriceBookError(f"{file}: larger than {MAX_BOOK_BYTES} bytes")
        # Decimal keeps a TOML float as it was written: 0.15 is exactly fifteen hundredths.
        document = tomllib.loads(file.read_text(encoding="utf-8"), parse_float=Decimal)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PriceBookError(f"{file}: {error}") from error
    unknown = set(document) - {"price"}
    tables = document.get("price", [])
    if unknown or not isinstance(tables, list):
        raise PriceBookError(f"{file}: only [[price]] tables belong here, not {sorted(unknown)}")
    for number, table in enumerate(tables, 1):
        yield _entry(table, f"{file}: price {number}")


def _entry(table: Mapping[str, Any], where: str) -> PriceEntry:
    if unknown := sorted(set(table) - KEYS):
        raise PriceBookError(f"{where}: unknown key {unknown[0]}")
    model = table.get("model")
    if not isinstance(model, str) or not model:
        raise PriceBookError(f"{where}: model must be a name")
    tier = table.get("tier", "default")
    if tier not in TIERS:
        raise PriceBookError(f"{where}: tier must be {', '.join(TIERS[:-1])} or {TIERS[-1]}")
    valid_from = _moment(table, "valid_from", where)
    valid_to = _moment(table, "valid_to", where) if "valid_to" in table else None
    if valid_to is not None and valid_to <= valid_from:
        raise PriceBookError(f"{where}: valid_to must be after valid_from")
    prices: PriceSet = {}
    least = _min_total_input(table, where)
    # Behind the moment, where no model's name can look like it.
    suffix = ("" if tier == "default" else f":{tier}") + (f":{least}" if least else "")
    for key, component in COMPONENT_OF_KEY.items():
        if key in table:
            price_id = f"{model}:{component}:{valid_from:%Y-%m-%dT%H:%M:%SZ}{suffix}"
            prices[component] = Price(price_id, _pico(component, table[key], f"{where}: {key}"))
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


def _min_total_input(table: Mapping[str, Any], where: str) -> int:
    value = table.get("min_total_input", 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOTAL_INPUT:
        raise PriceBookError(f"{where}: min_total_input must be a count of tokens")
    return value


def _pico(component: Component, value: object, name: str) -> int:
    """Per token, or per call where calls are counted."""
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise PriceBookError(f"{name}: must be a decimal such as '0.15'")
    try:
        pico = (per_call if component in CALLS else per_million)(value, name)
    except MoneyError as error:
        raise PriceBookError(str(error)) from error
    if pico > MAX_PICO_PER_TOKEN:
        raise PriceBookError(f"{name}: {value} is more than a token can cost")
    return pico


def _moment(table: Mapping[str, Any], key: str, where: str) -> datetime:
    """UTC, whole seconds."""
    value = table.get(key)
    try:
        moment = datetime.fromisoformat(value if isinstance(value, str) else str(value))
    except ValueError:
        raise PriceBookError(f"{where}: {key} must be a date such as '2026-11-01'") from None
    if moment.tzinfo is None:
        # A bare date is midnight UTC; a bare time of day would be a guess.
        if moment.time() != datetime.min.time():
            raise PriceBookError(f"{where}: {key} needs a time zone; write it in UTC with Z")
        moment = moment.replace(tzinfo=UTC)
    if moment.microsecond:
        raise PriceBookError(f"{where}: {key} must be a whole second")
    return moment.astimezone(UTC)
