"""The rows of the cache report: what one key's prompts of one model and prefix had in an hour.

Numbers, causes, positions and ids of requests; of a prompt no text and no token. A row keeps the
breaks that cost most and the latest ones; how often each cause came it counts in full.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.generation_events import CAUSES, CacheCause
from gateway.wire.usage.cache_report import Break, PrefixKind

OTHER = ""
MAX_PREFIXES = 64
"""A key, model and hour has at most this many prefixes; workers that write at the same moment may
exceed it."""
MAX_BATCH = 500
"""Rows a statement."""
MAX_BREAKS = 8
"""A row keeps at most; in memory, twice as many."""
MAX_LATEST = 2
"""This many of the breaks that are kept are the latest ones, whatever they cost."""
KEPT_DAYS = 35
MAX_FORGOTTEN = 10_000
"""Rows a statement; an hour's are gone in as many hours as it takes."""


class RowId(NamedTuple):
    org: str
    project: str
    key: str
    model: str
    hour: int
    """Unix seconds."""
    prefix_kind: PrefixKind
    prefix: str


class ReportCounts(msgspec.Struct, kw_only=True):
    num_requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    causes: dict[CacheCause, int] = msgspec.field(default_factory=dict)
    breaks: dict[tuple[CacheCause, int], Break] = msgspec.field(default_factory=dict)

    def broke(
        self, cause: CacheCause, position: int, uncached: int, *, at: float, request_id: str
    ) -> Break:
        entry = self.breaks.get((cause, position))
        if entry is None:
            if len(self.breaks) >= 2 * MAX_BREAKS:
                self.breaks = costliest(self.breaks)
            entry = self.breaks[cause, position] = Break(cause=cause, position=position)
        entry.requests += 1
        entry.uncached_tokens += uncached
        entry.at, entry.request_id = at, request_id
        return entry

    def add(self, other: ReportCounts) -> None:
        """Add what was counted before; it stays as it is."""
        self.num_requests += other.num_requests
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        for cause, number in other.causes.items():
            self.causes[cause] = self.causes.get(cause, 0) + number
        for place, each in other.breaks.items():
            entry = self.breaks.get(place)
            if entry is None:
                self.breaks[place] = msgspec.structs.replace(each)
            else:
                entry.merge(each)
        if len(self.breaks) > 2 * MAX_BREAKS:
            self.breaks = costliest(self.breaks)


Breaks = dict[tuple[CacheCause, int], Break]


def costliest(breaks: Breaks) -> Breaks:
    """Return the costliest breaks, and the latest."""
    ranked = sorted(breaks.items(), key=lambda each: -each[1].uncached_tokens)
    kept, others = ranked[: MAX_BREAKS - MAX_LATEST], ranked[MAX_BREAKS - MAX_LATEST :]
    others.sort(key=lambda each: -each[1].at)
    return dict(kept + others[:MAX_LATEST])


