"""Report an org's usage and costs in UTC buckets: the numbers behind OpenAI's
`/v1/organization/usage/completions` and `/costs` and Anthropic's
`/v1/organizations/usage_report/messages` and `/cost_report`.

Days come from the daily rollup, hours from the hourly one, minutes from the events. An empty bucket
has no rows. Waste is not reported.

OpenAI's fields: input_tokens = quantities.prompt_total, input_cached_tokens = cache_read,
input_cache_write_tokens = cache_write_5m + cache_write_1h, input_uncached_tokens = uncached_input,
output_tokens = output_total; amount.value = money.to_decimal(amount_pico), currency "usd".
Embeddings have a report of their own. A user's usage is that of the user's keys. Grouping by
api_source is accepted; its value is always null.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.errors import ReportQueryError
from billing.events import COMPONENT_KINDS, COMPONENTS, Component, Quantities
from billing.money import Pico
from billing.reports.window import WIDTH_S, BucketWidth, ReportWindow, window_of
from billing.tables import (
    AMOUNTS,
    EPOCH,
    GROUPED,
    to_moment,
    usage_daily,
    usage_events,
    usage_hourly,
    usage_tags_daily,
)

OpenRows = Callable[[str], AbstractAsyncContextManager[AsyncConnection]]
"""Opens a transaction that sees an org's rows."""
USAGE_LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
"""The default and the largest number of buckets on a page."""
COST_LIMITS = (7, 180)

OWNERS = {"user_id": "user_id", "service_account_id": "service_account_id"}
"""Groups that are columns of the API key."""
COLUMN_OF_GROUP = {
    "project_id": "project",
    "api_key_id": "key",
    "model": "model",
    "batch": "batch",
    "service_tier": "tier",
    "served_as": "served_as",
    "api_source": None,
    **OWNERS,
}
BATCH = "batch"
TAG = "tag"
BY_TAG = "tag:"
"""The prefix of a group by the values of a tag, which only days have (`ledger.tags`)."""
COST_GROUPS = (*COLUMN_OF_GROUP, "line_item", "component")
NUM_OF = {False: "num_others", True: "num_embeddings"}
"""The column that counts the requests with embedding input, and the one of all others."""
SUM_OF_COSTS = (*COMPONENTS, *AMOUNTS)

_keys = sa.table("api_keys", sa.column("id"), *(sa.column(each) for each in OWNERS.values()))


def line_item(model: str | None, component: Component) -> str:
    return f"{model}, {COMPONENT_KINDS[component].line_item}"


class ReportGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a group; a name is None unless the report is grouped by it."""

    project_id: str | None = None
    user_id: str | None = None
    service_account_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None
    served_as: str | None = None
    tag: str | None = None
    """The tag's value; also None for usage without the tag."""


class UsageRow(ReportGroup, frozen=True, kw_only=True):
    """The usage of one group in one bucket."""

    num_model_requests: int
    quantities: Quantities


class CostRow(ReportGroup, frozen=True, kw_only=True):
    """The cost of one group in one bucket. `quantity` is given with a line item or a component,
    whose tokens or calls it counts."""

    amount_pico: Pico
    quantity: int | None = None
    unit: str | None = None
    line_item: str | None = None
    component: Component | None = None


Row = TypeVar("Row", UsageRow, CostRow)


class ReportBucket(msgspec.Struct, Generic[Row], frozen=True, kw_only=True):
    """[start_time, end_time) in Unix seconds."""

    start_time: int
    end_time: int
    results: list[Row]


class ReportPage(msgspec.Struct, Generic[Row], frozen=True, kw_only=True):
    """A page of a report. `next_page` is the `page` of the next query; None: this is the last."""

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
    service_account_ids: Sequence[str] = (),
    api_key_ids: Sequence[str] = (),
    models: Sequence[str] = (),
    batch: bool | None = None,
    served_as: Sequence[str] = (),
    group_by: Sequence[str] = (),
    limit: int | None = None,
    page: str | None = None,
    embeddings: bool = False,
) -> ReportPage[UsageRow]:
    """Report tokens and requests. Times are Unix seconds; an empty filter does not filter; without
    `end_time` the report ends now. `served_as`: the tier, or BATCH for a batch in the default tier.
    `embeddings`: report requests with embedding input, or all others.

    Raises: ReportQueryError, naming the parameter.
    """
    if bucket_width not in WIDTH_S:
        raise ReportQueryError(f"one of {', '.join(WIDTH_S)}", param="bucket_width")
    source, group_by = _source(bucket_width, group_by, COLUMN_OF_GROUP)
    limits = USAGE_LIMITS[bucket_width]
    window = window_of(start_time, end_time, WIDTH_S[bucket_width], limit, limits, page)
    filters = {"project": project_ids, "key": api_key_ids, "model": models, "served_as": served_as}
    where = [
        *_where(source, org, window, filters),
        source.c[NUM_OF[embeddings]] != 0,
        _no_calls_alone(source),
        *_of_owners(source, {"user_id": user_ids, "service_account_id": service_account_ids}),
    ]
    if batch is not None:
        where.append(source.c.batch == batch)
    found: defaultdict[int, list[UsageRow]] = defaultdict(list)
    sums = (*COMPONENTS, NUM_OF[embeddings])
    for row in await _aggregate(open_rows, org, source, window, where, group_by, sums):
        *counts, num_requests = row.sums
        if not any(row.sums):
            continue  # all usage of this group has the tag
        found[row.bucket].append(
            UsageRow(
                num_model_requests=num_requests,
                quantities=Quantities(**dict(zip(COMPONENTS, counts, strict=True))),
                **row.names,
            )
        )
    return _page(window, found)


