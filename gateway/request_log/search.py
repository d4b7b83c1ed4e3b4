"""Finds requests by what they were: a page at a time, the newest first, and one by its id.

A page reads at most `MAX_SCANNED` rows. What few requests have in common (a cost, a latency) may
take more: then the page has what it found, and says how far back it looked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.queries import Query

PAGE_ROWS = 50
MAX_SCANNED = 20_000
MAX_FAILED_SCANNED = 10_000
"""Those that failed lie apart from each other: to read one takes longer."""
ID = re.compile(r"(?:req_)?([0-9a-f]{12}7[0-9a-f]{19})")
"""A UUIDv7 without its hyphens: what a client saw as `x-request-id`."""
MAX_MS = 253_402_300_799_999
"""The end of the year 9999, in Unix milliseconds: an id may name a time that no calendar has."""
Outcome = Literal["ok", "bad", "refused", "limited", "failed", "left", "missed"]
OUTCOMES: Mapping[Outcome, str] = {
    "ok": "status < 400",
    "bad": "status >= 400",
    "refused": "status BETWEEN 400 AND 498 AND status <> 429",
    "limited": "status = 429",
    "failed": "status >= 500",
    "left": "status = 499",
    "missed": "is_good IS FALSE",
}
"""The words by which requests are filtered. `missed`: its SLO."""
_COLUMNS = (
    *("at", "id", "project", "key", "model", "lane", "route", "status", "is_good"),
    *("duration_us", "ttft_us", "tpot_us", "itl_p50_us", "itl_p99_us", "queue_us"),
    *("uncached_tokens", "cached_tokens", "written_tokens", "output_tokens", "reasoning_tokens"),
    *("cost_pico", "cache_cause", "cache_position", "trace", "batch", "tags", "error_code"),
    "model_version",
)


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Describes what is looked for. Empty and zero: all."""

    start: datetime
    end: datetime
    project: str = ""
    key: str = ""
    model: str = ""
    lane: str = ""
    outcome: Outcome | Literal[""] = ""
    status: int = 0
    least_pico: int = 0
    least_ms: float = 0
    """The whole request took at least as long."""
    least_ttft_ms: float = 0
    batch: str = ""
    tag: tuple[str, str] | None = None
    """A tag and its value."""
    error_code: str = ""

    @property
    def is_scan(self) -> bool:
        """Tell whether rows are read that may not be what is looked for."""
        found = (self.project, self.model, self.lane, self.status, self.least_pico)
        odd = self.outcome in ("ok", "refused", "limited", "failed", "left", "missed")
        indexed = bool(self.batch) + bool(self.key) + bool(self.outcome)  # one of them is sought
        more = (self.tag, self.error_code, self.least_ms, self.least_ttft_ms)
        return any((*found, *more, odd, indexed > 1))


class FoundRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as lists show it. Latencies are microseconds."""

    id: str
    at: datetime
    project: str
    key: str
    project_name: str | None
    """None: it is gone, or of no project."""
    key_name: str | None
    model: str
    lane: str
    route: str
    status: int
    is_good: bool | None
    duration_us: int
    ttft_us: int | None
    tpot_us: int | None
    """Per output token after the first, on average."""
    itl_p50_us: int | None
    itl_p99_us: int | None
    """Quantiles of the gaps between output tokens."""
    queue_us: int | None
    uncached_tokens: int
    cached_tokens: int
    written_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_pico: int
    cache_cause: str | None
    cache_position: int | None
    trace: str
    batch: str | None
    """The id of the batch whose line it is."""
    error_code: str | None
    """The code of the error that its client was told, or its type where it has none."""
    tags: Mapping[str, str] | None
    model_version: int | None
    """The version of the model that answered. None: it has none."""
    stages: Sequence[Any] = ()
    """As `StageRow` has them; only of a request that was asked for by its id, as what follows."""
    has_content: bool = False
    """Its texts are stored."""
    cache_break: Mapping[str, str] | None = None
    """The `place` and `role` of the message that `cache_position` lies in, where that is known."""

    @property
    def input_tokens(self) -> int:
        return self.uncached_tokens + self.cached_tokens + self.written_tokens

    @property
    def ttft_ms(self) -> float | None:
        return None if self.ttft_us is None else self.ttft_us / 1000

    @property
    def duration_ms(self) -> float:
        return self.duration_us / 1000


class FoundPage(msgspec.Struct, frozen=True):
    rows: Sequence[FoundRequest]
    after: str | None
    """The id behind which the next page begins; None: this is the last."""
    looked_until: datetime | None
    """The time back to which was looked, where the page is not full and not the last."""


def read_id(text: str) -> str | None:
    """Return the digits of a request's id; None: it is none."""
    found = ID.fullmatch(text.strip().lower())
    if found is None or int(found[1][:12], 16) > MAX_MS:
        return None
    return found[1]


