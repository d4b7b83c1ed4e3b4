"""The price book: dated, append-only TOML files, in USD per million tokens.

    [[price]]
    model = "penny"
    tier = "priority"                # optional; default, priority, flex or batch
    min_total_input = 200_001        # optional; a size band: requests with at least so many tokens
    valid_from = "2026-11-01"        # UTC; a date or a date-time ending in Z
    valid_to = "2027-01-01"          # optional, exclusive; else until the model's next entry
    uncached_input = "0.10"          # every component is optional; a missing one is unpriced
    cache_read = "0.01"
    cache_write = "0.00"             # of the 5 minute cache
    cache_write_1h = "0.00"
    cache_prices = "explicit"        # optional; these three default to 0.1, 1.25 and 2 times
                                     # uncached_input
    output = "0.40"
    reasoning_output = "0.40"        # default: the price of output
    embedding_input = "0.02"         # default: the price of uncached_input
    tool_call = "0.01"               # USD per call
    batch_queue = "0.001"            # USD per request that was taken from the batch queue

There is no wildcard: a model without an entry has no price, and its usage waits in suspense. Only a
model that is based on another one has that one's prices while it has none of its own; and a tier
without prices of its own has those of the default tier. A size band prices the whole request. It
needs a price below it for as long as it is valid; a component that it leaves out has that price.

Knows no database.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from billing.errors import PriceBookError
from billing.events import Band, PriceSet, Tier
from billing.pricing.entries import DEFAULT_LIST, PriceEntry, read_entry, starts_of, timeline
from billing.pricing.lists import KINDS, PriceLists, Rule, read_rules

SHIPPED = Path(__file__).parent / "price_books"
MAX_BOOK_BYTES = 4 * 1024 * 1024
Place = tuple[str, str, Tier]
"""Price list, model, tier."""
StoredBooks = Mapping[str, Mapping[str, Any]]
"""Books beside the files: by name, the tables as a file has them, in the types of JSON."""


class PriceBook:
    """All prices of all times, looked up by model, moment, tier and price list."""

    def __init__(
        self,
        entries: Iterable[PriceEntry],
        rules: Iterable[Rule] = (),
        *,
        bases: Mapping[str, str] | None = None,
    ) -> None:
        """`bases`: by the name of a model, the model that it is based on.

        Raises: PriceBookError if two entries of a model, a tier and a band overlap, or two rules.
        """
        self._bases = dict(bases or {})
        self.lists = PriceLists(rules)
        self._written = tuple(entries)
        self._entries = list(_in_order(self._written))
        self._entries += self.lists.discounted(tuple(self._entries))
        by_place: defaultdict[Place, list[PriceEntry]] = defaultdict(list)
        for entry in self._entries:
            by_place[entry.price_list, entry.model, entry.tier].append(entry)
        self._spans: dict[Place, _Spans] = {}
        for (price_list, model, tier), own in by_place.items():
            if price_list == DEFAULT_LIST:
                spans = _spans(own, ())
            else:
                spans = _spans(by_place[DEFAULT_LIST, model, tier], own)
            self._spans[price_list, model, tier] = spans

    @classmethod
    def load(
        cls,
        paths: Iterable[Path | str] = (SHIPPED,),
        *,
        bases: Mapping[str, str] | None = None,
        stored: StoredBooks | None = None,
    ) -> PriceBook:
        """Merge the files of several paths: a *.toml file, or a folder of them, which need not
        exist. An entry of a file hides the same one of `stored`. Raises: PriceBookError."""
        entries: list[PriceEntry] = []
        rules: list[Rule] = []
        for path in map(Path, paths):
            for file in (path,) if path.suffix == ".toml" else sorted(path.glob("*.toml")):
                _parse(_read(file), str(file), entries, rules)
        known, known_rules = set(map(_identity, entries)), {rule.id for rule in rules}
        for name, tables in (stored or {}).items():
            others = cls.of_tables(tables, f"price_book.{name}")
            entries += (each for each in others._written if _identity(each) not in known)
            rules += (each for each in others.lists.rules if each.id not in known_rules)
        return cls(entries, rules, bases=bases)

    @classmethod
    def of_tables(cls, document: Mapping[str, Any], where: str) -> PriceBook:
        """Read the tables of one file. Raises: PriceBookError."""
        entries: list[PriceEntry] = []
        rules: list[Rule] = []
        _read_tables(document, where, entries, rules)
        return cls(entries, rules)

    @classmethod
    def parse(cls, content: bytes, where: str) -> PriceBook:
        """Read one file's content. Raises: PriceBookError."""
        entries: list[PriceEntry] = []
        rules: list[Rule] = []
        _parse(content, where, entries, rules)
        return cls(entries, rules)

    def adopt(self, other: PriceBook) -> None:
        """Have the prices of another book from now on, for all who hold this one."""
        self._bases, self.lists = other._bases, other.lists
        self._written, self._entries, self._spans = other._written, other._entries, other._spans

    def at(
        self,
        model: str,
        unix_time: float,
        tier: Tier = "default",
        price_list: str = DEFAULT_LIST,
    ) -> PriceSet:
        """Return the prices in force, which callers share and must not change; empty if there are
        none."""
        base = self._bases.get(model)
        return (
            self._own(model, unix_time, tier, price_list)
            or self._own(model, unix_time, "default", price_list)
            or (self.at(base, unix_time, tier, price_list) if base is not None else {})
        )

    def sells(self, model: str, unix_time: float, tier: Tier) -> bool:
        """True if the tier has prices of its own for the model at a moment."""
        found = self.at(model, unix_time, tier)
        return bool(found) and found is not self.at(model, unix_time)

    @property
    def starts(self) -> list[float]:
        """Every moment (Unix seconds) at which a price may change."""
        return sorted({start for spans in self._spans.values() for start in spans.starts})

    def _own(self, model: str, unix_time: float, tier: Tier, price_list: str) -> PriceSet:
        spans = self._spans.get((price_list, model, tier))
        if spans is None and price_list != DEFAULT_LIST:
            spans = self._spans.get((DEFAULT_LIST, model, tier))
        if spans is None:
            return {}
        position = bisect_right(spans.starts, unix_time) - 1
        return {} if position < 0 else spans.prices[position]

    def __iter__(self) -> Iterator[PriceEntry]:
        """Yield the entries of all lists, the default list's first."""
        yield from self._entries


