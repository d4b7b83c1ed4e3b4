"""OpenAI's organization endpoints for usage and costs: their queries and their pages.

Here a query has the right names and types; which ranges and limits it may have is the report's to
say. The official SDK writes lists as `group_by[]=model`; repeated `group_by=model`, as curl users
write it, means the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from billing.ledger.tags import KEY_PATTERN
from billing.money import to_decimal
from billing.reports.window import BucketWidth
from gateway.request_errors import BadField
from gateway.wire.shared.page_query import OrgQuery
from gateway.wire.shared.refusals import to_bad_value

MAX_QUERY_FIELDS = 500
MAX_FILTERS = 100
"""Values of one kind."""

Number = Annotated[int, Meta(ge=0, le=2**40)]
Filter = Annotated[list[str], Meta(max_length=MAX_FILTERS)]


class ReportQuery(OrgQuery):
    """The window of a report, and what it is of."""

    start_time: Number
    end_time: Number | None = None
    limit: Number | None = None
    page: str | None = None
    project_ids: Filter = []


class Query(ReportQuery):
    api_key_ids: Filter = []


def one_of(*names: str) -> Meta:
    """Return the pattern of one of these names, or of the values of a tag: `tag:team`."""
    return Meta(pattern=rf"^({'|'.join(names)}|tag:{KEY_PATTERN})\Z")


UsageGroup = Annotated[
    str,
    one_of("project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source"),
]
CostGroup = Annotated[str, one_of("project_id", "user_id", "line_item", "api_key_id", "api_source")]


class UsageQuery(Query):
    """The query of `GET /v1/organization/usage/completions`: the arguments of
    `usage_report.usage_completions`."""

    bucket_width: BucketWidth = "1d"
    group_by: list[UsageGroup] = []
    user_ids: Filter = []
    models: Filter = []
    batch: bool | None = None


class CostsQuery(Query):
    """The query of `GET /v1/organization/costs`: the arguments of `usage_report.costs`."""

    bucket_width: Literal["1d"] = "1d"
    group_by: list[CostGroup] = []
    line_items: Filter = []


class ByUserQuery(Query):
    bucket_width: BucketWidth = "1d"
    user_ids: Filter = []


class EmbeddingsUsageQuery(ByUserQuery):
    """The query of `GET /v1/organization/usage/embeddings`: arguments of
    `usage_report.usage_completions`."""

    group_by: list[Literal["project_id", "user_id", "api_key_id", "model"]] = []
    models: Filter = []


# ---- what OpenAI sells besides, and nobody here does: of each the query that it takes there


class ImagesUsageQuery(ByUserQuery):
    group_by: list[Literal["project_id", "user_id", "api_key_id", "model", "size", "source"]] = []
    models: Filter = []
    sizes: list[Literal["256x256", "512x512", "1024x1024", "1792x1792", "1024x1792"]] = []
    sources: list[Literal["image.generation", "image.edit", "image.variation"]] = []


class SessionsUsageQuery(ReportQuery):
    bucket_width: BucketWidth = "1d"
    group_by: list[Literal["project_id"]] = []


class FileSearchUsageQuery(ByUserQuery):
    group_by: list[Literal["project_id", "user_id", "api_key_id", "vector_store_id"]] = []
    vector_store_ids: Filter = []


class WebSearchUsageQuery(ByUserQuery):
    group_by: list[
        Literal["project_id", "user_id", "api_key_id", "model", "context_level", "api_source"]
    ] = []
    models: Filter = []
    context_levels: list[Literal["low", "medium", "high"]] = []


NOT_SOLD: Mapping[str, type[ReportQuery]] = {
    "audio_speeches": EmbeddingsUsageQuery,
    "audio_transcriptions": EmbeddingsUsageQuery,
    "code_interpreter_sessions": SessionsUsageQuery,
    "decisions": UsageQuery,
    "file_search_calls": FileSearchUsageQuery,
    "images": ImagesUsageQuery,
    "moderations": EmbeddingsUsageQuery,
    "vector_stores": SessionsUsageQuery,
    "web_search_calls": WebSearchUsageQuery,
}


Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R")


@cache
def lists_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The parameters that may be given several times: they are lists, empty by default."""
    fields = msgspec.structs.fields(kind)
    return frozenset(each.encode_name for each in fields if each.default_factory is list)


def parse_query(query_string: str, kind: type[Q]) -> Q:
    """A query of any route of administration: nothing unknown, nothing twice that is no list.

    Raises BadField.
    """
    lists = lists_of(kind)
    try:
        pairs = parse_qsl(
            query_string,
            keep_blank_values=True,
            errors="surrogateescape",
            max_num_fields=MAX_QUERY_FIELDS,
        )
    except ValueError as error:
        message = "We could not parse the query string."
        raise BadField(f"{message} ({error})", detail=message) from error
    fields: dict[str, Any] = {}
    for written, value in pairs:
        name = written.removesuffix("[]")
        check_text(value, readable(name))
        if name in lists:
            fields.setdefault(name, []).append(value)
        elif name in fields:
            message = f"Invalid value for '{name}': given more than once."
            raise BadField(message, param=name, detail="This is given more than once.")
        else:
            fields[readable(written if name in kind.__struct_fields__ else name)] = value
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise to_bad_value(str(error)) from error


def check_text(value: str, param: str) -> None:
    """Refuse surrogates, which were no UTF-8, and NULs, which Postgres does not know."""
    if value != readable(value) or "\0" in value:
        message = f"Invalid value for '{param}': it is no UTF-8 text."
        raise BadField(message, param=param, detail="This is no UTF-8 text.")


def readable(text: str) -> str:
    return text.encode(errors="replace").decode()


# ---- pages


class UsageResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result of a usage report. `input_tokens` = uncached + cached + cache-write. A field that
    was not grouped by is null."""

    object: str = "organization.usage.completions.result"
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
    api_source: None = None
    tag: str | None = None
    """The value of the tag that results are grouped by; null for usage without it."""


class EmbeddingsUsageResult(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "organization.usage.embeddings.result"
    input_tokens: int
    num_model_requests: int
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None


UsdNumber = Annotated[Any, Meta(extra_json_schema={"type": "number"})]
"""A Decimal, exact to the pico-USD, where a vendor's shape wants a number. To msgspec's schema a
Decimal is a string, whatever else it is told."""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    value: UsdNumber
    currency: str = "usd"


class CostsResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result of a cost report. `quantity` and its unit are set when grouped by line item."""

    object: str = "organization.costs.result"
    amount: Amount
    line_item: str | None = None
    quantity: int | None = None
    quantity_unit: str | None = None
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    api_source: None = None
    tag: str | None = None


class Bucket(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    object: str = "bucket"
    start_time: int
    end_time: int
    results: Sequence[R]


class Page(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    object: str = "page"
    data: Sequence[Bucket[R]]
    has_more: bool
    next_page: str | None


_encoder = msgspec.json.Encoder(decimal_format="number")


def to_amount(amount_pico: int) -> Amount:
    return Amount(value=to_decimal(amount_pico))


def encode_page(page: Page[Any]) -> bytes:
    return _encoder.encode(page)
