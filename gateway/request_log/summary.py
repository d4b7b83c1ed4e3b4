"""Sums up a range of time in one query: in all, beside the period before, in its hours or days, and
by project, key, model, lane or a tag.

Money and tokens are the ledger's (`usage_hourly`, `usage_daily`), which knows no lanes but batch: a
summary by lane has what was counted as the requests were answered. All else is the request log's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.queries import Query, ask, ask_all
from billing.tables import TOTAL_PICO, AnyRow
from gateway.db import sum_up_in_memory
from gateway.request_log.histograms import quantile_us, unpack
from gateway.request_log.tables import OUTCOMES, TOKENS

Unit = Literal["hour", "day"]
Group = Literal["project", "key", "model", "lane", "tag"]
HISTOGRAMS = ("ttft", "itl")
"""Those of the log that are summed up."""
LONGEST_BY_HOUR = timedelta(hours=49)
"""A longer range is summed up by days: so many hours of a large organization are read in time."""
MAX_GROUPS = 1000
"""Those that cost least are left out; the sums in all have them."""

_SERVED = ("num_requests", *(name for name in OUTCOMES if name != "num_left"))
_BILLED: Mapping[str, str] = {
    "uncached_tokens": "uncached_input + embedding_input",
    "cached_tokens": "cache_read",
    "written_tokens": "cache_write_5m + cache_write_1h",
    "output_tokens": "output + reasoning_output",
    "num_calls": "tool_call",
    "cost_pico": TOTAL_PICO,
    "uncached_pico": "uncached_input_pico",
    "cached_pico": "cache_read_pico",
}
"""Sums of the ledger, in the words of the log."""
_COUNTED = {name: name for name in (*TOKENS, "cost_pico") if name in _BILLED}
"""The same of the log, without what it does not know."""
_COLUMNS = (*_SERVED, *_BILLED)
_TABLES = {"hour": "hourly", "day": "daily"}
_GROUPED = {"tag": "value"}


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Narrows what is summed up. Empty: all."""

    project: str = ""
    key: str = ""
    model: str = ""
    lane: str = ""


ALL = Filters()


class LatencyChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Says which histograms are wanted, and of what: to add them takes most of the time. `in_time`:
    of all, and of each hour or day. `by`: of each group of these columns."""

    names: Sequence[str] = HISTOGRAMS
    in_time: bool = True
    by: Sequence[Group] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (*(("bucket",) if self.in_time else ()), *self.by)


IN_TIME = LatencyChoice()


class Window(msgspec.Struct, frozen=True):
    """A range of whole hours or days, of which the last one may not be over."""

    start: datetime
    end: datetime
    unit: Unit

    @property
    def before(self) -> datetime:
        """The begin of the period before, which is as long."""
        return self.start - (self.end - self.start)

    @property
    def step(self) -> timedelta:
        return timedelta(hours=1) if self.unit == "hour" else timedelta(days=1)

    @property
    def starts(self) -> list[datetime]:
        """The begins of its hours or days."""
        number = -((self.start - self.end) // self.step)
        return [self.start + n * self.step for n in range(number)]


def window_of(start: datetime, end: datetime) -> Window:
    """Return the hours or days of a range."""
    unit: Unit = "hour" if end - start <= LONGEST_BY_HOUR else "day"
    start = start.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    if unit == "day":
        start = start.replace(hour=0)
    return Window(start, end.astimezone(UTC), unit)


class Latency(msgspec.Struct, frozen=True):
    """Quantiles in milliseconds; None: there are no requests."""

    p50: float | None
    p99: float | None

    @staticmethod
    def of(histogram: str) -> Latency:
        counts = unpack(histogram)
        return Latency(*(_ms(quantile_us(counts, share)) for share in (0.5, 0.99)))


class Sums(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Counts what was asked, served and used in some time by some."""

    num_requests: int = 0
    num_refused: int = 0
    num_limited: int = 0
    num_failed: int = 0
    num_rated: int = 0
    num_good: int = 0
    uncached_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 0
    num_calls: int = 0
    """Calls of tools of MCP servers, which are no requests."""
    cost_pico: int = 0
    uncached_pico: int = 0
    cached_pico: int = 0
    ttft: str = "0"
    itl: str = "0"
    """Histograms of latencies, as Postgres writes them."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def input_tokens(self) -> int:
        return self.uncached_tokens + self.cached_tokens + self.written_tokens

    @property
    def hit_rate(self) -> float | None:
        """The share of input that came from the cache."""
        return _share(self.cached_tokens, self.input_tokens)

    @property
    def goodput(self) -> float | None:
        """The share of requests with an SLO that met it."""
        return _share(self.num_good, self.num_rated)

    @property
    def error_rate(self) -> float | None:
        """The share of requests that failed on our side."""
        return _share(self.num_failed, self.num_requests)

    @property
    def saved_pico(self) -> int:
        """Return what cached tokens would have cost more, at the mean price of uncached ones."""
        if not self.uncached_tokens:
            return 0
        full = self.cached_tokens * self.uncached_pico // self.uncached_tokens
        return max(0, full - self.cached_pico)

    @cached_property
    def ttft_ms(self) -> Latency:
        return Latency.of(self.ttft)

    @cached_property
    def itl_ms(self) -> Latency:
        """The gaps between output tokens, of all requests together."""
        return Latency.of(self.itl)


NO_SUMS = Sums()


def add_up(parts: Iterable[Sums]) -> Sums:
    whole = dict.fromkeys(_COLUMNS, 0)
    latencies = dict.fromkeys(HISTOGRAMS, 0)
    for part in parts:
        for name in _COLUMNS:
            whole[name] += getattr(part, name)
        for name in HISTOGRAMS:
            latencies[name] += int(getattr(part, name))
    found: dict[str, Any] = whole | {name: str(each) for name, each in latencies.items()}
    return Sums(**found)


class EarlierPeriod(msgspec.Struct, frozen=True):
    """The period before, which is as long: what the present one is compared with."""

    num_requests: int = 0
    cost_pico: int = 0


NOTHING_BEFORE = EarlierPeriod()


class GroupSums(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of a group. `names`: by column, in the order that was asked. It has latencies where
    they were asked by the same columns."""

    names: tuple[str, ...]
    now: Sums
    before: EarlierPeriod = NOTHING_BEFORE


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    window: Window
    now: Sums
    before: EarlierPeriod
    buckets: Mapping[datetime, Sums]
    """By the begin of each hour or day; one without requests is not there."""
    groups: Sequence[GroupSums]
    """Those first that cost most."""
    latencies: Mapping[tuple[str, ...], Sums]
    """Sums of latencies alone, by the columns that they were asked by."""
    is_billed: bool
    """Money and tokens are the ledger's."""

    def series(self) -> list[tuple[datetime, Sums]]:
        """Return all hours or days, the empty ones as well."""
        return [(each, self.buckets.get(each, NO_SUMS)) for each in self.window.starts]


async def summarize(
    conn: AsyncConnection,
    org: str,
    window: Window,
    *,
    by: Sequence[Group] = (),
    filters: Filters = ALL,
    tag: str = "",
    latencies: LatencyChoice = IN_TIME,
    compares_groups: bool = True,
) -> Summary:
    """Sum up a window. `tag`: the tag by whose values it is summed up, which the ledger alone has,
    and by day alone. `compares_groups`: groups have the period before. `conn`: sees the org's
    rows."""
    if tag:
        window = window_of(window.start, max(window.end, window.start + LONGEST_BY_HOUR * 2))
    cut = _Statement(
        unit=window.unit,
        by=by,
        where=[f"{name} = :{name}" for name, value in _asked(filters) if value],
        is_billed=not filters.lane and "lane" not in by,
        is_of_tag=bool(tag),
        compares_groups=compares_groups,
    )
    values: dict[str, Any] = {"org": org, "start": window.start, "end": window.end}
    values |= {"before": window.before} | {name: value for name, value in _asked(filters) if value}
    if tag:
        values["tag_name"] = tag
    await sum_up_in_memory(conn)
    if tag or not latencies.columns:
        return _to_summary(window, cut, await ask(conn, cut.sums(values)))
    sums, found = await ask_all(conn, cut.sums(values), cut.latencies(values, latencies))
    return _with_latencies(_to_summary(window, cut, sums), found, latencies)


def _asked(filters: Filters) -> Iterable[tuple[str, str]]:
    return msgspec.structs.asdict(filters).items()