def _identity(entry: PriceEntry) -> tuple[object, ...]:
    """Return what the ids of an entry's prices are made of."""
    return entry.model, entry.tier, entry.min_total_input, entry.valid_from


def _in_order(entries: Iterable[PriceEntry]) -> Iterator[PriceEntry]:
    by_band: defaultdict[tuple[str, Tier, int], list[PriceEntry]] = defaultdict(list)
    for entry in entries:
        by_band[entry.model, entry.tier, entry.min_total_input].append(entry)
    for (model, tier, _), found in sorted(by_band.items(), key=lambda each: each[0][2]):
        yield from timeline(found, f"{model} ({tier})")


class _Spans(NamedTuple):
    """The prices in force from each start until the next."""

    starts: list[float]
    prices: list[PriceSet]


def _spans(entries: Sequence[PriceEntry], own: Sequence[PriceEntry]) -> _Spans:
    """Merge the entries of one model and tier into spans of time. `entries`: the default list's, by
    band. `own`: those of one other list. Raises: PriceBookError."""
    spans = _Spans(starts_of((*entries, *own)), [])
    for start in spans.starts:
        special = [entry for entry in own if entry.covers(start)]
        in_force = [_over(entry, special) for entry in entries if entry.covers(start)]
        spans.prices.append(_merged(in_force) if in_force else {})
    return spans


def _over(entry: PriceEntry, special: Iterable[PriceEntry]) -> PriceEntry:
    prices = dict(entry.prices)
    for each in special:
        if each.min_total_input == entry.min_total_input:
            prices.update(each.prices)
    return msgspec.structs.replace(entry, prices=prices)


def _merged(in_force: Sequence[PriceEntry]) -> PriceSet:
    """Merge the bands of one moment. `in_force`: at most one entry of each band, in order.

    Raises: PriceBookError.
    """
    prices: PriceSet = {}
    for entry in in_force:
        for component, price in entry.prices.items():
            if not entry.min_total_input:
                prices[component] = price
                continue
            below = prices.get(component)
            if below is None:
                raise PriceBookError(
                    f"{entry.where}: {component} of {entry.model} ({entry.tier}) has no price"
                    f" below {entry.min_total_input} for as long as this band is valid"
                )
            band = Band(entry.min_total_input, price.price_id, price.pico_per_token)
            prices[component] = msgspec.structs.replace(below, bands=(*below.bands, band))
    return prices


def _read(file: Path) -> bytes:
    """Read no more than a book may have. Raises: PriceBookError."""
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_BOOK_BYTES + 1)
    except OSError as error:
        raise PriceBookError(f"{file}: {error}") from error


def _parse(content: bytes, where: str, entries: list[PriceEntry], rules: list[Rule]) -> None:
    """Add what a file holds to `entries` and `rules`. Raises: PriceBookError."""
    if len(content) > MAX_BOOK_BYTES:
        raise PriceBookError(f"{where}: larger than {MAX_BOOK_BYTES} bytes")
    try:
        # Decimal keeps a TOML float as it was written: 0.15 is exactly fifteen hundredths.
        document = tomllib.loads(content.decode(), parse_float=Decimal)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PriceBookError(f"{where}: {error}") from error
    _read_tables(document, where, entries, rules)


def _read_tables(
    document: Mapping[str, Any], where: str, entries: list[PriceEntry], rules: list[Rule]
) -> None:
    """Add what the tables of a file hold. Raises: PriceBookError."""
    unknown = sorted(set(document) - {"price", *KINDS})
    if unknown or not all(isinstance(tables, list) for tables in document.values()):
        allowed = ", ".join(f"[[{kind}]]" for kind in ("price", *KINDS))
        raise PriceBookError(f"{where}: must only have {allowed}, not {unknown}")
    for kind, tables in document.items():
        for number, table in enumerate(tables, 1):
            if not isinstance(table, dict):
                raise PriceBookError(f"{where}: {kind} {number}: must be a table")
    for number, table in enumerate(document.get("price", []), 1):
        entries.append(read_entry(table, f"{where}: price {number}"))
    for kind in KINDS:
        for number, table in enumerate(document.get(kind, []), 1):
            rules.extend(read_rules(kind, table, f"{where}: {kind} {number}"))
