"""OpenAI's organization endpoints for usage and costs: their queries and their pages.

Above: `routes`. Below: msgspec. Pure shapes and parsing; the sums are `billing.usage_report`'s. The
official SDK writes lists as `group_by[]=model`; repeated `group_by=model`, as curl users write it,
means the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from gateway.fleet.errors import BadField
from gateway.wire.from_openai import to_bad_field

MAX_QUERY_FIELDS = 500
MAX_FILTERS = 100
"""Of one kind."""
PICO_DIGITS = 12
CURRENCY = "usd"

BucketWidth = Literal["1m", "1h", "1d"]
BUCKET_LIMITS: dict[BucketWidth, tuple[int, int]] = {
    "1m": (60, 1440),
    "1h": (24, 168),
    "1d": (7, 31),
}
"""Number of buckets: default, maximum."""
COST_LIMITS = (7, 180)

UnixSeconds = Annotated[int, Meta(ge=0, le=2**40)]
Limit = Annotated[int, Meta(ge=1)]
Filter = Annotated[list[str], Meta(max_length=MAX_FILTERS)]


class _Query(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    start_time: UnixSeconds
    """Inclusive."""
    end_time: UnixSeconds | None = None
    """Exclusive; None: now."""
    page: str | None = None
    """`next_page` of the page before."""
    project_ids: Filter = []
    api_key_ids: Filter = []


class UsageQuery(_Query):
    """`GET /v1/organization/usage/completions`. `limit` is set in what `parse_usage_query`
    returns.
    """

    bucket_width: BucketWidth = "1d"
    limit: Limit | None = None
    group_by: list[
        Literal["project_id", "user_id", "api_key_id", "model", "batch", "service_tier"]
    ] = []
    user_ids: Filter = []
    models: Filter = []
    batch: bool | None = None


class CostsQuery(_Query):
    """`GET /v1/organization/costs`. `limit` is set in what `parse_costs_query` returns."""

    bucket_width: Literal["1d"] = "1d"
    limit: Limit | None = None
    group_by: list[Literal["project_id", "user_id", "api_key_id", "line_item"]] = []
    line_items: Filter = []


LISTS = frozenset({"group_by", "project_ids", "api_key_ids", "user_ids", "models", "line_items"})

Q = TypeVar("Q", UsageQuery, CostsQuery)


def parse_usage_query(query_string: str) -> UsageQuery:
    """Raises BadField."""
    query = parse(query_string, UsageQuery)
    return limited(query, BUCKET_LIMITS[query.bucket_width])


def parse_costs_query(query_string: str) -> CostsQuery:
    """Raises BadField."""
    return limited(parse(query_string, CostsQuery), COST_LIMITS)


def parse(query_string: str, kind: type[Q]) -> Q:
    try:
        pairs = parse_qsl(
            query_string,
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_QUERY_FIELDS,
        )
    except ValueError as error:
        raise BadField(f"We could not parse the query string. ({error})") from error
    fields: dict[str, Any] = {}
    for name, value in pairs:
        name = name.removesuffix("[]")
        if name in LISTS:
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise BadField(f"Invalid value for '{name}': given more than once.", param=name)
        else:
            fields[name] = value
    try:
        query = msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise to_bad_field(str(error)) from error
    if query.end_time is not None and query.end_time <= query.start_time:
        raise BadField("Invalid value for 'end_time': not after 'start_time'.", param="end_time")
    return query


def limited(query: Q, limits: tuple[int, int]) -> Q:
    default, maximum = limits
    if query.limit is not None and query.limit > maximum:
        raise BadField(
            f"Invalid value for 'limit': at most {maximum} buckets of {query.bucket_width}.",
            param="limit",
        )
    return msgspec.structs.replace(query, limit=query.limit or default)


# ---- pages


class UsageResult(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` = uncached + cached + cache-write. A field that was not grouped by is null."""

    object: Literal["organization.usage.completions.result"] = (
        "organization.usage.completions.result"
    )
    input_tokens: int
    output_tokens: int
    num_model_requests: int
    input_uncached_tokens: int
    input_cached_tokens: int
    input_cache_write_tokens: int
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    value: Decimal
    """Exact, to the pico-USD."""
    currency: str = CURRENCY


class CostsResult(msgspec.Struct, frozen=True, kw_only=True):
    """`quantity` and its unit are set when grouped by line item."""

    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: Amount
    line_item: str | None = None
    quantity: int | None = None
    quantity_unit: str | None = None
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: Sequence[UsageResult | CostsResult]


class Page(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["page"] = "page"
    data: Sequence[Bucket]
    has_more: bool
    next_page: str | None


_encoder = msgspec.json.Encoder(decimal_format="number")


def to_amount(amount_pico: int) -> Amount:
    return Amount(value=Decimal(amount_pico).scaleb(-PICO_DIGITS))


def encode_page(page: Page) -> bytes:
    return _encoder.encode(page)
