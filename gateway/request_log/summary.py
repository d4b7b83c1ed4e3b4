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

from billing.tables import TOTAL_PICO
from gateway.db import sum_up_in_memory
from gateway.request_log.histograms import quantile_us, unpack
from gateway.request_log.tables import HISTOGRAMS, OUTCOMES, TOKENS

Unit = Literal["hour", "day"]
Group = Literal["project", "key", "model", "lane", "tag"]
LONGEST_BY_HOUR = timedelta(hours=49)
"""A longer range is summed up by days: so many hours of a large organization are read in time."""
MAX_GROUPS = 1000
"""Those that cost least are left out; the sums in all have them."""

_SERVED = ("num_requests", *OUTCOMES, "duration_us", "queue_us")
_BILLED: Mapping[str, str] = {
    "uncached_tokens": "uncached_input + embedding_input",
    "cached_tokens": "cache_read",
    "written_tokens": "cache_write_5m + cache_write_1h",
    "output_tokens": "output + reasoning_output",
    "reasoning_tokens": "reasoning_output",
    "cost_pico": TOTAL_PICO,
    "uncached_pico": "uncached_input_pico",
    "cached_pico": "cache_read_pico",
}
"""Sums of the ledger, in the words of the log."""
_COLUMNS = (*_SERVED, *_BILLED)
_LEDGER = (
    dict.fromkeys(_SERVED, "0")
    | {name: f"sum({each})" for name, each in _BILLED.items()}
    | dict.fromkeys(HISTOGRAMS, "0")
)
_TABLES = {"hour": "hourly", "day": "daily"}
_GROUPED = {"tag": "value"}


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Narrows what is summed up. Empty: all."""

    project: str = ""
    key: str = ""
    model: str = ""
    lane: str = ""


ALL = Filters()


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
    num_left: int = 0
    num_rated: int = 0
    num_good: int = 0
    duration_us: int = 0
    queue_us: int = 0
    uncached_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost_pico: int = 0
    uncached_pico: int = 0
    cached_pico: int = 0
    ttft: str = "0"
    tpot: str = "0"
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
    def refusal_rate(self) -> float | None:
        return _share(self.num_refused + self.num_limited, self.num_requests)

    @property
    def mean_queue_ms(self) -> float | None:
        return self.queue_us / self.num_requests / 1000 if self.num_requests else None

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
    def tpot_ms(self) -> Latency:
        return Latency.of(self.tpot)


NO_SUMS = Sums()


def add_up(parts: Iterable[Sums]) -> Sums:
    whole = dict.fromkeys(_COLUMNS, 0)
    latencies = dict.fromkeys(HISTOGRAMS, 0)
    for part in parts:
        for name in _COLUMNS:
            whole[name] += getattr(part, name)
        for name in HISTOGRAMS:
            latencies[name] += int(getattr(part, name))
    return Sums(**whole, ttft=str(latencies["ttft"]), tpot=str(latencies["tpot"]))


class GroupSums(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of a group. `names`: by column, in the order that was asked."""

    names: tuple[str, ...]
    now: Sums
    before: Sums = NO_SUMS


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    window: Window
    now: Sums
    before: Sums
    """The period before is as long."""
    buckets: Mapping[datetime, Sums]
    """By the begin of each hour or day; one without requests is not there."""
    groups: Sequence[GroupSums]
    """Those first that cost most."""
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
) -> Summary:
    """Sum up a window. `tag`: the tag by whose values it is summed up, which the ledger alone has,
    and by day alone. `conn`: sees the org's rows."""
    if tag:
        window = window_of(window.start, max(window.end, window.start + LONGEST_BY_HOUR * 2))
    is_billed = not filters.lane and "lane" not in by
    query = _query(window.unit, by, filters, is_billed=is_billed, has_tag=bool(tag))
    values = {"org": org, "before": window.before, "start": window.start, "end": window.end}
    named = {name: value for name, value in msgspec.structs.asdict(filters).items() if value}
    if tag:
        named["tag_name"] = tag
    await sum_up_in_memory(conn)
    rows = (await conn.execute(sa.text(query), values | named)).mappings().all()
    return _to_summary(rows, window, by, is_billed=is_billed)