def time_of(digits: str) -> datetime:
    """Return when a request was made, by its id."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=int(digits[:12], 16))


async def find_requests(
    conn: AsyncConnection,
    org: str,
    search: Search,
    *,
    after: str | None = None,
    limit: int = PAGE_ROWS,
) -> FoundPage:
    """Find requests. `after`: the id behind which the page begins. `conn`: sees the org's rows."""
    begin = None if after is None else read_id(after)
    values: dict[str, Any] = {
        "org": org,
        "start": search.start,
        "end": search.end,
        "limit": limit + 1,
    }
    seek, most = ["org = :org", "at >= :start", "at < :end"], MAX_SCANNED
    if begin is not None:
        seek += ["at <= :after_at", "(at, id) < (:after_at, :after_id)"]
        values |= {"after_at": time_of(begin), "after_id": UUID(begin)}
    if search.batch:
        seek.append("batch = :batch")
        values["batch"] = search.batch
    elif search.key:
        seek.append("key = :key")
        values["key"] = search.key
    elif search.error_code or (search.outcome and search.outcome not in ("ok", "missed")):
        seek.append("status >= 400")  # an index has them alone
        most = MAX_FAILED_SCANNED
    values["scan"] = most if search.is_scan else limit + 1
    match, named = _conditions(search)
    rows = (await conn.execute(sa.text(_page(seek, match)), values | named)).mappings().all()
    found = [_to_request(row) for row in rows if row["id"] is not None]
    last = rows[0]
    if len(found) > limit:
        return FoundPage(found[:limit], f"req_{found[limit - 1].id}", None)
    if search.is_scan and last["num_scanned"] == most:
        return FoundPage(found, f"req_{last['last_id'].hex}", last["last_at"])
    return FoundPage(found, None, None)


def _conditions(search: Search) -> tuple[list[str], dict[str, Any]]:
    """Return what rows are asked that were read, and the values of it."""
    asked = {
        "project": ("project = :project", search.project),
        "model": ("model = :model", search.model),
        "lane": ("lane = :lane", search.lane),
        "status": ("status = :status", search.status),
        "error_code": ("error_code = :error_code", search.error_code),
        "least_pico": ("cost_pico >= :least_pico", search.least_pico),
        "least_us": ("duration_us >= :least_us", round(search.least_ms * 1000)),
        "least_ttft": ("ttft_us >= :least_ttft", round(search.least_ttft_ms * 1000)),
        "key": ("key = :key", search.key if search.batch else ""),
    }
    match = [condition for condition, value in asked.values() if value]
    values = {name: value for name, (_, value) in asked.items() if value}
    if search.outcome:
        match.append(OUTCOMES[search.outcome])
    if search.tag is not None:
        match.append("tags ->> :tag = :tag_value")
        values["tag"], values["tag_value"] = search.tag
    return match, values


def _page(seek: Sequence[str], match: Sequence[str]) -> str:
    """Return the statement. Its first row is there in any case, and says how far was looked where
    the page is not full: one that is full reads no further than its last row."""
    scan = f"FROM request_log WHERE {' AND '.join(seek)} ORDER BY at DESC, id DESC LIMIT :scan"
    return f"""
        WITH matched AS MATERIALIZED (
            SELECT * FROM (SELECT {", ".join(_COLUMNS)} {scan}) AS scanned
            {"WHERE " + " AND ".join(match) if match else ""}
            ORDER BY at DESC, id DESC LIMIT :limit
        ), looked AS (
            SELECT count(*) AS num_scanned, min(at) AS last_at,
                (array_agg(id ORDER BY at, id))[1] AS last_id
            FROM (SELECT at, id {scan}) AS scanned
            WHERE (SELECT count(*) FROM matched) < :limit
        )
        SELECT looked.*, matched.*, {_NAMES_OF} FROM looked LEFT JOIN matched ON true {_NAMED}
        ORDER BY matched.at DESC, matched.id DESC
    """


