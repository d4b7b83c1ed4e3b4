"""A customer's own view: GET /api/v1/key, and of one request GET /api/v1/generation; and the same
of any request of the org, for who may read its bill: GET /api/v1/requests/{id}.

A key sees its own requests alone. What Postgres does not have yet is looked for in the spools of
this machine, and then in Postgres again, where it may have gone meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from litestar import Response
from litestar.params import FromPath

from billing.ledger.spend_totals import SpentByKey, spent_by_key
from billing.money import format_usd, to_decimal
from billing.pricing.rating import rate
from billing.reports.request_record import find_record
from billing.reports.unshipped_usage import search
from gateway.db import tenant
from gateway.limits.spending import PICO_PER_NANO
from gateway.principal import SCOPE_INFERENCE, SCOPE_USAGE_READ, Principal, SpendCap
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import ErrorEnvelope, RouteGroup
from gateway.tenancy.errors import NotFound
from gateway.wire.organization.usage import parse_query
from gateway.wire.usage.own_view import (
    GenerationQuery,
    GenerationView,
    KeyAmounts,
    KeyData,
    KnownAttempts,
    OwnKey,
    RateLimitView,
    encode,
    read_request_id,
    to_generation,
)

own_view = RouteGroup(tag="Own view", opt=needs(SCOPE_INFERENCE))
organization = RouteGroup(tag="Own view", opt=needs(SCOPE_USAGE_READ))
RESETS: dict[str, Literal["daily", "monthly"]] = {"day": "daily", "month": "monthly"}


@own_view.get(
    "/api/v1/generation",
    "One request of this key: tokens, prices, cache hits, when, and its transfers",
    query=GenerationQuery,
    answer=GenerationView,
    said={404: {JSON: ErrorEnvelope}},
)
async def generation(request: AuthenticatedRequest) -> Response[bytes]:
    asked = parse_query(request.url.query, GenerationQuery).id
    known = await look_up(request, request.user.org_id, asked)
    if known is None or known.events[0].attempt.key != request.user.key_id:
        raise NotFound("id", "no such request of this key")
    return Response(encode(to_generation(known)), media_type=JSON)


@organization.get(
    "/api/v1/requests/{request_id:str}",
    "One request of the organization: what a dispute about it is answered from",
    answer=GenerationView,
    said={404: {JSON: ErrorEnvelope}},
)
async def any_request(request: AuthenticatedRequest, request_id: FromPath[str]) -> Response[bytes]:
    known = await look_up(request, request.user.org_id, request_id)
    if known is None:
        raise NotFound("request_id", "no such request")
    return Response(encode(to_generation(known)), media_type=JSON)


async def look_up(request: AuthenticatedRequest, org_id: str, asked: str) -> KnownAttempts | None:
    """Return what is known of a request of an organization that was billed. Raises: BadField."""
    request_id, made_at = read_request_id(asked)
    known = await in_books(request, org_id, request_id, made_at)
    if known is not None:
        return known
    spools = services(request).spool.directory.parent
    unshipped = await asyncio.to_thread(search, spools, request_id)
    running = [each.recovered() for each in unshipped.open]
    events = [each for each in (*unshipped.closed, *running) if each.attempt.org == org_id]
    if not events:
        return await in_books(request, org_id, request_id, made_at)
    costs = [rate(each.quantities, each.attempt.prices) for each in events if each.kind == "usage"]
    return KnownAttempts(
        events=events,
        status="running" if running else "pending",
        charged_pico=sum(each.amount_pico for each in costs),
    )


async def in_books(
    request: AuthenticatedRequest, org_id: str, request_id: str, made_at: float
) -> KnownAttempts | None:
    async with services(request).system_db.connect() as conn:
        record = await find_record(conn, org_id, request_id, made_at)
    if record is None:
        return None
    return KnownAttempts(
        events=record.events,
        status="booked",
        transfers=record.transfers,
        paid=record.paid,
        charged_pico=record.charged_pico,
    )


@own_view.get(
    "/api/v1/key",
    "This key: what it may spend and has spent, and how often it may ask",
    answer=OwnKey,
)
async def key(request: AuthenticatedRequest) -> Response[bytes]:
    principal = request.user
    async with tenant(services(request).db, principal.org_id) as conn:
        spent = await spent_by_key(conn, principal.org_id, principal.key_id, datetime.now(UTC))
    return Response(encode(OwnKey(to_key(principal, spent))), media_type=JSON)


def to_key(principal: Principal, spent: SpentByKey) -> KeyData:
    own = [cap for cap in principal.spend_caps if cap.scope == "key"]
    cap = min(own, key=lambda each: left_of(each, spent), default=None)
    pico = {
        "usage": spent.total,
        "usage_daily": spent.day,
        "usage_weekly": spent.week,
        "usage_monthly": spent.month,
        "limit": None if cap is None else cap.amount_nano * PICO_PER_NANO,
        "limit_remaining": None if cap is None else max(0, left_of(cap, spent)),
    }
    texts: dict[str, Any] = {k: None if n is None else format_usd(n) for k, n in pico.items()}
    numbers: dict[str, Any] = {k: None if n is None else to_decimal(n) for k, n in pico.items()}
    return KeyData(
        **numbers,
        id=principal.key_id,
        label=principal.key_hint,
        limit_reset=None if cap is None else RESETS.get(cap.period),
        is_provisioning_key=False,
        rate_limit=RateLimitView(requests=requests_per_minute(principal)),
        amounts=KeyAmounts(**texts),
        org_id=principal.org_id,
        project_id=principal.project_id,
    )


def left_of(cap: SpendCap, spent: SpentByKey) -> int:
    used: int = getattr(spent, cap.period)
    return cap.amount_nano * PICO_PER_NANO - used


def requests_per_minute(principal: Principal) -> int:
    plans: Sequence[Any] = (principal.key_plan, principal.project_plan, principal.org_plan)
    limits = [each.requests_per_minute for each in plans if each.requests_per_minute is not None]
    return min(limits, default=-1)


routes = [generation, any_request, key]