def _query(
    unit: Unit, by: Sequence[Group], filters: Filters, *, is_billed: bool, has_tag: bool
) -> str:
    """Return the statement. Each source is read once, for its hours or days and for its groups."""
    where = [f"org = :org AND {unit} >= :before AND {unit} < :end"]
    asked = msgspec.structs.asdict(filters)
    where += [f"{name} = :{name}" for name, value in asked.items() if value]
    sources = []
    if not has_tag:
        served = _served(is_billed=is_billed)
        sources.append(_part(f"requests_{_TABLES[unit]}", unit, by, where, served))
    if is_billed:
        table = f"usage_{_TABLES[unit]}"
        if has_tag:
            table, where = "usage_tags_daily", [*where, "tag = :tag_name"]
        sources.append(_part(table, unit, by, where, _LEDGER))
    cut = ", ".join(("is_group", "is_now", "bucket", *by))
    sums = {name: f"sum({name})::{_type(name)}" for name in _COLUMNS}
    sums |= {name: f"coalesce(sum({name}), 0)::text" for name in HISTOGRAMS}
    return f"""
        WITH cut AS ({" UNION ALL ".join(sources)})
        SELECT {cut}, {_listed(sums)} FROM cut GROUP BY {cut}
        ORDER BY is_group, is_now DESC, cost_pico DESC, num_requests DESC LIMIT {_most_rows(unit)}
    """


def _part(
    table: str, unit: Unit, by: Sequence[Group], where: Sequence[str], sums: Mapping[str, str]
) -> str:
    """Return the sums of a table: of each hour or day that is asked for, of the time before as a
    whole, and of each group in both."""
    groups = [_GROUPED.get(each, each) for each in by]
    named = [f"{column} AS {each}" for column, each in zip(groups, by, strict=True)]
    sets = ["(is_now, bucket)", *([f"(is_now, {', '.join(groups)})"] if by else [])]
    return f"""
        SELECT {", ".join(("grouping(bucket) = 1 AS is_group", "is_now", "bucket", *named))},
            {_listed(sums)}
        FROM (
            SELECT *, {unit} >= :start AS is_now,
                CASE WHEN {unit} >= :start THEN {unit} END AS bucket
            FROM {table} WHERE {" AND ".join(where)}
        ) AS read GROUP BY GROUPING SETS ({", ".join(sets)})
    """


def _served(*, is_billed: bool) -> Mapping[str, str]:
    """Return the sums of the log. is_billed: without those of the ledger."""
    sums = {name: f"sum({name})" for name in _SERVED}
    if is_billed:
        sums |= dict.fromkeys(_BILLED, "0")
    else:
        sums |= {name: f"sum({name})" for name in (*TOKENS, "cost_pico")}
        sums |= dict.fromkeys(("uncached_pico", "cached_pico"), "0")
    return sums | {name: f"sum({name}) FILTER (WHERE is_now)" for name in HISTOGRAMS}


def _listed(sums: Mapping[str, str]) -> str:
    return ", ".join(f"{each} AS {name}" for name, each in sums.items())


def _type(name: str) -> str:
    return "numeric(38, 0)" if name.endswith("_pico") else "bigint"


def _most_rows(unit: Unit) -> int:
    return 2 + 2 * MAX_GROUPS + (100 if unit == "hour" else 1200)


def _to_summary(
    rows: Sequence[sa.RowMapping], window: Window, by: Sequence[Group], *, is_billed: bool
) -> Summary:
    before_all = NO_SUMS
    buckets: dict[datetime, Sums] = {}
    groups: dict[bool, dict[tuple[str, ...], Sums]] = {True: {}, False: {}}
    for row in rows:
        counts: dict[str, Any] = {name: int(row[name]) for name in _COLUMNS}
        sums = Sums(**counts, ttft=row["ttft"], tpot=row["tpot"])
        if row["is_group"]:
            groups[row["is_now"]][tuple(row[name] for name in by)] = sums
        elif row["is_now"]:
            buckets[row["bucket"].astimezone(UTC)] = sums
        else:
            before_all = sums
    now = add_up(buckets.values())
    before = groups[False]
    found = [
        GroupSums(names=names, now=sums, before=before.get(names, NO_SUMS))
        for names, sums in groups[True].items()
    ]
    found += [
        GroupSums(names=names, now=NO_SUMS, before=sums)
        for names, sums in before.items()
        if names not in groups[True]
    ]
    return Summary(
        window=window,
        now=now,
        before=before_all,
        buckets=buckets,
        groups=found[:MAX_GROUPS],
        is_billed=is_billed,
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _ms(microseconds: float | None) -> float | None:
    return None if microseconds is None else microseconds / 1000
