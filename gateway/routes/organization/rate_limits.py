"""/v1/organization/projects/{project_id}/rate_limits: what a project may use of each model, in
OpenAI's shapes.

Those of `PROJECT_LIMITS` are enforced by the limiter, beside the plans'; the other limits that
OpenAI knows are refused by name, and so is a number that the plan of the project or of its org
would make void. A rate limit's id is `rl-` and the model's name.
"""

from __future__ import annotations

from typing import Any

from gateway.principal import MAX_LIMIT, PROJECT_LIMITS
from gateway.routes.shared.access import needs_in_project
from gateway.routes.shared.resource import AdminRequest, AdminResource, check_id
from gateway.tenancy import projects
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.keys import rate_limits
from gateway.tenancy.keys.rate_limits import NO_LIMITS, ProjectModelLimits
from gateway.wire.organization import organization as wire

PREFIX = "rl-"


LimitsInForce = tuple[str, ProjectModelLimits, ProjectModelLimits]
"""A model, what the project may use of it, and what the plans allow."""


def to_rate_limit(found: LimitsInForce) -> wire.RateLimit:
    """Return what binds: the tighter of its own limit and its plans'. No limit is MAX_LIMIT:
    OpenAI's field is a number."""
    model, own, plans = found

    def binding(own: int | None, plans: int | None) -> int:
        return min(MAX_LIMIT if n is None else n for n in (own, plans))

    limits: dict[str, Any] = {
        theirs: binding(getattr(own, ours), getattr(plans, ours))
        for ours, theirs in PROJECT_LIMITS.items()
    }
    return wire.RateLimit(id=PREFIX + model, model=model, **limits)


limits = AdminResource[LimitsInForce](
    path="/v1/organization/projects/{project_id:str}/rate_limits",
    tag="Rate limits",
    change=needs_in_project("admin:billing"),
    view=wire.RateLimit,
    show=to_rate_limit,
    # Its own limit is not shown where a plan's is tighter.
    unseen=lambda found: (found[1],),
    checks_ids=False,
)


def served_models(request: AdminRequest) -> set[str]:
    return {route.model for route in request.services.generation.fleet.routes}


@limits.page(
    "List a project's rate limits: of the models that are served, and those it has",
    wire.RateLimitsQuery,
)
async def list_rate_limits(
    request: AdminRequest, query: wire.RateLimitsQuery
) -> tuple[list[LimitsInForce], bool]:
    check_id("project_id", request.id)
    async with request.transaction() as conn:
        await projects.get_project(conn, **request.where)
        own = await rate_limits.limits_of_models(conn, **request.where)
        plans = await rate_limits.limits_of_plans(conn, **request.where)
    models = sorted({*own, *served_models(request)})
    page, more = cut([PREFIX + model for model in models], query)
    names = [each.removeprefix(PREFIX) for each in page]
    return [(model, own.get(model, NO_LIMITS), plans) for model in names], more


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


@limits.route(
    "POST",
    limits.path + "/{rate_limit_id:path}",
    "Limit what a project may use of a model; every worker goes by it within a second",
    body=wire.RateLimitUpdate,
    is_patch=True,
    conditional=True,
)
async def update_rate_limit(request: AdminRequest, values: dict[str, Any]) -> LimitsInForce:
    project_id = check_id("project_id", request.ids["project_id"])
    where = {"org_id": request.org_id, "project_id": project_id}
    wanted = {field: values[name] for field, name in PROJECT_LIMITS.items() if name in values}
    written = request.ids["rate_limit_id"].removeprefix("/")
    model = written.removeprefix(PREFIX)
    async with request.announced(project_id) as conn:
        await projects.hold_project(conn, **where)
        known = await rate_limits.limits_of_models(conn, **where)
        if model == written or model not in {*known, *served_models(request)}:
            raise NotFound("rate_limit_id", "no model has this rate limit")
        plans = await rate_limits.limits_of_plans(conn, **where)
        request.check((model, known.get(model, NO_LIMITS), plans))
        try:
            after = await rate_limits.set_limits(
                conn, **where, model=model, wanted=wanted, actor=request.actor
            )
        except InvalidField as error:
            field = PROJECT_LIMITS.get(error.param, error.param)
            raise InvalidField(field, error.message) from error
    return model, after, plans


routes = [list_rate_limits, update_rate_limit]