async def nothing_used(
    *,
    start_time: int,
    end_time: int | None = None,
    bucket_width: BucketWidth = "1d",
    limit: int | None = None,
    page: str | None = None,
) -> ReportPage[UsageRow]:
    """Return empty buckets, for a kind of usage that does not exist here.

    Raises: ReportQueryError.
    """
    limits = USAGE_LIMITS[bucket_width]
    window = window_of(start_time, end_time, WIDTH_S[bucket_width], limit, limits, page)
    return _page(window, defaultdict[int, list[UsageRow]](list))


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
    """Report costs by day; arguments and errors as in `usage_completions`."""
    if bucket_width != "1d":
        raise ReportQueryError("only 1d", param="bucket_width")
    source, group_by = _source("1d", group_by, COST_GROUPS)
    window = window_of(start_time, end_time, WIDTH_S["1d"], limit, COST_LIMITS, page)
    where = _where(source, org, window, {"project": project_ids, "key": api_key_ids})
    names = [name for name in (*COLUMN_OF_GROUP, TAG) if name in group_by]
    by_model = dict.fromkeys([*names, "model"])
    totals = _Totals(group_by, line_items)
    for row in await _aggregate(open_rows, org, source, window, where, [*by_model], SUM_OF_COSTS):
        totals.add(row)
    return _page(window, totals.rows())


class _Aggregate(msgspec.Struct, frozen=True, kw_only=True):
    bucket: int
    names: dict[str, Any]
    """The name in each group."""
    sums: tuple[int, ...]


class _Totals:
    """Adds up costs by bucket and group, which may be a single component."""

    def __init__(self, group_by: Collection[str], line_items: Collection[str]) -> None:
        self._group_by, self._line_items = group_by, line_items
        self._by_kind = "line_item" in group_by or "component" in group_by
        self._sums: defaultdict[int, defaultdict[tuple[tuple[str, Any], ...], list[int]]]
        self._sums = defaultdict(lambda: defaultdict(lambda: [0, 0]))

    def add(self, row: _Aggregate) -> None:
        named = [item for item in row.names.items() if item[0] in self._group_by]
        counts, amounts = row.sums[: len(COMPONENTS)], row.sums[len(COMPONENTS) :]
        for component, quantity, amount in zip(COMPONENTS, counts, amounts, strict=True):
            item = line_item(row.names["model"], component)
            if not quantity or (self._line_items and item not in self._line_items):
                continue
            group = tuple(named)
            group += (("line_item", item),) if "line_item" in self._group_by else ()
            group += (("component", component),) if "component" in self._group_by else ()
            group += (("unit", COMPONENT_KINDS[component].unit),) if self._by_kind else ()
            total = self._sums[row.bucket][group]
            total[0] += amount
            total[1] += quantity

    def rows(self) -> dict[int, list[CostRow]]:
        return {
            bucket: [
                CostRow(
                    amount_pico=amount, quantity=count if self._by_kind else None, **dict(group)
                )
                for group, (amount, count) in sorted(groups.items(), key=_in_order)
            ]
            for bucket, groups in self._sums.items()
        }


def _in_order(item: tuple[tuple[tuple[str, Any], ...], Any]) -> list[tuple[bool, str]]:
    """Return a sort key with None last."""
    return [(value is None, str(value)) for _, value in item[0]]


def _page(window: ReportWindow, found: dict[int, list[Row]]) -> ReportPage[Row]:
    buckets = [
        ReportBucket(start_time=start, end_time=start + window.width, results=found.get(start, []))
        for start in window.starts
    ]
    return ReportPage(buckets=buckets, next_page=window.next_page)


def _source(
    width: BucketWidth, group_by: Sequence[str], allowed: Iterable[str]
) -> tuple[sa.Subquery, list[str]]:
    """Return the rows to add up, and the groups, with TAG for a tag. Raises: ReportQueryError."""
    keys = [name.removeprefix(BY_TAG) for name in group_by if name.startswith(BY_TAG)]
    others = [name for name in group_by if not name.startswith(BY_TAG)]
    if unknown := [name for name in others if name not in allowed]:
        raise ReportQueryError(f"{unknown[0]} is not one of {', '.join(allowed)}", param="group_by")
    if not keys:
        return _SOURCES[width], others
    if len(keys) > 1:
        raise ReportQueryError("one tag at most", param="group_by")
    if width != "1d":
        raise ReportQueryError("tags are counted by day", param="group_by")
    return _by_tag(keys[0]), [*others, TAG]


