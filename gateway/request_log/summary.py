"""Sums up a range of time in one query: in all, beside the period before, in its hours or days, and
by project, key, model, lane or a tag.

Money and tokens are the ledger's (`usage_hourly`, `usage_daily`), which knows no lanes but batch: a
summary by lane has what was counted as the requests were answered. All else is the request log's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.queries import Query, ask
from billing.tables import SUM_PICO, AnyRow
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
    "uncached_tokens": "sum(uncached_input + embedding_input)",
    "cached_tokens": "sum(cache_read)",
    "written_tokens": "sum(cache_write_5m + cache_write_1h)",
    "output_tokens": "sum(output + reasoning_output)",
    "num_calls": "sum(tool_call)",
    "cost_pico": SUM_PICO,
    "uncached_pico": "sum(uncached_input_pico)",
    "cached_pico": "sum(cache_read_pico)",
}
"""Sums of the ledger, in the words of the log."""
_COUNTED = {name: f"sum({name})" for name in (*TOKENS, "cost_pico") if name in _BILLED}
"""The same of the log, without what it does not know."""
_COLUMNS = (*_SERVED, *_BILLED)
_BUCKETS, _BEFORE, _WHOLE, _LATENCIES, _GROUPS, _GROUPS_BEFORE = range(6)
"""The parts of an answer, in its order: hours or days, the period before, latencies of all, and of
what they are asked by where groups are finer, groups now and before."""
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
    """Add up all but latencies."""
    whole: dict[str, Any] = dict.fromkeys(_COLUMNS, 0)
    for part in parts:
        for name in _COLUMNS:
            whole[name] += getattr(part, name)
    return Sums(**whole)


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
        latencies=latencies,
    )
    values: dict[str, Any] = {"org": org, "start": window.start, "end": window.end}
    values |= {"before": window.before} | {name: value for name, value in _asked(filters) if value}
    if tag:
        values["tag_name"] = tag
    await sum_up_in_memory(conn)
    return _to_summary(window, cut, await ask(conn, cut.query(values)))


def _asked(filters: Filters) -> Iterable[tuple[str, str]]:
    return msgspec.structs.asdict(filters).items()


class _Statement(msgspec.Struct, frozen=True, kw_only=True):
    """Writes the statement. Each table is read once for the present time, by hours or days and by
    groups, and once for the one before, as a whole and by groups."""

    unit: Unit
    by: Sequence[Group]
    where: Sequence[str]
    is_billed: bool
    is_of_tag: bool
    compares_groups: bool
    latencies: LatencyChoice

    def query(self, values: Mapping[str, Any]) -> Query[Sequence[AnyRow]]:
        table = f"requests_{_TABLES[self.unit]}"
        served = {name: f"sum({name})" for name in _SERVED}
        earlier = {"num_requests": "sum(num_requests)"}
        if not self.is_billed:
            served |= _COUNTED
            earlier["cost_pico"] = "sum(cost_pico)"
        parts, once = list[str](), ""
        if not self.is_of_tag:
            hists = {name: f"sum({name})" for name in self.latencies.names if self._reads_latencies}
            once = f"served AS MATERIALIZED ({self._now(table, served | hists)}),"
            parts += [*self._served(served), self._before(table, earlier)]
        if self.is_billed:
            table = "usage_tags_daily" if self.is_of_tag else f"usage_{_TABLES[self.unit]}"
            billed = f"({self._now(table, _BILLED)}) AS billed"
            parts += [self._part(_listed({name: name for name in _BILLED}), billed)]
            parts += [self._before(table, {"cost_pico": SUM_PICO})]
        cut = ", ".join(("part", "bucket", *self.by))
        added = ", ".join(
            f"coalesce(sum({n}), 0)::{_type(n)} AS {n}" for n in (*_COLUMNS, *HISTOGRAMS)
        )
        statement = f"""
            WITH {once} cut AS ({" UNION ALL ".join(parts)})
            SELECT {cut}, {added} FROM cut GROUP BY {cut}
            ORDER BY part, sum(cost_pico) DESC, sum(num_requests) DESC
            LIMIT {2 + 3 * MAX_GROUPS + (100 if self.unit == "hour" else 1200)}
        """
        columns: list[sa.ColumnClause[Any]] = [sa.column("part", sa.Integer)]
        columns.append(sa.column("bucket", sa.DateTime(timezone=True)))
        columns += [sa.column(name, sa.Text) for name in self.by]
        columns += [
            sa.column(name, sa.BigInteger if _type(name) == "bigint" else sa.Text)
            for name in (*_COLUMNS, *HISTOGRAMS)
        ]
        text = sa.text(statement)
        named = {name: value for name, value in values.items() if name in text._bindparams}
        return Query(text.bindparams(**named).columns(*columns), lambda rows: rows)

    @property
    def _reads_latencies(self) -> bool:
        return bool(self.latencies.columns)

    def _now(self, table: str, sums: Mapping[str, str]) -> str:
        own, named = self._groups()
        sets = [f"({self.unit})", *([f"({', '.join(own)})"] if own else [])]
        part = f"CASE grouping({self.unit}) WHEN 1 THEN {_GROUPS} ELSE {_BUCKETS} END AS part"
        added = (f"{each} AS {name}" for name, each in sums.items())
        return f"""
            SELECT {", ".join((part, f"{self.unit} AS bucket", *named, *added))} FROM {table}
            WHERE {self._read("start", "end")} GROUP BY GROUPING SETS ({", ".join(sets)})
        """

    def _served(self, sums: Mapping[str, str]) -> Iterator[str]:
        """Yield the parts that are made of `served`."""
        wanted = self.latencies
        hists = {name: name for name in wanted.names if self._reads_latencies}
        whole = {name: f"sum({name})" for name in hists}
        is_by_groups = tuple(wanted.by) == tuple(self.by)
        for part, has_them in ((_BUCKETS, wanted.in_time), (_GROUPS, is_by_groups)):
            listed = _listed({name: name for name in sums}, hists if has_them else {})
            yield self._part(listed, f"served WHERE part = {part}")
        if wanted.in_time:
            nulls = ", ".join(f"NULL::text AS {each}" for each in self.by)
            yield f"""
                SELECT {_WHOLE} AS part, NULL::timestamptz AS bucket {nulls and ", " + nulls},
                    {_listed({}, whole)} FROM served WHERE part = {_BUCKETS}
            """
        if wanted.by and not is_by_groups:
            names = ", ".join(
                each if each in wanted.by else f"NULL::text AS {each}" for each in self.by
            )
            yield f"""
                SELECT {_LATENCIES} AS part, NULL::timestamptz AS bucket, {names},
                    {_listed({}, whole)}
                FROM served WHERE part = {_GROUPS} GROUP BY {", ".join(wanted.by)}
            """

    def _part(self, listed: str, source: str) -> str:
        return f"SELECT {', '.join(('part', 'bucket', *self.by))}, {listed} FROM {source}"

    def _before(self, table: str, sums: Mapping[str, str]) -> str:
        """Return the sums of the time before: of groups where it tells money."""
        own, named = self._groups()
        grouped = bool(own) and self.compares_groups and "cost_pico" in sums
        where = f"FROM {table} WHERE {self._read('before', 'start')}"
        if not grouped:
            nulls = [f"NULL::text AS {each}" for each in self.by]
            read = (f"{_BEFORE} AS part", "NULL::timestamptz AS bucket", *nulls)
            return f"SELECT {', '.join(read)}, {_listed(sums)} {where}"
        part = f"CASE grouping({own[0]}) WHEN 0 THEN {_GROUPS_BEFORE} ELSE {_BEFORE} END AS part"
        added = ", ".join(f"{each} AS {name}" for name, each in sums.items())
        return f"""
            SELECT {", ".join((part, "NULL::timestamptz AS bucket", *named))},
                {_listed({name: f"sum({name})" for name in sums})}
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


