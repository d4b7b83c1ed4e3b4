"""Read published prices: genai-prices' `data.json` and litellm's
`model_prices_and_context_window.json`. Pure.

    "gpt-5": {"input_cost_per_token": 1.25e-06, "output_cost_per_token_priority": 2e-05,
              "input_cost_per_token_above_200k_tokens": 2.5e-06, ...}                    litellm
    {"id": "openai", "models": [{"id": "gpt-5", "prices": {"input_mtok": 1.25,
     "output_mtok": {"base": 10, "tiers": [{"start": 200000, "price": 15}]}}}]}     genai-prices

Numbers are read as decimals; one that is not whole pico-USD is refused by its key. Prices of what
has no component here (audio, images, searches) are listed in `left_out`.

Knows none of our models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date
from decimal import Decimal
from typing import Any, Literal, get_args

import msgspec

from billing.errors import PriceBookError
from billing.events import Component, Tier
from billing.money import per_call, per_million
from billing.pricing.entries import exact_pico

Source = Literal["genai-prices", "litellm"]
SOURCES: tuple[Source, ...] = get_args(Source)
MAX_SOURCE_BYTES = 64 * 1024 * 1024
MAX_CANDIDATES = 5
"""An error about an ambiguous name lists so many."""
Place = tuple[Tier, int]
"""The tier, and the least input of the size band."""

LITELLM: dict[str, Component] = {
    "input_cost_per_token": "uncached_input",
    "cache_read_input_token_cost": "cache_read",
    "cache_creation_input_token_cost": "cache_write_5m",
    "cache_creation_input_token_cost_above_1hr": "cache_write_1h",
    "output_cost_per_token": "output",
    "output_cost_per_reasoning_token": "reasoning_output",
}
LITELLM_TIERS: dict[str | None, Tier] = {
    None: "default",
    "priority": "priority",
    "flex": "flex",
    "batches": "batch",
}
LITELLM_KEY = re.compile(
    rf"({'|'.join(sorted(LITELLM, key=len, reverse=True))})"
    r"(?:_above_(\d+)k_tokens)?(?:_(priority|flex|batches))?\Z"
)
GENAI: dict[str, Component] = {
    "input_mtok": "uncached_input",
    "cache_read_mtok": "cache_read",
    "cache_write_mtok": "cache_write_5m",
    "cache_write_5m_mtok": "cache_write_5m",
    "cache_write_1h_mtok": "cache_write_1h",
    "output_mtok": "output",
    "output_reasoning_mtok": "reasoning_output",
}
GENAI_TIERS: dict[tuple[tuple[str, str], ...], Tier] = {
    (("processing", "batch"),): "batch",
    (("service_tier", "flex"),): "flex",
    (("service_tier", "priority"),): "priority",
}


class PublishedPrices(msgspec.Struct, frozen=True):
    """The prices of one model, in pico-USD per token, by place."""

    prices: dict[Place, dict[Component, int]]
    left_out: tuple[str, ...]
    """Keys of the source that have no component here."""


class PriceSource:
    """One file of one source."""

    def __init__(self, source: Source, text: str, on: date) -> None:
        """`on`: the day of which dated prices are read. Raises: PriceBookError."""
        if len(text) > MAX_SOURCE_BYTES:
            raise PriceBookError(f"{source}: larger than {MAX_SOURCE_BYTES} bytes")
        self.source, self._on = source, on
        try:
            document = json.loads(text, parse_float=Decimal)
            found = _litellm_models if source == "litellm" else _genai_models
            self._models = dict(found(document))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise PriceBookError(f"{source}: not in its format: {error!r}") from error

    def of(self, name: str) -> PublishedPrices | None:
        """Return the prices of a model. None: the source does not have it.

        Raises: PriceBookError, naming model and key.
        """
        found = self._find(name)
        if found is None:
            return None
        where = f"{self.source}: {found}"
        try:
            if self.source == "litellm":
                return _bookable(_from_litellm(self._models[found], where))
            return _bookable(_from_genai(self._models[found], where, self._on))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PriceBookError(f"{where}: not in its format: {error!r}") from error

    def _find(self, name: str) -> str | None:
        """Find a model by its full name, by its provider's name for it, or by a name that only one
        provider has. Raises: PriceBookError."""
        if name in self._models:
            return name
        provider, _, bare = name.partition("/")
        known = self._models.get(bare)
        if known is not None and known.get("litellm_provider") == provider:
            return bare
        found = sorted(each for each in self._models if each.endswith(f"/{name}"))
        if len(found) > 1:
            candidates = ", ".join(found[:MAX_CANDIDATES])
            raise PriceBookError(f"{self.source}: {name} is ambiguous: {candidates}")
        return found[0] if found else None


def _litellm_models(document: Any) -> Iterator[tuple[str, Any]]:
    yield from document.items()


def _genai_models(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield models under the name "provider/model"."""
    providers = document["providers"] if isinstance(document, dict) else document
    for provider in providers:
        for model in provider["models"]:
            yield f"{provider['id']}/{model['id']}", model


