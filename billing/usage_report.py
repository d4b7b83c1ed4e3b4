"""What an org used and what it costs, in UTC buckets: the numbers behind OpenAI's
`/v1/organization/usage/completions` and `/v1/organization/costs`.

Above: the routes, which give these rows their wire names. Below: `tables`. Buckets are whole: the
first begins at or before `start_time`, the last ends at or after `end_time`; an empty bucket has no
rows. Days and hours come from the hourly rollup, minutes from the events. Waste is nobody's usage.

To the wire (OpenAI): input_tokens = quantities.input_total, input_cached_tokens = cache_read,
input_cache_write_tokens = cache_write_5m + cache_write_1h, input_uncached_tokens = uncached_input,
output_tokens = output_total; amount.value = money.to_decimal(amount_pico), currency "usd",
quantity_unit "tokens" where there is a quantity. Nobody here is a user and no usage has an
api_source: grouping by them is accepted, `user_id` stays None, and a filter by user finds nothing.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Literal, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.errors import ReportQueryError
from billing.events import COMPONENTS, Quantities
from billing.money import Pico
from billing.tables import AMOUNTS, to_moment, usage_events, usage_hourly

OpenRows = Callable[[str], AbstractAsyncContextManager[AsyncConnection]]
"""From an org to a transaction that may see its rows; opened once the query has been checked."""
BucketWidth = Literal["1m", "1h", "1d"]
WIDTH_S: dict[str, int] = {"1m": 60, "1h": 3600, "1d": 86400}
USAGE_LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
"""Buckets a page: default and most."""
COST_LIMITS = (7, 180)
MAX_TIME = 253_402_300_800
"""The year 10000."""
PAGE_PREFIX = "page_"

COLUMN_OF_GROUP = {
    "project_id": "project",
    "api_key_id": "key",
    "model": "model",
    "batch": "batch",
    "service_tier": "tier",
    "user_id": None,
    "api_source": None,
}
COST_GROUPS = ("project_id", "user_id", "line_item", "api_key_id", "api_source")
LINE_ITEMS = {
    "uncached_input": "input_tokens",
    "cache_read": "cached_input_tokens",
    "cache_write_5m": "cache_write_5m_tokens",
    "cache_write_1h": "cache_write_1h_tokens",
    "output": "output_tokens",
    "reasoning_output": "reasoning_tokens",
    "embedding_input": "embedding_tokens",
    "tool_call": "tool_calls",
    "batch_queue": "batch_queue",
}
"""A line item is "{model}, {this}"."""


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group of one bucket; a name is None unless grouped by it."""

    num_model_requests: int
    quantities: Quantities
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group of one bucket. `quantity` counts tokens and is given with a line item."""

    amount_pico: Pico
    quantity: int | None = None
    line_item: str | None = None
    project_id: str | None = None
    api_key_id: str | None = None


Row = TypeVar("Row", UsageRow, CostRow)


class ReportBucket(msgspec.Struct, Generic[Row], frozen=True, kw_only=True):
    """[start_time, end_time) in Unix seconds."""

    start_time: int
    end_time: int
    results: list[Row]


class ReportPage(msgspec.Struct, Generic[Row], frozen=True, kw_only=True):
    """`next_page`, given back as `page`, goes on where this page ends; None: there is no more."""

    buckets: list[ReportBucket[Row]]
    next_page: str | None


async def usage_completions(
    open_rows: OpenRows,
    *,
    org: str,
    start_time: int,
    end_time: int | None = None,
    bucket_width: BucketWidth = "1d",
    project_ids: Sequence[str] = (),
    user_ids: Sequence[str] = (),
    api_key_ids: Sequence[str] = (),
    models: Sequence[str] = (),
    batch: bool | None = None,
    group_by: Sequence[str] = (),
    limit: int | None = None,
    page: str | None = None,
) -> ReportPage[UsageRow]:
    """Tokens and requests; times are Unix seconds, an empty filter does not filter, no `end_time`
    means now.

    Raises: ReportQueryError, naming the parameter.
    """
    if bucket_width not in WIDTH_S:
        raise ReportQueryError(f"one of {', '.join(WIDTH_S)}", param="bucket_width")
    _known(group_by, COLUMN_OF_GROUP)
    limits = USAGE_LIMITS[bucket_width]
    window = _window(start_time, end_time, WIDTH_S[bucket_width], limit, limits, page)
    source = _minutes() if bucket_width == "1m" else _hours()
    filters = {"project": project_ids, "key": api_key_ids, "model": models}
    where = _where(source, org, window, filters)
    if user_ids:
        where.append(sa.false())
    if batch is not None:
        where.append(source.c.batch == batch)
    found: defaultdict[int, list[UsageRow]] = defaultdict(list)
    for row in await _aggregate(open_rows, org, source, window.width, where, group_by):
        quantities = Quantities(**{name: int(row[name]) for name in COMPONENTS})
        found[row["bucket"]].append(
            UsageRow(
                num_model_requests=int(row["num_requests"]),
                quantities=quantities,
                **_names(row, group_by),
            )
        )
    buckets = [
        ReportBucket(start_time=start, end_time=start + window.width, results=found[start])
        for start in window.starts
    ]
    return ReportPage(buckets=buckets, next_page=window.next_page)


async def costs(
    open_rows: OpenRows,
    *,
    org: str,
    start_time: int,
    end_time: int | None = None,
    bucket_width: Literal["1d"] = "1d",
    project_ids: Sequence[str] = (),
    api_key_ids: Sequence[str] = (),
    line_items: Sequence[str] = (),
    group_by: Sequence[str] = (),
    limit: int | None = None,
    page: str | None = None,
) -> ReportPage[CostRow]:
    """Money by day; arguments and errors as in `usage_completions`."""
    if bucket_width != "1d":
        raise ReportQueryError("only 1d", param="bucket_width")
    _known(group_by, COST_GROUPS)
    window = _window(start_time, end_time, WIDTH_S["1d"], limit, COST_LIMITS, page)
    source = _hours()
    where = _where(source, org, window, {"project": project_ids, "key": api_key_ids})
    names = [name for name in ("project_id", "api_key_id") if name in group_by]
    by_item = "line_item" in group_by
    totals: defaultdict[int, defaultdict[tuple[Any, ...], list[int]]]
    totals = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for row in await _aggregate(open_rows, org, source, window.width, where, [*names, "model"]):
        group = tuple(_names(row, names).items())
        for component, amount in zip(COMPONENTS, AMOUNTS, strict=True):
            item = f"{row['model']}, {LINE_ITEMS[component]}"
            if row[component] and (not line_items or item in line_items):
                total = totals[row["bucket"]][group + ((("line_item", item),) if by_item else ())]
                total[0] += int(row[amount])
                total[1] += int(row[component])
    buckets = [
        ReportBucket(
            start_time=start,
            end_time=start + window.width,
            results=[
                CostRow(amount_pico=amount, quantity=tokens if by_item else None, **dict(group))
                for group, (amount, tokens) in sorted(totals[start].items())
            ],
        )
        for start in window.starts
    ]
    return ReportPage(buckets=buckets, next_page=window.next_page)


class _Window(msgspec.Struct, frozen=True):
    starts: range
    width: int
    next_page: str | None


def _window(
    start_time: int,
    end_time: int | None,
    width: int,
    limit: int | None,
    limits: tuple[int, int],
    page: str | None,
) -> _Window:
    """The buckets of one page."""
    default, most = limits
    limit = default if limit is None else limit
    if not 1 <= limit <= most:
        raise ReportQueryError(f"between 1 and {most}", param="limit")
    if not 0 <= start_time < MAX_TIME:
        raise ReportQueryError("Unix seconds", param="start_time")
    end = int(time.time()) + 1 if end_time is None else end_time
    if end > MAX_TIME or (end_time is not None and end <= start_time):
        raise ReportQueryError("must be after start_time", param="end_time")
    first = start_time - start_time % width
    if page is not None:
        digits = page.removeprefix(PAGE_PREFIX)
        known = page.startswith(PAGE_PREFIX) and re.fullmatch("[0-9]{1,12}", digits)
        if not known or not first < int(digits) < end or int(digits) % width:
            raise ReportQueryError("not a next_page of this query", param="page")
        first = int(digits)
    following = first + limit * width
    starts = range(first, min(following, end), width)
    return _Window(starts, width, f"{PAGE_PREFIX}{following}" if following < end else None)


def _known(group_by: Sequence[str], allowed: Iterable[str]) -> None:
    if unknown := [name for name in group_by if name not in allowed]:
        raise ReportQueryError(f"{unknown[0]} is not one of {', '.join(allowed)}", param="group_by")


def _hours() -> sa.Subquery:
    return sa.select(usage_hourly, usage_hourly.c.hour.label("moment")).subquery()


def _minutes() -> sa.Subquery:
    """Events in the shape of the rollup, one row each."""
    events = usage_events.c
    total = sum((events[name] for name in COMPONENTS), sa.literal(0))
    return (
        sa.select(
            usage_events,
            events.admitted_at.label("moment"),
            (events.lane == "batch").label("batch"),
            sa.literal(1).label("num_requests"),
        )
        .where(events.kind == "usage", total > 0)
        .subquery()
    )


def _where(
    source: sa.Subquery, org: str, window: _Window, filters: dict[str, Sequence[str]]
) -> list[sa.ColumnElement[bool]]:
    begin, end = window.starts.start, window.starts.start + len(window.starts) * window.width
    return [
        source.c.org == org,
        source.c.moment >= to_moment(begin),
        source.c.moment < to_moment(end),
        *(source.c[name].in_(wanted) for name, wanted in filters.items() if wanted),
    ]


async def _aggregate(
    open_rows: OpenRows,
    org: str,
    source: sa.Subquery,
    width: int,
    where: list[sa.ColumnElement[bool]],
    group_by: Sequence[str],
) -> Sequence[sa.RowMapping]:
    """Sums by bucket and group, in their order."""
    epoch = sa.cast(sa.extract("epoch", source.c.moment), sa.Numeric)
    bucket = sa.cast(sa.func.floor(epoch / width) * width, sa.BigInteger).label("bucket")
    columns = dict.fromkeys(COLUMN_OF_GROUP[name] for name in group_by)
    groups = [source.c[column] for column in columns if column]
    sums = [
        sa.func.sum(source.c[name]).label(name) for name in (*COMPONENTS, *AMOUNTS, "num_requests")
    ]
    query = sa.select(bucket, *groups, *sums).where(*where).group_by(bucket, *groups)
    async with open_rows(org) as connection:
        found = await connection.execute(query.order_by(bucket, *groups))
        return found.mappings().all()


def _names(row: sa.RowMapping, group_by: Sequence[str]) -> dict[str, Any]:
    return {name: row[column] for name in group_by if (column := COLUMN_OF_GROUP[name])}
