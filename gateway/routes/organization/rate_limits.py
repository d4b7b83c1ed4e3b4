"""/v1/organization/projects/{project_id}/rate_limits: what a project may use of each model, in
OpenAI's shapes.

Tokens and requests per minute are enforced by the limiter, beside the plans'; the other limits that
OpenAI knows are refused by name, and so is a number that the plan of the project or of its org
would make void. A rate limit's id is `rl-` and the model's name.
"""

from __future__ import annotations

from litestar import Response, get, post
from litestar.params import FromPath
from msgspec import UnsetType

from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import (
    AuthenticatedRequest,
    actor_of,
    needs,
    needs_in_project,
    services,
)
from gateway.routes.shared.common_requests import (
    body_of,
    changing_for,
    check_id,
    reading,
    to_listing,
)
from gateway.routes.shared.conditional import answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing
from gateway.tenancy import projects
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.keys import rate_limits
from gateway.tenancy.keys.rate_limits import NO_LIMITS, ProjectModelLimits
from gateway.tenancy.money.plans import MAX_LIMIT
from gateway.wire.organization import organization as wire
from gateway.wire.organization.organization import read_query

RATE_LIMITS = "/v1/organization/projects/{project_id:str}/rate_limits"
PREFIX = "rl-"
WIRE_NAMES = {
    "tokens_per_minute": "max_tokens_per_1_minute",
    "requests_per_minute": "max_requests_per_1_minute",
}


def to_rate_limit(model: str, own: ProjectModelLimits, plans: ProjectModelLimits) -> wire.RateLimit:
    """Return what binds: the tighter of its own limit and its plans'. No limit is MAX_LIMIT:
    OpenAI's field is a number."""

    def binding(own: int | None, plans: int | None) -> int:
        return min(MAX_LIMIT if n is None else n for n in (own, plans))

    return wire.RateLimit(
        id=PREFIX + model,
        model=model,
        max_requests_per_1_minute=binding(own.requests_per_minute, plans.requests_per_minute),
        max_tokens_per_1_minute=binding(own.tokens_per_minute, plans.tokens_per_minute),
    )


@get(
    RATE_LIMITS,
    opt=needs(SCOPE_ADMIN_READ),
    tags=["Rate limits"],
    summary="List a project's rate limits: of the models that are served, and those it has",
    operation_class=describes(query=wire.RateLimitsQuery, answer=Listing[wire.RateLimit]),
)
async def list_rate_limits(
    request: AuthenticatedRequest, project_id: FromPath[str]
) -> Response[bytes]:
    where = {"org_id": request.user.org_id, "project_id": check_id("project_id", project_id)}
    query = read_query(request.url.query, wire.RateLimitsQuery)
    async with reading(request) as conn:
        await projects.get_project(conn, **where)
        own = await rate_limits.limits_of_models(conn, **where)
        plans = await rate_limits.limits_of_plans(conn, **where)
    models = sorted({*own, *(route.model for route in services(request).generation.fleet.routes)})
    page, more = cut([PREFIX + model for model in models], query)
    data = [
        to_rate_limit(model, own.get(model, NO_LIMITS), plans)
        for model in (each.removeprefix(PREFIX) for each in page)
    ]
    return answer(request, to_listing(data, more))


def cut(ids: list[str], query: wire.RateLimitsQuery) -> tuple[list[str], bool]:
    """Return the page of sorted `ids` behind `after`, or the one that ends before `before`; and
    whether there are more that way."""
    between = [
        each
        for each in ids
        if (query.after is None or each > query.after)
        and (query.before is None or each < query.before)
    ]
    more = len(between) > query.limit
    if query.before is not None and query.after is None:
        return between[-query.limit :], more
    return between[: query.limit], more


@post(
    RATE_LIMITS + "/{rate_limit_id:path}",
    opt=needs_in_project("admin:billing"),
    status_code=200,
    tags=["Rate limits"],
    summary="Limit what a project may use of a model; every worker goes by it within a second",
    operation_class=describes(
        body=wire.RateLimitUpdate,
        answer=wire.RateLimit,
        idempotent=True,
        conditional=True,
    ),
)
async def update_rate_limit(
    request: AuthenticatedRequest, project_id: FromPath[str], rate_limit_id: FromPath[str]
) -> Response[bytes]:
    where = {"org_id": request.user.org_id, "project_id": check_id("project_id", project_id)}
    body, precondition = await body_of(request, wire.RateLimitUpdate), if_match(request)
    wanted: dict[str, int] = {}
    for field, name in WIRE_NAMES.items():
        value = getattr(body, name)
        if not isinstance(value, UnsetType):
            wanted[field] = value
    written = rate_limit_id.removeprefix("/")
    model = written.removeprefix(PREFIX)
    async with changing_for(request, project_id) as conn:
        await projects.hold_project(conn, **where)
        known = await rate_limits.limits_of_models(conn, **where)
        served = {route.model for route in services(request).generation.fleet.routes}
        if model == written or model not in {*known, *served}:
            raise NotFound("rate_limit_id", "no model has this rate limit")
        plans = await rate_limits.limits_of_plans(conn, **where)
        own = known.get(model, NO_LIMITS)
        # Its own limit is not shown where a plan's is tighter.
        precondition.check(to_rate_limit(model, own, plans), own)
        try:
            after = await rate_limits.set_limits(
                conn, **where, model=model, wanted=wanted, actor=actor_of(request)
            )
        except InvalidField as error:
            raise InvalidField(WIRE_NAMES.get(error.field, error.field), error.message) from error
    return answer(request, to_rate_limit(model, after, plans), unseen=(after,))


routes = [list_rate_limits, update_rate_limit]