class _Statement(msgspec.Struct, frozen=True, kw_only=True):
    """Writes the statement: the present time is read by hours or days and by groups, the one before
    as a whole and by groups."""

    unit: Unit
    by: Sequence[Group]
    where: Sequence[str]
    is_billed: bool
    is_of_tag: bool
    compares_groups: bool

    def sums(self, values: Mapping[str, Any]) -> Query[Sequence[AnyRow]]:
        sources = []
        if not self.is_of_tag:
            served = dict(zip(_SERVED, _SERVED, strict=True))
            table = f"requests_{_TABLES[self.unit]}"
            earlier = {"num_requests": "num_requests"}
            if not self.is_billed:
                served |= _COUNTED
                earlier["cost_pico"] = "cost_pico"
            sources += [self._now(table, served), self._before(table, earlier)]
        if self.is_billed:
            table = "usage_tags_daily" if self.is_of_tag else f"usage_{_TABLES[self.unit]}"
            costs = {"cost_pico": _BILLED["cost_pico"]}
            sources += [self._now(table, _BILLED), self._before(table, costs)]
        cut = ", ".join(("is_group", "is_now", "bucket", *self.by))
        added = ", ".join(f"sum({name})::{_type(name)} AS {name}" for name in _COLUMNS)
        statement = f"""
            WITH cut AS ({" UNION ALL ".join(sources)})
            SELECT {cut}, {added} FROM cut GROUP BY {cut}
            ORDER BY is_group, is_now DESC, cost_pico DESC, num_requests DESC
            LIMIT {2 + 2 * MAX_GROUPS + (100 if self.unit == "hour" else 1200)}
        """
        columns: list[sa.ColumnClause[Any]]
        columns = [sa.column(name, sa.Boolean) for name in ("is_group", "is_now")]
        columns.append(sa.column("bucket", sa.DateTime(timezone=True)))
        columns += [sa.column(name, sa.Text) for name in self.by]
        columns += [
            sa.column(name, sa.Numeric if name.endswith("_pico") else sa.BigInteger)
            for name in _COLUMNS
        ]
        return _query(statement, values, columns)

    def latencies(
        self, values: Mapping[str, Any], wanted: LatencyChoice
    ) -> Query[Sequence[AnyRow]]:
        """Return the query of histograms: of all and of each hour or day if those are wanted, and
        of groups. What a row is not cut by is null in it."""
        read = [*([f"{self.unit} AS bucket"] if wanted.in_time else []), *wanted.by]
        names = wanted.columns
        added = ", ".join(f"sum({name}) AS {name}" for name in wanted.names)
        sets = ["()", "(bucket)"] if wanted.in_time else []
        sets += [f"({', '.join(wanted.by)})"] if wanted.by else []
        statement = f"""
            SELECT {", ".join(names)}, {", ".join(f"sum({n})::text AS {n}" for n in wanted.names)}
            FROM (
                SELECT {", ".join(read)}, {added} FROM requests_{_TABLES[self.unit]}
                WHERE {self._read("start", "end")}
                GROUP BY {", ".join(str(n + 1) for n in range(len(read)))}
            ) AS once GROUP BY GROUPING SETS ({", ".join(sets)})
        """
        columns = [
            sa.column(each, sa.DateTime(timezone=True) if each == "bucket" else sa.Text)
            for each in names
        ]
        return _query(statement, values, [*columns, *(sa.column(n, sa.Text) for n in wanted.names)])

    def _now(self, table: str, sums: Mapping[str, str]) -> str:
        own, named = self._groups()
        sets = [f"({self.unit})", *([f"({', '.join(own)})"] if own else [])]
        is_group = f"grouping({self.unit}) = 1"
        read = (f"{is_group} AS is_group", "true AS is_now", f"{self.unit} AS bucket")
        return f"""
            SELECT {", ".join((*read, *named))}, {_listed(sums)} FROM {table}
            WHERE {self._read("start", "end")} GROUP BY GROUPING SETS ({", ".join(sets)})
        """

    def _before(self, table: str, sums: Mapping[str, str]) -> str:
        """Return the sums of the time before: of groups where it tells money."""
        own, named = self._groups()
        grouped = bool(own) and self.compares_groups and "cost_pico" in sums
        read = ("false AS is_now", "NULL::timestamptz AS bucket")
        where = f"FROM {table} WHERE {self._read('before', 'start')}"
        if not grouped:
            nulls = [f"NULL AS {each}" for each in self.by]
            return f"SELECT {', '.join(('false', *read, *nulls))}, {_listed(sums)} {where}"
        added = ", ".join(f"sum({each}) AS {name}" for name, each in sums.items())
        return f"""
            SELECT {", ".join((f"grouping({own[0]}) = 0 AS is_group", *read, *named))},
                {_listed({name: name for name in sums})}
            FROM (SELECT {", ".join(own)}, {added} {where} GROUP BY {", ".join(own)}) AS once
            GROUP BY GROUPING SETS ((), ({", ".join(own)}))
        """

    def _groups(self) -> tuple[list[str], list[str]]:
        """Return the columns of a table by which it is grouped, and the same under their names."""
        own = [_GROUPED.get(each, each) for each in self.by]
        return own, [f"{column} AS {each}" for column, each in zip(own, self.by, strict=True)]

    def _read(self, since: str, until: str) -> str:
        parts = ["org = :org", f"{self.unit} >= :{since}", f"{self.unit} < :{until}", *self.where]
        return " AND ".join([*parts, *(["tag = :tag_name"] if self.is_of_tag else [])])