_NAMES_OF = "projects.name AS project_name, api_keys.name AS key_name"
_NAMED = """
    LEFT JOIN projects ON projects.id = matched.project AND projects.org_id = :org
    LEFT JOIN api_keys ON api_keys.id = matched.key AND api_keys.org_id = :org
"""
_HAS_CONTENT = """
    projects.store_content AND NOT projects.zero_retention AND projects.archived_at IS NULL
    AND EXISTS (
        SELECT FROM request_content AS c
        WHERE c.org = matched.org AND c.at = matched.at AND c.id = matched.id
    )
"""
_CACHE_BREAK = """
    SELECT jsonb_build_object('place', one ->> 'message', 'role', one ->> 'role')
    FROM cache_report AS r, jsonb_array_elements(r.breaks) AS one
    WHERE r.org = matched.org AND r.project = matched.project AND r.key = matched.key
        AND r.model = matched.model
        AND r.hour BETWEEN matched.at - interval '1 hour' AND matched.at + interval '1 hour'
        AND one ->> 'cause' = matched.cache_cause
        AND (one ->> 'position')::bigint = matched.cache_position AND one ? 'message'
    ORDER BY r.hour DESC LIMIT 1
"""
"""The message that the position lies in, as the cache report has found it for a like request."""
_ONE = sa.text(f"""
    SELECT {", ".join(f"matched.{name}" for name in _COLUMNS)}, stages, {_NAMES_OF},
        {_HAS_CONTENT} AS has_content, ({_CACHE_BREAK}) AS cache_break
    FROM request_log AS matched {_NAMED}
    WHERE matched.org = :org AND matched.at = :at AND matched.id = :id
""")
_SINCE = sa.text(f"""
    SELECT {", ".join(f"matched.{name}" for name in _COLUMNS)}, matched.org, {_NAMES_OF}
    FROM (
        SELECT *, row_number() OVER (PARTITION BY org ORDER BY landed_at DESC) AS place FROM (
            SELECT * FROM request_log
            WHERE landed_at > now() - CAST(:back_s AS float8) * interval '1 second'
                AND org = ANY (CAST(:orgs AS text[])) AND at > now() - interval '1 day'
            ORDER BY landed_at DESC LIMIT {MAX_SCANNED}
        ) AS landed
    ) AS matched
    LEFT JOIN projects ON projects.id = matched.project AND projects.org_id = matched.org
    LEFT JOIN api_keys ON api_keys.id = matched.key AND api_keys.org_id = matched.org
    WHERE place <= :limit ORDER BY matched.at, matched.id
""")


async def find_request(conn: AsyncConnection, org: str, request_id: str) -> FoundRequest | None:
    """Find one request. `request_id`: with or without its prefix."""
    digits = read_id(request_id)
    if digits is None:
        return None
    named = {"org": org, "at": time_of(digits), "id": UUID(digits)}
    row = (await conn.execute(_ONE, named)).mappings().one_or_none()
    return None if row is None else _to_request(row)


async def find_landed(
    conn: AsyncConnection, orgs: Sequence[str], back_s: float, limit: int
) -> list[tuple[str, FoundRequest]]:
    """Find the newest requests of some orgs that were written in the last seconds, with their
    orgs: of each org `limit`. A request of more than a day is left out."""
    named = {"orgs": [*orgs], "back_s": back_s, "limit": limit}
    rows = (await conn.execute(_SINCE, named)).mappings()
    return [(row["org"], _to_request(row)) for row in rows]


_ALL_NAMES = sa.text("""
    SELECT id, name FROM projects WHERE org_id = :org AND id = ANY (CAST(:ids AS text[]))
    UNION ALL
    SELECT id, name FROM api_keys WHERE org_id = :org AND id = ANY (CAST(:ids AS text[]))
""")


def names_query(org: str, ids: Iterable[str]) -> Query[Mapping[str, str]]:
    """Return the query of the names of projects and keys, by their ids."""
    columns = (sa.column("id", sa.Text), sa.column("name", sa.Text))
    asked = _ALL_NAMES.bindparams(org=org, ids=sorted(ids)).columns(*columns)
    return Query(asked, lambda rows: {row.id: row.name for row in rows})


def _to_request(row: Any) -> FoundRequest:
    values = {name: row[name] for name in (*_COLUMNS, "project_name", "key_name")}
    values |= {"id": row["id"].hex, "trace": row["trace"].hex, "stages": row.get("stages") or ()}
    values |= {"has_content": bool(row.get("has_content")), "cache_break": row.get("cache_break")}
    return FoundRequest(**values)
