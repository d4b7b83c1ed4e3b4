"""/v1/admin/price_lists: what is priced now and later, and what else is agreed. To be read; prices
are changed in the price book's files, which only ever grow.

`default` is everybody's; of the others an org sees the one that it pays by, an operator all of
them. The prices of such a list are those that differ from everybody's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from billing.ledger.price_sets import content_of
from billing.pricing.adjustments import TieredPrice
from billing.pricing.entries import DEFAULT_LIST, DatedEntry, PriceEntry
from billing.pricing.lists import PeriodRule, Rule
from billing.pricing.price_book import PriceBook
from gateway.principal import Principal
from gateway.routes.shared.pages import page_of
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.errors import NotFound
from gateway.wire.shared.page_query import PageQuery

PICO_PER_MICRO = 1_000_000
"""A million tokens at one pico-USD each cost a micro-USD."""


class PricesQuery(PageQuery):
    model: str | None = None
    """Lists only prices of this model."""
    include_past: bool = False


class RuleView(msgspec.Struct, frozen=True, kw_only=True):
    """`model`, `tier` and `component` null: any. `discount_bps`: hundredths of a percent off the
    price. `quantity`: units that are free in a period. `kind` and `steps` (pico-USD per unit): what
    the quantity of a period costs. `amount_pico`: due for a period in any case."""

    object: str = "price_rule"
    id: str
    model: str | None
    tier: str | None
    component: str | None
    valid_from: int
    valid_to: int | None
    discount_bps: int | UnsetType = UNSET
    quantity: int | UnsetType = UNSET
    kind: str | UnsetType = UNSET
    steps: list[tuple[int | None, int]] | UnsetType = UNSET
    amount_pico: int | UnsetType = UNSET


class PriceListView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "price_list"
    id: str
    currency: str = "usd"
    num_models: int
    """The number of models that have a price of the list's own now."""
    rules: list[RuleView]
    """The rules that are in force now or later."""


class PriceView(msgspec.Struct, frozen=True, kw_only=True):
    """`valid_to` null: until another one begins. `min_total_input`: of requests of at least so many
    tokens of input. Of a component that counts calls the price is per call."""

    object: str = "price"
    id: str
    model: str
    tier: str
    component: str
    min_total_input: int
    pico_usd_per_token: int
    usd_per_million_tokens: str
    valid_from: int
    valid_to: int | None


def to_views(entry: PriceEntry) -> Iterator[PriceView]:
    for component, price in entry.prices.items():
        pico = price.pico_per_token
        yield PriceView(
            id=price.price_id,
            model=entry.model,
            tier=entry.tier,
            component=component,
            min_total_input=entry.min_total_input,
            pico_usd_per_token=pico,
            usd_per_million_tokens=f"{Decimal(pico) / PICO_PER_MICRO:f}",
            **to_validity(entry),
        )


def to_rule(rule: Rule) -> RuleView:
    content = content_of(rule)
    if isinstance(rule, PeriodRule) and isinstance(rule.content, TieredPrice):
        content["steps"] = [(step.up_to, step.pico_per_unit) for step in rule.content.steps]
    scope = msgspec.structs.asdict(rule.scope)
    return RuleView(id=rule.id, **scope, **to_validity(rule), **content)


def to_validity(entry: DatedEntry) -> dict[str, Any]:
    end = entry.valid_to
    return {
        "valid_from": int(entry.valid_from.timestamp()),
        "valid_to": None if end is None else int(end.timestamp()),
    }


def is_over(entry: DatedEntry, now: float) -> bool:
    return entry.valid_to is not None and entry.valid_to.timestamp() <= now


def to_list_view(book: PriceBook, price_list: str) -> PriceListView:
    now = time.time()
    own = (entry for entry in book if entry.price_list == price_list)
    return PriceListView(
        id=price_list,
        num_models=len({entry.model for entry in own if entry.covers(now)}),
        rules=[
            to_rule(rule)
            for rule in book.lists.rules
            if rule.price_list == price_list and not is_over(rule, now)
        ],
    )


def lists_of(principal: Principal, book: PriceBook) -> set[str]:
    """Return the price lists that the caller may see."""
    if principal.is_operator:
        return book.lists.names
    return {DEFAULT_LIST, principal.price_list}


def check_list(request: AdminRequest, price_list: str) -> PriceBook:
    """Return the price book that has the list. Raises: NotFound."""
    book = request.services.generation.price_book
    if price_list not in lists_of(request.user, book):
        raise NotFound("price_list", f"no price list {price_list!r}")
    return book


lists = AdminResource[PriceListView](
    path="/v1/admin/price_lists",
    id_name="price_list",
    tag="Prices",
    view=PriceListView,
    checks_ids=False,
)
prices = lists.below("/prices", PriceView)


@lists.page("List the price lists", PageQuery)
async def list_(request: AdminRequest, query: PageQuery) -> tuple[list[PriceListView], bool]:
    book = request.services.generation.price_book
    names, more = page_of(lists_of(request.user, book), query)
    return [to_list_view(book, name) for name in names], more


@lists.get("One price list")
async def retrieve(request: AdminRequest) -> PriceListView:
    return to_list_view(check_list(request, request.id), request.id)


@prices.page("What is priced now and later, by price id", PricesQuery)
async def list_prices(request: AdminRequest, query: PricesQuery) -> tuple[list[PriceView], bool]:
    book, now = check_list(request, request.id), time.time()
    views = {
        view.id: view
        for entry in book
        if entry.price_list == request.id
        and query.model in (None, entry.model)
        and (query.include_past or not is_over(entry, now))
        for view in to_views(entry)
    }
    ids, more = page_of(views, query)
    return [views[price_id] for price_id in ids], more


routes = [list_, retrieve, list_prices]