def _by_tag(key: str) -> sa.Subquery:
    """Return days by the values of a tag. Usage without it is all usage less that with it."""
    own, of_tag = usage_daily.c, usage_tags_daily.c
    names = ("org", "day", *GROUPED, "batch")
    counted = (*SUM_OF_COSTS, "num_requests", "num_embeddings")
    nobody = sa.null().cast(sa.Text).label(TAG)
    with_it = sa.select(*(of_tag[name] for name in (*names, *counted)), of_tag.value.label(TAG))
    less = [(-of_tag[name]).label(name) for name in counted]
    without = sa.select(*(of_tag[name] for name in names), *less, nobody)
    rows = sa.union_all(
        sa.select(*(own[name] for name in (*names, *counted)), nobody),
        with_it.where(of_tag.tag == key),
        without.where(of_tag.tag == key),
    ).subquery()
    served_as = _served_as(rows.c.tier, rows.c.batch)
    return sa.select(rows, rows.c.day.label("moment"), served_as, _num_others(rows)).subquery()


def _served_as(tier: sa.ColumnElement[str], batch: sa.ColumnElement[bool]) -> sa.ColumnElement[str]:
    return sa.case((sa.and_(tier == "default", batch), BATCH), else_=tier).label("served_as")


def _rolled(table: sa.Table, unit: str) -> sa.Subquery:
    own = table.c
    served_as = _served_as(own.tier, own.batch)
    return sa.select(table, own[unit].label("moment"), served_as, _num_others(table)).subquery()


def _num_others(rows: sa.FromClause) -> sa.ColumnElement[int]:
    return (rows.c.num_requests - rows.c.num_embeddings).label("num_others")


def _minutes() -> sa.Subquery:
    """Return events as rows of a rollup."""
    events = usage_events.c
    batch, total = events.lane == BATCH, sum((events[name] for name in COMPONENTS), sa.literal(0))
    made = sa.case((events.embedding_input > 0, 1), else_=0)
    return (
        sa.select(
            usage_events,
            events.admitted_at.label("moment"),
            batch.label("batch"),
            _served_as(events.tier, batch),
            made.label("num_embeddings"),
            (1 - made).label("num_others"),
        )
        .where(events.kind == "usage", total > 0)
        .subquery()
    )


_SOURCES = {
    "1m": _minutes(),
    "1h": _rolled(usage_hourly, "hour"),
    "1d": _rolled(usage_daily, "day"),
}


def _where(
    source: sa.Subquery, org: str, window: ReportWindow, filters: dict[str, Sequence[str]]
) -> list[sa.ColumnElement[bool]]:
    return [
        source.c.org == org,
        source.c.moment >= to_moment(window.starts.start),
        source.c.moment < to_moment(window.end),
        *(source.c[name].in_(wanted) for name, wanted in filters.items() if wanted),
    ]


def _no_calls_alone(source: sa.Subquery) -> sa.ColumnElement[bool]:
    """Leave out calls of MCP servers alone, for which no tokens were generated."""
    others = [source.c[name] for name in COMPONENTS if name != "tool_call"]
    return sa.or_(source.c.tool_call == 0, sum(others, sa.literal(0)) != 0)


def _of_owners(
    source: sa.Subquery, owners: dict[str, Sequence[str]]
) -> Iterable[sa.ColumnElement[bool]]:
    for column, wanted in owners.items():
        if wanted:
            owned = sa.select(_keys.c.id).where(_keys.c[column].in_(wanted))
            yield source.c.key.in_(owned)


async def _aggregate(
    open_rows: OpenRows,
    org: str,
    source: sa.Subquery,
    window: ReportWindow,
    where: list[sa.ColumnElement[bool]],
    group_by: Sequence[str],
    sums: Sequence[str],
) -> list[_Aggregate]:
    """Add up rows by buckets and groups, in their order."""
    width = sa.literal(timedelta(seconds=window.width))
    bucket = sa.func.date_bin(width, source.c.moment, sa.literal(EPOCH)).label("bucket")
    columns = {**COLUMN_OF_GROUP, TAG: TAG}
    named = {name: column for name in group_by if (column := columns[name])}
    groups = [(_keys if name in OWNERS else source).c[column] for name, column in named.items()]
    added = [_sum(source, name) for name in sums]
    query = sa.select(bucket, *groups, *added).where(*where).group_by(bucket, *groups)
    if not OWNERS.keys().isdisjoint(named):
        query = query.select_from(source.outerjoin(_keys, _keys.c.id == source.c.key))
    async with open_rows(org) as connection:
        found = (await connection.execute(query.order_by(bucket, *groups))).all()
    behind = 1 + len(named)
    return [
        _Aggregate(
            bucket=int(row[0].timestamp()),
            names=dict(zip(named, row[1:behind], strict=True)),
            sums=tuple(map(int, row[behind:])),
        )
        for row in found
    ]


def _sum(source: sa.Subquery, name: str) -> sa.ColumnElement[Any]:
    """Add up a column. Counts are cast to bigint: decoding a decimal takes ten times as long."""
    total = sa.func.sum(source.c[name])
    return total if name in AMOUNTS else sa.cast(total, sa.BigInteger)