def _from_litellm(fields: Mapping[str, Any], where: str) -> PublishedPrices:
    prices: dict[Place, dict[Component, int]] = {}
    left_out: list[str] = []
    for key, value in fields.items():
        match = LITELLM_KEY.match(key)
        if match is None:
            if "cost" in key:
                left_out.append(key)
            continue
        name, thousands, tier = match.groups()
        place = (LITELLM_TIERS[tier], int(thousands) * 1000 + 1 if thousands else 0)
        # Dollars per token are dollars per call of one token.
        pico = exact_pico(per_call, value, f"{where}: {key}")
        prices.setdefault(place, {})[LITELLM[name]] = pico
    return PublishedPrices(prices, tuple(sorted(left_out)))


def _from_genai(model: Mapping[str, Any], where: str, on: date) -> PublishedPrices:
    prices: dict[Place, dict[Component, int]] = {}
    left_out: list[str] = []
    _read_genai(_in_force(model["prices"], where, on), "default", prices, left_out, where)
    # The last variant of a kind that has begun replaces those before it.
    variants: dict[tuple[tuple[str, str], ...], Mapping[str, Any]] = {
        tuple(variant["when"].items()): variant["prices"]
        for variant in model.get("price_variants", ())
        if _has_begun(variant.get("constraint") or {}, where, on)
    }
    for kind, own in variants.items():
        tier = GENAI_TIERS.get(kind)
        if tier is not None:
            _read_genai(own, tier, prices, left_out, f"{where}: {tier}")
        elif own:
            left_out.append(" ".join(map("=".join, kind)))
    return PublishedPrices(prices, tuple(sorted(left_out)))


def _in_force(prices: Any, where: str, on: date) -> Mapping[str, Any]:
    """Return the last of several dated prices that has begun."""
    if isinstance(prices, dict):
        return prices
    begun = [it for it in prices if _has_begun(it.get("constraint") or {}, where, on)]
    if not begun:
        raise PriceBookError(f"{where}: it has no price yet on {on}")
    found: Mapping[str, Any] = begun[-1]["prices"]
    return found


def _has_begun(constraint: Mapping[str, Any], where: str, on: date) -> bool:
    if not constraint:
        return True
    if set(constraint) - {"type"} != {"start_date"}:
        raise PriceBookError(f"{where}: unknown constraint of a price: {constraint}")
    return date.fromisoformat(constraint["start_date"]) <= on


def _read_genai(
    written: Mapping[str, Any],
    tier: Tier,
    prices: dict[Place, dict[Component, int]],
    left_out: list[str],
    where: str,
) -> None:
    for key, value in written.items():
        component = GENAI.get(key)
        if component is None:
            left_out.append(key)
            continue
        steps = [(0, value)]
        if isinstance(value, dict):
            larger = ((step["start"] + 1, step["price"]) for step in value["tiers"])
            steps = [(0, value["base"]), *larger]
        for least, amount in steps:
            pico = exact_pico(per_million, amount, f"{where}: {key}")
            prices.setdefault((tier, least), {})[component] = pico


def _bookable(found: PublishedPrices) -> PublishedPrices:
    """Leave out the prices of size bands without a price below them, which a price book refuses."""
    kept: dict[Place, dict[Component, int]] = {}
    left_out = list(found.left_out)
    for (tier, least), prices in sorted(found.prices.items()):
        below = {*found.prices.get((tier, 0), {}), *found.prices.get(("default", 0), {})}
        for component, pico in prices.items():
            if not least or component in below:
                kept.setdefault((tier, least), {})[component] = pico
            else:
                left_out.append(f"{component} of {tier} from {least} tokens, not below")
    return PublishedPrices(kept, tuple(left_out))
