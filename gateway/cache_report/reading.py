"""The cache report as a customer asks for it: buckets of an hour or a day, by key, model, prefix.

A bucket without requests has no rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.reports.usage import OpenRows
from billing.reports.window import WIDTH_S, ReportWindow, window_of
from billing.tables import EPOCH, to_moment
from gateway.cache_report.rows import EXAMPLE, MAX_BREAKS
from gateway.generation_events import CAUSES
from gateway.wire.usage.cache_report import Break, CacheGroup, CacheRow

COLUMNS: Mapping[CacheGroup, tuple[str, ...]] = {
    "project_id": ("project",),
    "api_key_id": ("key",),
    "model": ("model",),
    "prefix": ("prefix_kind", "prefix"),
}
LIMITS = {"1h": (24, 72), "1d": (7, 31)}
"""Buckets a page: default and most."""
MAX_RESULTS = 100
"""A bucket lists at most this many results; those with the least to gain are added up in one."""
SUMS = ("num_requests", "input_tokens", "cached_tokens", *(f"num_{each}" for each in CAUSES))


class CachePage(msgspec.Struct, frozen=True):
    window: ReportWindow
    rows: Mapping[int, Sequence[CacheRow]]
    """Rows by the moment at which their bucket begins, those first that had most to gain."""


async def read_cache_report(
    open_rows: OpenRows,
    *,
    org_id: str,
    start_time: int,
    end_time: int | None = None,
    bucket_width: Literal["1h", "1d"] = "1d",
    project_ids: Sequence[str] = (),
    api_key_ids: Sequence[str] = (),
    models: Sequence[str] = (),
    prefixes: Sequence[str] = (),
    group_by: Sequence[CacheGroup] = (),
    limit: int | None = None,
    page: str | None = None,
) -> CachePage:
    """Times are Unix seconds. Raises: ReportQueryError."""
    width = WIDTH_S[bucket_width]
    window = window_of(start_time, end_time, width, limit, LIMITS[bucket_width], page)
    filters = {"project": project_ids, "key": api_key_ids, "model": models, "prefix": prefixes}
    asked = {name: [*wanted] for name, wanted in filters.items() if wanted}
    names = [
        column for group, columns in COLUMNS.items() if group in group_by for column in columns
    ]
    query = _query_of(names, [*asked])
    values = {
        "org": org_id,
        "start": to_moment(window.starts.start),
        "end": to_moment(window.end),
        "width": f"{window.width} seconds",
        "epoch": EPOCH,
        **asked,
    }
    async with open_rows(org_id) as conn:
        breaks = await _breaks(conn, query, values)
        return CachePage(window, await _rows(conn, query, values, breaks))


Values = Mapping[str, Any]
ByGroup = Mapping[tuple[Any, ...], Sequence[Break]]


class _Query(NamedTuple):
    names: Sequence[str]
    """Columns to group by."""
    groups: str
    """The same in SQL, behind the bucket."""
    source: str


def _query_of(names: Sequence[str], filters: Sequence[str]) -> _Query:
    """Return the query of these columns."""
    where = " AND ".join(
        ["org = :org", "hour >= :start", "hour < :end"]
        + [f"{name} = ANY (CAST(:{name} AS text[]))" for name in filters]
    )
    bucket = "date_bin(CAST(CAST(:width AS text) AS interval), hour, :epoch)"
    source = f"(SELECT *, {bucket} AS bucket FROM cache_report WHERE {where}) AS found"
    return _Query(names, ", ".join(["bucket", *names]), source)


async def _rows(
    conn: AsyncConnection, query: _Query, values: Values, breaks: ByGroup
) -> Mapping[int, Sequence[CacheRow]]:
    sums = ", ".join(f"sum({name})::bigint AS {name}" for name in SUMS)
    named = "".join(
        f"CASE WHEN is_rest THEN NULL ELSE {name} END AS {name}, " for name in query.names
    )
    text = f"""
        WITH grouped AS (
            SELECT {query.groups}, {sums} FROM {query.source} GROUP BY {query.groups}
        ), ranked AS (
            SELECT *, row_number() OVER (
                PARTITION BY bucket ORDER BY input_tokens - cached_tokens DESC, {query.groups}
            ) > {MAX_RESULTS} AS is_rest FROM grouped
        ), named AS (
            SELECT bucket, is_rest, {named} {", ".join(SUMS)} FROM ranked
        )
        SELECT {query.groups}, is_rest, {sums} FROM named GROUP BY {query.groups}, is_rest
        ORDER BY bucket, is_rest, sum(input_tokens - cached_tokens) DESC, {query.groups}
    """
    found: defaultdict[int, list[CacheRow]] = defaultdict(list)
    for row in (await conn.execute(sa.text(text), values)).mappings():
        names = {name: row[name] for name in query.names}
        group = (row["bucket"], *names.values())
        found[int(row["bucket"].timestamp())].append(
            CacheRow(
                names=None if row["is_rest"] else names,
                num_requests=row["num_requests"],
                input_tokens=row["input_tokens"],
                cached_tokens=row["cached_tokens"],
                causes={each: row[f"num_{each}"] for each in CAUSES},
                breaks=() if row["is_rest"] else breaks.get(group, ()),
            )
        )
    return found


async def _breaks(conn: AsyncConnection, query: _Query, values: Values) -> ByGroup:
    """The costliest of each group that is told apart."""
    text = f"""
        WITH found AS (
            SELECT * FROM {query.source}
        ), told_apart AS (
            SELECT {query.groups} FROM (
                SELECT {query.groups}, row_number() OVER (
                    PARTITION BY bucket
                    ORDER BY sum(input_tokens) - sum(cached_tokens) DESC, {query.groups}
                ) AS place FROM found GROUP BY {query.groups}
            ) AS ranked WHERE place <= {MAX_RESULTS}
        ), merged AS (
            SELECT {query.groups}, sum((one->>'uncached_tokens')::bigint)::bigint AS cost,
                sum((one->>'requests')::bigint)::bigint AS requests,
                {EXAMPLE.format(each="one")} AS example
            FROM found JOIN told_apart USING ({query.groups}), jsonb_array_elements(breaks) AS one
            GROUP BY {query.groups}, one->>'cause', one->>'position'
        ), ranked AS (
            SELECT *, row_number() OVER (
                PARTITION BY {query.groups} ORDER BY cost DESC, example->>'position'
            ) AS place FROM merged
        )
        SELECT {query.groups}, cost, requests, example FROM ranked
        WHERE place <= {MAX_BREAKS} ORDER BY {query.groups}, place
    """
    found: defaultdict[tuple[Any, ...], list[Break]] = defaultdict(list)
    for row in (await conn.execute(sa.text(text), values)).mappings():
        example = msgspec.convert(row["example"], Break)
        group = (row["bucket"], *(row[name] for name in query.names))
        found[group].append(
            msgspec.structs.replace(example, requests=row["requests"], uncached_tokens=row["cost"])
        )
    return found