def _query(
    statement: str, values: Mapping[str, Any], columns: Sequence[sa.ColumnClause[Any]]
) -> Query[Sequence[AnyRow]]:
    text = sa.text(statement)
    named = {name: value for name, value in values.items() if name in text._bindparams}
    return Query(text.bindparams(**named).columns(*columns), lambda rows: rows)


def _listed(sums: Mapping[str, str]) -> str:
    """Return the sums of a part, and none of the others."""
    each = {name: f"sum({sums[name]})" if name in sums else "0" for name in _COLUMNS}
    return ", ".join(f"{value} AS {name}" for name, value in each.items())


def _type(name: str) -> str:
    return "numeric(38, 0)" if name.endswith("_pico") else "bigint"


def _to_summary(window: Window, cut: _Statement, rows: Sequence[AnyRow]) -> Summary:
    before_all = NOTHING_BEFORE
    buckets: dict[datetime, Sums] = {}
    groups: dict[tuple[str, ...], Sums] = {}
    before: dict[tuple[str, ...], EarlierPeriod] = {}
    first = 3 + len(cut.by)
    for row in rows:
        is_group, is_now, bucket = row[:3]
        counts: dict[str, Any] = {
            name: int(each or 0) for name, each in zip(_COLUMNS, row[first:], strict=True)
        }
        names = tuple(row[3:first])
        if not is_now:
            earlier = EarlierPeriod(counts["num_requests"], counts["cost_pico"])
            if is_group:
                before[names] = earlier
            else:
                before_all = earlier
        elif is_group:
            groups[names] = Sums(**counts)
        else:
            buckets[bucket.astimezone(UTC)] = Sums(**counts)
    found = [
        GroupSums(names=names, now=sums, before=before.get(names, NOTHING_BEFORE))
        for names, sums in groups.items()
    ]
    found += [
        GroupSums(names=names, now=NO_SUMS, before=earlier)
        for names, earlier in before.items()
        if names not in groups
    ]
    return Summary(
        window=window,
        now=add_up(buckets.values()),
        before=before_all,
        buckets=buckets,
        groups=found[:MAX_GROUPS],
        latencies={},
        is_billed=cut.is_billed,
    )


def _with_latencies(summary: Summary, rows: Sequence[AnyRow], wanted: LatencyChoice) -> Summary:
    """Add histograms to what they are of: all, the hours or days, the groups."""
    whole: dict[str, str] = {}
    buckets: dict[datetime, dict[str, str]] = {}
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    first = len(wanted.columns)
    for row in rows:
        found = {n: each or "0" for n, each in zip(wanted.names, row[first:], strict=True)}
        names = tuple(row[int(wanted.in_time) : first])
        if wanted.in_time and row[0] is not None:
            buckets[row[0].astimezone(UTC)] = found
        elif names and names[0] is not None:
            groups[names] = found
        else:
            whole = found
    add = msgspec.structs.replace
    return add(
        summary,
        now=add(summary.now, **whole),
        buckets={at: add(sums, **buckets.get(at, {})) for at, sums in summary.buckets.items()},
        groups=[
            add(each, now=add(each.now, **groups[each.names])) if each.names in groups else each
            for each in summary.groups
        ],
        latencies={names: Sums(**each) for names, each in groups.items()},
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _ms(microseconds: float | None) -> float | None:
    return None if microseconds is None else microseconds / 1000
