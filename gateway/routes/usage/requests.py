"""GET /v1/requests and GET /v1/requests/{id}: the requests of an organization by what they were,
and one of them whole. What /console/requests shows, from the same log and the same books.

A page reads a bounded number of rows, whatever is looked for: it may have fewer than there are,
and says how far back it looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from litestar import Response
from litestar.params import FromPath
from msgspec import Meta

from billing.errors import MoneyError
from billing.ledger.tags import to_tag
from billing.money import format_usd, usd
from gateway.db import tenant
from gateway.generation_events import CachedTokens
from gateway.principal import SCOPE_USAGE_READ
from gateway.request_errors import BadField
from gateway.request_log.route_choice import RouteChoice, choices_of, found_of
from gateway.request_log.search import (
    FoundPage,
    FoundRequest,
    Outcome,
    Search,
    find_request,
    find_requests,
    read_id,
)
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import ErrorEnvelope, RouteGroup
from gateway.routes.shared.resource import org_of
from gateway.routes.usage.own_view import look_up
from gateway.tenancy.errors import NotFound
from gateway.wire.organization.usage import Number, parse_query
from gateway.wire.shared.page_query import OrgQuery
from gateway.wire.usage.cost import CURRENCY
from gateway.wire.usage.own_view import GenerationData, encode, to_generation

DEFAULT_SPAN = timedelta(days=1)
DEFAULT_LIMIT, MAX_LIMIT = 50, 100
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
requests = RouteGroup(tag="Usage", opt=needs(SCOPE_USAGE_READ))


class LoggedRequestsQuery(OrgQuery):
    """The requests that are looked for. Times are Unix seconds: the last day, unless they say
    otherwise. `tag` is `key=value`."""

    start_time: Number | None = None
    end_time: Number | None = None
    after: Name | None = None
    """The `last_id` of the page before."""
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    id: Name | None = None
    project_id: Name | None = None
    api_key_id: Name | None = None
    model: Name | None = None
    lane: Literal["interactive", "agentic", "batch"] | None = None
    outcome: Outcome | None = None
    status: Annotated[int, Meta(ge=100, le=599)] | None = None
    error_code: Name | None = None
    batch_id: Name | None = None
    tag: Name | None = None
    min_cost: Name | None = None
    """In USD, a decimal."""
    min_duration_ms: Milliseconds = 0
    min_ttft_ms: Milliseconds = 0


class OneQuery(OrgQuery):
    pass


class RequestTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Counts tokens by kind. The input is their first three, the output has those of reasoning."""

    uncached: int
    cached: int
    written: int
    output: int
    reasoning: int


class RequestCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost as it was counted when the request was answered; the bill has what is charged."""

    amount: str
    currency: str = CURRENCY
    pico_usd: int


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds; null: there is no such time. `tpot_ms` is the mean time between two output
    tokens, `itl_p50_ms` and `itl_p99_ms` are quantiles of it."""

    duration_ms: float
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None


