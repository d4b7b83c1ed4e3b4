"""/v1/admin/price_lists: what is priced now and later. To be read; prices are changed in the price
book's files, which only ever grow.

Above: `app`. Below: the worker's price book, by which it bills. There is one list, `default`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.params import FromPath

from billing.price_book import PriceEntry
from gateway.auth.policy import SCOPE_ADMIN_READ
from gateway.principal import Principal
from gateway.routes.access import needs, services
from gateway.routes.conditional import JSON
from gateway.routes.operations import describes
from gateway.routes.pages import Listing, PageQuery, page_of, to_listing
from gateway.tenancy.errors import NotFound
from gateway.wire.openai_admin import parse_query

DEFAULT = "default"
PICO_PER_MICRO = 1_000_000
"""A million tokens at one pico-USD each cost a micro-USD."""
TAGS = ["Prices"]
Asked = Request[Principal, Any, Any]


class PricesQuery(PageQuery):
    model: str | None = None
    """Of this one alone."""
    include_past: bool = False


class PriceListView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "price_list"
    id: str
    currency: str = "usd"
    num_models: int
    """With a price now."""


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
            valid_from=int(entry.valid_from.timestamp()),
            valid_to=None if entry.valid_to is None else int(entry.valid_to.timestamp()),
        )


def is_over(entry: PriceEntry, now: float) -> bool:
    return entry.valid_to is not None and entry.valid_to.timestamp() <= now


def to_list_view(entries: Iterable[PriceEntry]) -> PriceListView:
    now = time.time()
    priced = {entry.model for entry in entries if entry.covers(now)}
    return PriceListView(id=DEFAULT, num_models=len(priced))


def check_list(price_list: str) -> None:
    """Raises: NotFound."""
    if price_list != DEFAULT:
        raise NotFound("price_list", f"no price list {price_list!r}")


@get(
    "/v1/admin/price_lists",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the price lists",
    operation_class=describes(query=PageQuery, answer=Listing[PriceListView]),
)
async def list_(request: Asked) -> Response[bytes]:
    query = parse_query(request.url.query, PageQuery)
    found = [to_list_view(services(request).desk.price_book) for _ in page_of([DEFAULT], query)]
    return Response(msgspec.json.encode(to_listing(found, query)), media_type=JSON)


@get(
    "/v1/admin/price_lists/{price_list:str}",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="One price list",
    operation_class=describes(answer=PriceListView),
)
async def retrieve(request: Asked, price_list: FromPath[str]) -> Response[bytes]:
    check_list(price_list)
    found = to_list_view(services(request).desk.price_book)
    return Response(msgspec.json.encode(found), media_type=JSON)


@get(
    "/v1/admin/price_lists/{price_list:str}/prices",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="What is priced now and later, by price id",
    operation_class=describes(query=PricesQuery, answer=Listing[PriceView]),
)
async def list_prices(request: Asked, price_list: FromPath[str]) -> Response[bytes]:
    check_list(price_list)
    query = parse_query(request.url.query, PricesQuery)
    now = time.time()
    views = {
        view.id: view
        for entry in services(request).desk.price_book
        if query.model in (None, entry.model) and (query.include_past or not is_over(entry, now))
        for view in to_views(entry)
    }
    found = [views[price_id] for price_id in page_of(views, query)]
    return Response(msgspec.json.encode(to_listing(found, query)), media_type=JSON)


routes = [list_, retrieve, list_prices]