metadata = sa.MetaData()
_NAMES = ("project", "key", "model", "prefix_kind", "prefix")
_CAUSES = {each: f"num_{each}" for each in CAUSES}
"""The column of each cause."""
_COUNTS = ("num_requests", "input_tokens", "cached_tokens", *_CAUSES.values())
cache_report = sa.Table(
    "cache_report",
    metadata,
    sa.Column("org", sa.Text, primary_key=True),
    sa.Column("hour", sa.TIMESTAMP(timezone=True), primary_key=True),
    *(sa.Column(name, sa.Text, primary_key=True) for name in _NAMES),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in _COUNTS),
    sa.Column("breaks", JSONB, nullable=False),
)
"""As its migration makes it."""
_GROUP = "org, project, key, model, hour"
_ID = f"{_GROUP}, prefix_kind, prefix"
EXAMPLE = """
    (array_agg({each} ORDER BY {each} ? 'message' DESC, {each}->'at' DESC))[1]
    || (array_agg({each} ORDER BY {each}->'at' DESC))[1]
"""
"""SQL that merges several breaks of one cause and position: the latest break, with the message of
the latest one whose message is known."""
_MERGED = f"""(
    SELECT coalesce(jsonb_agg(one ORDER BY cost DESC), '[]') FROM (
        SELECT one, cost,
            row_number() OVER (ORDER BY cost DESC, latest DESC) AS by_cost,
            row_number() OVER (ORDER BY latest DESC) AS by_age
        FROM (
            SELECT max((each->>'at')::float8) AS latest,
                sum((each->>'uncached_tokens')::bigint) AS cost,
                {EXAMPLE.format(each="each")}
                || jsonb_build_object(
                    'requests', sum((each->>'requests')::bigint),
                    'uncached_tokens', sum((each->>'uncached_tokens')::bigint)
                ) AS one
            FROM jsonb_array_elements(now.breaks || excluded.breaks) AS each
            GROUP BY each->>'cause', each->>'position'
        ) AS merged
    ) AS ranked
    WHERE by_cost <= {MAX_BREAKS - MAX_LATEST} OR by_age <= {MAX_LATEST}
)"""
WRITE = sa.text(
    f"""
    INSERT INTO cache_report AS now ({_ID}, {", ".join(_COUNTS)}, breaks)
    SELECT org, project, key, model, to_timestamp(hour), prefix_kind, prefix,
        {", ".join(f"coalesce({name}, 0)" for name in _COUNTS)}, breaks
    FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS new (
        org text, project text, key text, model text, hour bigint, prefix_kind text, prefix text,
        {", ".join(f"{name} bigint" for name in _COUNTS)}, breaks jsonb
    )
    ON CONFLICT ({_ID}) DO UPDATE SET
        {", ".join(f"{name} = now.{name} + excluded.{name}" for name in _COUNTS)},
        breaks = {_MERGED}
    """
)
KNOWN_OF_LARGE = sa.text(
    f"""
    SELECT org, project, key, model, asked.hour, prefix_kind, prefix
    FROM cache_report JOIN jsonb_to_recordset(CAST(:groups AS jsonb)) AS asked (
        org text, project text, key text, model text, hour bigint, num_new integer
    ) USING (org, project, key, model)
    WHERE cache_report.hour = to_timestamp(asked.hour) AND num_new + (
        SELECT count(*) FROM cache_report AS there
        WHERE (there.org, there.project, there.key, there.model)
            = (asked.org, asked.project, asked.key, asked.model)
            AND there.hour = to_timestamp(asked.hour)
    ) > {MAX_PREFIXES}
    """
)
"""The prefixes that are there of each group which may have too many with those that are added."""
FORGET = sa.text(
    f"""
    DELETE FROM cache_report WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM cache_report
        WHERE hour < now() - interval '{KEPT_DAYS} days' LIMIT {MAX_FORGOTTEN}
    ))
    """
)


async def write(
    db: AsyncEngine, rows: Mapping[RowId, ReportCounts], due: Sequence[RowId]
) -> list[RowId]:
    """Add the first of `due` in one transaction; returns the others."""
    batch = due[:MAX_BATCH]
    async with db.begin() as conn:
        fitting = await _fitted(conn, {each: rows[each] for each in batch})
        # In the order of their ids: processes that write at once never wait in a circle.
        encoded = [_encoded(each, fitting[each]) for each in sorted(fitting)]
        await conn.execute(WRITE, {"rows": msgspec.json.encode(encoded).decode()})
    return [*due[MAX_BATCH:]]


async def forget_old(db: AsyncEngine) -> None:
    async with db.begin() as conn:
        await conn.execute(FORGET)


async def _fitted(
    conn: AsyncConnection, rows: Mapping[RowId, ReportCounts]
) -> dict[RowId, ReportCounts]:
    """Return the rows with what is beyond `MAX_PREFIXES` under "other": by what is there
    already."""
    names = _GROUP.split(", ")
    groups = [
        {**dict(zip(names, each, strict=True)), "num_new": number}
        for each, number in Counter(id_[:5] for id_ in rows).items()
    ]
    asked = {"groups": msgspec.json.encode(groups).decode()}
    known: defaultdict[tuple[Any, ...], set[tuple[str, str]]] = defaultdict(set)
    for row in await conn.execute(KNOWN_OF_LARGE, asked):
        known[tuple(row[:5])].add((row[5], row[6]))
    fitting: dict[RowId, ReportCounts] = {}
    for each, counted in rows.items():
        there, label = known.get(each[:5]), (each.prefix_kind, each.prefix)
        if there is None:
            fitting[each] = counted
            continue
        if label not in there and len(there) >= MAX_PREFIXES and each.prefix_kind != "other":
            each = each._replace(prefix_kind="other", prefix=OTHER)
        else:
            there.add(label)
        fitting.setdefault(each, ReportCounts()).add(counted)
    return fitting


def _encoded(each: RowId, counted: ReportCounts) -> dict[str, Any]:
    """Return a row as the statement reads it; a cause that did not come is left out."""
    row: dict[str, Any] = dict(zip(RowId._fields, each, strict=True))
    row["num_requests"] = counted.num_requests
    row["input_tokens"] = counted.input_tokens
    row["cached_tokens"] = counted.cached_tokens
    for cause, number in counted.causes.items():
        row[_CAUSES[cause]] = number
    row["breaks"] = [*costliest(counted.breaks).values()] if counted.breaks else []
    return row
