"""The rows of requests, and the one statement that writes a batch of them.

It inserts those that are not there yet and adds exactly these to the sums of their hour and day, so
a batch that comes again, because nobody heard that it was committed, counts once. Rows and sums are
locked in the order of their keys, hours before days: gateways that write beside each other never
wait in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.request_log.histograms import unit_sql
from gateway.request_log.tables import COUNTS, GROUPED, HISTOGRAMS, LATENCIES, OUTCOMES, TOKENS

HOURS_KEPT_DAYS = 100
"""Sums by hour are kept so long; those by day are kept for ever."""
MAX_FORGOTTEN = 10_000
"""Sums a statement."""


class StageRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stage of a request. Times are microseconds; `began_us`: after the request began."""

    name: str
    began_us: int
    took_us: int
    about: str = ""
    outcome: str = ""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that was answered."""

    id: str
    """32 hex digits: a UUIDv7."""
    at_ms: int
    """When it was made: Unix milliseconds, those in its id, so that an id tells where its row
    is."""
    org: str
    project: str
    key: str
    model: str
    lane: str
    route: str
    status: int
    is_good: bool | None = None
    """It met its SLO. None: it has none."""
    duration_us: int
    ttft_us: int | None = None
    tpot_us: int | None = None
    """Per output token after the first, on average."""
    queue_us: int | None = None
    uncached_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost_pico: int = 0
    trace: str
    """32 hex digits."""
    stages: list[StageRow] | None = None
    cache_cause: str | None = None
    """The reason why no more of its prompt was cached (`CacheCause`)."""
    cache_position: int | None = None
    """The position of the first token of which that is said."""
    batch: str | None = None
    """The id of the batch whose line it is."""
    tags: Mapping[str, str] | None = None
    """The tags that its client has it counted by."""
    itl_p50_us: int | None = None
    itl_p99_us: int | None = None
    """Quantiles of the gaps between its tokens (`telemetry.latency_counts.TokenGaps`)."""
    itl: str | None = None
    """The histogram of all these gaps, for the sums; the row itself does not keep it."""
    error_code: str | None = None
    """The code of the error that its client was told, or its type where it has none."""
    model_version: int | None = None
    """The version of the model that answered. None: it has none."""

    @property
    def day(self) -> date:
        return datetime.fromtimestamp(self.at_ms / 1000, UTC).date()


_TYPES = {
    "id": "uuid",
    **dict.fromkeys(("org", *GROUPED, "route"), "text"),
    "status": "smallint",
    "is_good": "boolean",
    **dict.fromkeys(("duration_us", "ttft_us", "tpot_us", "queue_us", "cost_pico"), "bigint"),
    **dict.fromkeys(TOKENS, "integer"),
    "trace": "uuid",
    "stages": "json",
    "cache_cause": "text",
    "cache_position": "integer",
    "batch": "text",
    "tags": "json",
    **dict.fromkeys(("itl_p50_us", "itl_p99_us"), "bigint"),
    "error_code": "text",
    "model_version": "integer",
}
_NAMES = ", ".join(_TYPES)
_READ = f"""
    SELECT {_NAMES}, itl, TIMESTAMPTZ 'epoch' + at_ms * INTERVAL '1 millisecond' AS at
    FROM json_to_recordset(CAST(:rows AS json)) AS read (
        at_ms bigint, itl numeric, {", ".join(f"{name} {kind}" for name, kind in _TYPES.items())}
    )
"""
_INSERT = f"""
    INSERT INTO request_log ({_NAMES}, at, landed_at)
    SELECT {_NAMES}, at, clock_timestamp() FROM read ORDER BY org, at, id
    ON CONFLICT DO NOTHING RETURNING *
"""
_WITH_GAPS = """
    SELECT added.*, gaps.itl FROM added
    JOIN (SELECT DISTINCT ON (org, at, id) org, at, id, itl FROM read) AS gaps USING (org, at, id)
"""
"""One that comes twice in a batch is added once."""
_SUMMED = {
    "num_requests": "count(*)",
    **{name: f"count(*) FILTER (WHERE {which})" for name, which in OUTCOMES.items()},
    **{name: f"sum({name})" for name in TOKENS},
    "duration_us": "sum(duration_us)",
    "queue_us": "coalesce(sum(queue_us), 0)",
    "cost_pico": "sum(cost_pico)",
    **{name: f"sum({unit_sql(f'{name}_us')})" for name in LATENCIES},
    "itl": "coalesce(sum(itl), 0)",
}


def _add(unit: str, table: str, *, after: str) -> str:
    """Return SQL that adds the rows of `fresh` to the sums of their hour or day."""
    key = f"org, {unit}, {', '.join(GROUPED)}"
    names = ", ".join(_SUMMED)
    sums = ", ".join(f"{each} AS {name}" for name, each in _SUMMED.items())
    return f"""
        INSERT INTO {table} AS known ({key}, {names})
        SELECT org, date_trunc('{unit}', at, 'UTC') AS {unit}, {", ".join(GROUPED)}, {sums}
        FROM fresh WHERE {after} GROUP BY {key} ORDER BY {key}
        ON CONFLICT ({key}) DO UPDATE SET
            {", ".join(f"{name} = known.{name} + excluded.{name}" for name in _SUMMED)}
        RETURNING 1
    """


def _write(added: str, fresh: str) -> sa.TextClause:
    hours = _add("hour", "requests_hourly", after="true")
    days = _add("day", "requests_daily", after="(SELECT count(*) FROM hours) > 0")
    return sa.text(f"""
        WITH read AS MATERIALIZED ({_READ}),
        added AS ({added}), fresh AS MATERIALIZED ({fresh}), hours AS ({hours}), days AS ({days})
        SELECT count(*) FROM fresh
    """)


_KEEPING = _write(_INSERT, _WITH_GAPS)
_COUNTING = _write("SELECT * FROM read", "SELECT * FROM added")
_KEEP_DAY = sa.text("SELECT keep_request_day(:day)")
_DROP_DAYS = sa.text("SELECT drop_request_days(:before)")
_FORGET = sa.text(f"""
    DELETE FROM requests_hourly WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM requests_hourly
        WHERE hour < now() - interval '{HOURS_KEPT_DAYS} days' LIMIT {MAX_FORGOTTEN}
    ))
""")
encode = msgspec.json.Encoder().encode
"""Encodes a row as `write` takes it."""
assert set(_SUMMED) == {*COUNTS, "cost_pico", *HISTOGRAMS}


async def write(conn: AsyncConnection, rows: Sequence[bytes], *, keeps: bool = True) -> int:
    """Write rows, each as `encode` has it, and return how many are new. `keeps`: insert them; else
    they are counted in the sums alone, and again if they come again. Their days have partitions."""
    sent = b"[%b]" % b",".join(rows)
    statement = _KEEPING if keeps else _COUNTING
    return int(await conn.scalar(statement, {"rows": sent.decode()}) or 0)


async def keep_day(conn: AsyncConnection, day: date) -> None:
    """Make the partition of a day, unless it is there."""
    await conn.execute(_KEEP_DAY, {"day": day})


async def drop_days(conn: AsyncConnection, *, keep: int, today: date) -> int:
    """Drop the partitions of all days but today and the `keep` before it."""
    return int(await conn.scalar(_DROP_DAYS, {"before": today - timedelta(days=keep)}) or 0)


async def forget_hours(conn: AsyncConnection) -> None:
    """Delete some of the sums by hour that are older than `HOURS_KEPT_DAYS`."""
    await conn.execute(_FORGET)
