"""The cache report's queries and results; the pages are those of OpenAI's reports of usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.generation_events import CacheCause
from gateway.wire.organization.usage import Filter, Number
from gateway.wire.shared.resource import view_of

HIT_RATE_DIGITS = 4


class OwnCacheQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`GET /api/v1/cache`: of the key that asks. Without `start_time` a day; grouped by
    model and prefix unless it says otherwise."""

    start_time: Number | None = None
    end_time: Number | None = None
    bucket_width: Literal["1h", "1d"] = "1h"
    limit: Number | None = None
    page: str | None = None
    models: Filter = []
    prefixes: Filter = []
    group_by: list[Literal["model", "prefix"]] = []


class CacheReportQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`GET /v1/organization/cache_report`: the arguments of `cache_reading.read_cache_report`."""

    start_time: Number
    end_time: Number | None = None
    bucket_width: Literal["1h", "1d"] = "1d"
    limit: Number | None = None
    page: str | None = None
    project_ids: Filter = []
    api_key_ids: Filter = []
    models: Filter = []
    prefixes: Filter = []
    group_by: list[CacheGroup] = []


class CacheCauses(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by why no more of their prompts was cached (docs/caching.md); their sum is
    `num_model_requests`."""

    intact: int = 0
    first: int = 0
    changed: int = 0
    evicted: int = 0
    restarted: int = 0
    other_replica: int = 0
    not_kept: int = 0
    unmarked: int = 0
    too_short: int = 0
    unknown: int = 0


class CacheBreak(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose prefixes broke by the same cause at the same position."""

    cause: CacheCause
    position: int
    """In tokens from the prompt's first: of the first one that differs, or was not there."""
    requests: int
    uncached_tokens: int
    """The total over their prompts."""
    message: str | None
    """The message that holds the position, as a path into the body: `messages[0]`, `tools`. Null:
    unknown, or in no message."""
    message_index: int | None
    """The index among the messages that the model reads, including instructions."""
    role: str | None
    last_at: int
    """Unix seconds."""
    last_request_id: str
    """An example, for `GET /api/v1/generation`."""


HitRate = Annotated[float, Meta(ge=0, le=1)]


class CacheResult(msgspec.Struct, frozen=True, kw_only=True):
    """A name that was not grouped by is null, and so are all of `is_rest`."""

    object: Literal["organization.cache_report.result"] = "organization.cache_report.result"
    num_model_requests: int
    input_tokens: int
    cached_tokens: int
    """As `usage` said with the answers, and as it is billed."""
    hit_rate: HitRate
    causes: CacheCauses
    breaks: Sequence[CacheBreak]
    """The costliest first; `causes` counts all."""
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    prefix: str | None = None
    prefix_kind: PrefixKind | None = None
    is_rest: bool = False
    """All that were too many to be told apart."""


def to_cache_result(row: CacheRow) -> CacheResult:
    names = row.names or {}
    return view_of(
        CacheResult,
        row,
        num_model_requests=row.num_requests,
        hit_rate=round(row.cached_tokens / row.input_tokens, HIT_RATE_DIGITS),
        causes=msgspec.convert(row.causes, CacheCauses),
        breaks=[
            view_of(CacheBreak, each, last_at=int(each.at), last_request_id=each.request_id)
            for each in row.breaks
        ],
        project_id=names.get("project"),
        api_key_id=names.get("key"),
        model=names.get("model"),
        prefix=names.get("prefix"),
        prefix_kind=names.get("prefix_kind"),
        is_rest=row.names is None,
    )


PrefixKind = Literal["cache_key", "digest", "short", "other"]
"""`short`: all prompts under `PREFIX_TOKENS` of who names no key. `other`: those that were too
many."""


class Break(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Those of one cause and position, and one of them as an example."""

    cause: CacheCause
    position: int
    requests: int = 0
    uncached_tokens: int = 0
    at: float = 0.0
    """Unix seconds, of the latest."""
    request_id: str = ""
    message: str | None = None
    """The path in the client's body: `messages[2]`; None: not looked up, or in no message."""
    message_index: int | None = None
    role: str | None = None

    def merge(self, other: Break) -> None:
        self.requests += other.requests
        self.uncached_tokens += other.uncached_tokens
        if other.at > self.at:
            self.at, self.request_id = other.at, other.request_id
        if self.message is None:
            self.message, self.role = other.message, other.role
            self.message_index = other.message_index


CacheGroup = Literal["project_id", "api_key_id", "model", "prefix"]


class CacheRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group of one bucket. names: by column, of those that it was grouped by; None: what was
    added up beyond `MAX_RESULTS`."""

    names: Mapping[str, str] | None
    num_requests: int
    input_tokens: int
    cached_tokens: int
    causes: Mapping[CacheCause, int]
    breaks: Sequence[Break] = ()