class RequestCache(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why no more of the prompt was cached, and the position of the token from which on
    it was not."""

    cause: str
    position: int | None


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was answered. `slo_met` is null where no objective is for it, `batch_id`
    where it is no line of a batch. `error_code` is that of the error that its client was told, or
    its type where it has none; null: it did not fail, or its client left."""

    id: str
    object: str = "request"
    created_at: int
    """Unix seconds; its id has the milliseconds."""
    project_id: str
    project_name: str | None
    api_key_id: str
    api_key_name: str | None
    model: str
    model_version: int | None
    """Null: the model has no versions."""
    lane: str
    route: str
    status: int
    error_code: str | None
    slo_met: bool | None
    tokens: RequestTokens
    cost: RequestCost
    timing: RequestTiming
    cache: RequestCache | None
    batch_id: str | None
    tags: dict[str, str]
    trace_id: str


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a request: what was done, when after its begin, with what, and why it failed."""

    name: str
    began_ms: float
    took_ms: float
    about: str
    outcome: str


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """A page, the newest first. The next one begins behind `last_id`. `looked_until`: the time, in
    Unix seconds, back to which was looked, where the page ends for that alone."""

    object: str = "list"
    data: Sequence[LoggedRequest]
    first_id: str | None
    last_id: str | None
    has_more: bool
    looked_until: int | None


class WholeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request whole. `log` is null once its row is gone (`keep_days`), `bill` as long as nothing
    was used. `routing`: of each of its generations that could have gone to several replicas, why
    it went where it did. `found_cached`: where each attempt that came to a first token found the
    tokens of its prompt that it did not compute."""

    id: str
    object: str = "request.details"
    log: LoggedRequest | None
    stages: Sequence[StageView]
    routing: Sequence[RouteChoice]
    found_cached: Sequence[CachedTokens]
    bill: GenerationData | None


@requests.get(
    "/v1/requests",
    "Requests by what they were, the newest first",
    query=LoggedRequestsQuery,
    answer=RequestList,
)
async def list_requests(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, LoggedRequestsQuery)
    org_id, _ = org_of(request.user, query.org_id)
    search = to_search(query, datetime.now(UTC))
    async with tenant(services(request).db, org_id) as conn:
        if query.id is not None:
            one = await find_request(conn, org_id, checked_id(query.id, "id"))
            found = FoundPage([] if one is None else [one], None, None)
        else:
            found = await find_requests(conn, org_id, search, after=query.after, limit=query.limit)
    return Response(encode(to_list(found)), media_type=JSON)


@requests.get(
    "/v1/requests/{request_id:str}",
    "One request: its tokens, times and stages, and its bill",
    query=OneQuery,
    answer=WholeRequest,
    said={404: {JSON: ErrorEnvelope}},
)
async def retrieve_request(
    request: AuthenticatedRequest, request_id: FromPath[str]
) -> Response[bytes]:
    org_id, _ = org_of(request.user, parse_query(request.url.query, OneQuery).org_id)
    digits = read_id(request_id)
    if digits is None:
        raise NotFound("request_id", "no such request")
    async with tenant(services(request).db, org_id) as conn:
        row = await find_request(conn, org_id, digits)
    known = await look_up(request, org_id, f"req_{digits}")
    if row is None and known is None:
        raise NotFound("request_id", "no such request")
    whole = WholeRequest(
        id=f"req_{digits}",
        log=None if row is None else to_view(row),
        stages=[] if row is None else [to_stage(*each) for each in row.stages],
        routing=[] if row is None else choices_of(row.stages),
        found_cached=[] if row is None else found_of(row.stages),
        bill=None if known is None else to_generation(known).data,
    )
    return Response(encode(whole), media_type=JSON)


def to_search(query: LoggedRequestsQuery, now: datetime) -> Search:
    """Raises: BadField."""
    end = now + timedelta(seconds=1) if query.end_time is None else moment(query.end_time)
    start = end - DEFAULT_SPAN if query.start_time is None else moment(query.start_time)
    if query.after is not None:
        checked_id(query.after, "after")
    outcome: Any = query.outcome or ""
    return Search(
        start=start,
        end=end,
        project=query.project_id or "",
        key=query.api_key_id or "",
        model=query.model or "",
        lane=query.lane or "",
        outcome=outcome,
        status=query.status or 0,
        error_code=query.error_code or "",
        least_pico=read_cost(query.min_cost),
        least_ms=query.min_duration_ms,
        least_ttft_ms=query.min_ttft_ms,
        batch=query.batch_id or "",
        tag=None if query.tag is None else read_tag(query.tag),
    )


def moment(seconds: int) -> datetime:
    """Return a time that Postgres knows, too: the year 9999 at most."""
    return datetime.fromtimestamp(min(seconds, 253_402_300_799), UTC)


def checked_id(text: str, param: str) -> str:
    if read_id(text) is None:
        raise BadField(f"Invalid value for '{param}': it is no id of a request.", param=param)
    return text


def read_cost(text: str | None) -> int:
    try:
        pico = usd(text or "0")
    except MoneyError:
        pico = -1
    if not 0 <= pico < 2**63:
        message = "Invalid value for 'min_cost': expected an amount in USD, such as 0.01."
        raise BadField(message, param="min_cost")
    return pico


def read_tag(text: str) -> tuple[str, str]:
    tag = to_tag(text)
    if tag is None:
        raise BadField("Invalid value for 'tag': expected key=value.", param="tag")
    return tag


def to_list(found: FoundPage) -> RequestList:
    data = [to_view(row) for row in found.rows]
    return RequestList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=found.after or (data[-1].id if data else None),
        has_more=found.after is not None,
        looked_until=None if found.looked_until is None else int(found.looked_until.timestamp()),
    )


def to_view(row: FoundRequest) -> LoggedRequest:
    cache = None
    if row.cache_cause is not None:
        cache = RequestCache(cause=row.cache_cause, position=row.cache_position)
    return LoggedRequest(
        id=f"req_{row.id}",
        created_at=int(row.at.timestamp()),
        project_id=row.project,
        project_name=row.project_name,
        api_key_id=row.key,
        api_key_name=row.key_name,
        model=row.model,
        model_version=row.model_version,
        lane=row.lane,
        route=row.route,
        status=row.status,
        error_code=row.error_code,
        slo_met=row.is_good,
        tokens=RequestTokens(
            uncached=row.uncached_tokens,
            cached=row.cached_tokens,
            written=row.written_tokens,
            output=row.output_tokens,
            reasoning=row.reasoning_tokens,
        ),
        cost=RequestCost(amount=format_usd(row.cost_pico), pico_usd=row.cost_pico),
        timing=RequestTiming(
            duration_ms=row.duration_us / 1000,
            queue_ms=to_ms(row.queue_us),
            ttft_ms=to_ms(row.ttft_us),
            tpot_ms=to_ms(row.tpot_us),
            itl_p50_ms=to_ms(row.itl_p50_us),
            itl_p99_ms=to_ms(row.itl_p99_us),
        ),
        cache=cache,
        batch_id=row.batch,
        tags=dict(row.tags or {}),
        trace_id=row.trace,
    )


def to_stage(name: str, began_us: int, took_us: int, about: str, outcome: str) -> StageView:
    return StageView(
        name=name,
        began_ms=began_us / 1000,
        took_ms=took_us / 1000,
        about=about,
        outcome=outcome,
    )


def to_ms(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1000


routes = [list_requests, retrieve_request]