def _listed(sums: Mapping[str, str], hists: Mapping[str, str] = {}) -> str:
    """Return the sums of a part, and none of the others."""
    known = {**sums, **hists}
    return ", ".join(f"{known.get(name, '0')} AS {name}" for name in (*_COLUMNS, *HISTOGRAMS))


def _type(name: str) -> str:
    """Return the type of a sum: a text where it may be longer than 64 bits, as a driver takes long
    to make a Decimal of a number."""
    return "bigint" if name in _COLUMNS and not name.endswith("_pico") else "text"


def _to_summary(window: Window, cut: _Statement, rows: Sequence[AnyRow]) -> Summary:
    before_all, whole = NOTHING_BEFORE, NO_SUMS
    buckets: dict[datetime, Sums] = {}
    groups: dict[tuple[str, ...], Sums] = {}
    latencies: dict[tuple[str, ...], Sums] = {}
    before: dict[tuple[str, ...], EarlierPeriod] = {}
    first = 2 + len(cut.by)
    for row in rows:
        part, bucket, names = row[0], row[1], tuple(row[2:first])
        if part in (_BEFORE, _GROUPS_BEFORE):
            counts = dict(zip(_COLUMNS, row[first:], strict=False))
            earlier = EarlierPeriod(counts["num_requests"], int(counts["cost_pico"]))
            if part == _BEFORE:
                before_all = earlier
            else:
                before[names] = earlier
            continue
        sums = _to_sums(row[first:])
        if part == _BUCKETS:
            buckets[bucket.astimezone(UTC)] = sums
        elif part == _GROUPS:
            groups[names] = sums
        elif part == _WHOLE:
            whole = sums
        else:
            latencies[tuple(each for each in names if each is not None)] = sums
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
        now=msgspec.structs.replace(add_up(buckets.values()), **_histograms(whole)),
        before=before_all,
        buckets=buckets,
        groups=found[:MAX_GROUPS],
        latencies=groups if tuple(cut.latencies.by) == tuple(cut.by) else latencies,
        is_billed=cut.is_billed,
    )


def _to_sums(values: Sequence[Any]) -> Sums:
    counts: dict[str, Any] = dict(zip(_COLUMNS, map(int, values), strict=False))
    return Sums(**counts, **dict(zip(HISTOGRAMS, values[len(_COLUMNS) :], strict=True)))


def _histograms(sums: Sums) -> dict[str, str]:
    return {name: getattr(sums, name) for name in HISTOGRAMS}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _ms(microseconds: float | None) -> float | None:
    return None if microseconds is None else microseconds / 1000
