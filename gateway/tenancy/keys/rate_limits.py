"""A project's own limits of one model, narrower than its plan's.

Knows no model list: a limit may stand for a model that is not served at the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from foundation.structs import with_fields
from gateway.audit.log import Actor, record
from gateway.principal import MAX_LIMIT, PROJECT_LIMITS, Plan
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.keys.restrictions import plans_by_model
from gateway.tenancy.member_tables import project_rate_limits
from gateway.tenancy.projects import lock_project
from gateway.tenancy.tables import orgs, plans, projects

MAX_MODELS = 1000
"""Limits of one project."""


@with_fields(PROJECT_LIMITS, int | None, None)
class ProjectModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """None: nothing of its own."""


NO_LIMITS = ProjectModelLimits()


def limits_by_model(project_id: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Select the limits for `to_plans`; NULL where the project has none."""
    own = project_rate_limits.c
    values = sa.func.jsonb_build_array(*(own[name] for name in PROJECT_LIMITS))
    found = sa.select(sa.func.jsonb_object_agg(own.model, values))
    return found.where(own.project_id == project_id).scalar_subquery()


def to_plans(found: Mapping[str, list[int | None]] | None) -> dict[str, Plan]:
    """Return the plans by model; a plan of one model is named for it."""
    by_model = {
        model: dict(zip(PROJECT_LIMITS, limits, strict=True))
        for model, limits in (found or {}).items()
    }
    return plans_by_model(by_model)


async def limits_of_models(
    conn: AsyncConnection, *, org_id: str, project_id: str
) -> dict[str, ProjectModelLimits]:
    """Return the limits that the project has, by model."""
    found = sa.select(project_rate_limits).where(project_rate_limits.c.org_id == org_id)
    found = found.where(project_rate_limits.c.project_id == project_id).limit(MAX_MODELS)
    return {
        row.model: ProjectModelLimits(**{name: getattr(row, name) for name in PROJECT_LIMITS})
        for row in await conn.execute(found)
    }


async def limits_of_plans(
    conn: AsyncConnection, *, org_id: str, project_id: str
) -> ProjectModelLimits:
    """The tighter one each of what the plans of the project and of its org allow. Raises:
    NotFound."""
    plan_of = {owner: plans.alias(f"{owner}_plan") for owner in ("project", "org")}
    joined = projects.join(orgs, projects.c.org_id == orgs.c.id)
    joined = joined.outerjoin(plan_of["project"], projects.c.plan == plan_of["project"].c.name)
    joined = joined.outerjoin(plan_of["org"], orgs.c.plan == plan_of["org"].c.name)
    tightest = [
        # LEAST ignores NULL, which is no limit.
        sa.func.least(*(plan.c[field] for plan in plan_of.values())).label(field)
        for field in PROJECT_LIMITS
    ]
    found = sa.select(*tightest).select_from(joined).where(projects.c.org_id == org_id)
    row = (await conn.execute(found.where(projects.c.id == project_id))).one_or_none()
    if row is None:
        raise NotFound("project", f"no project {project_id!r}")
    return ProjectModelLimits(**row._mapping)


async def set_limits(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str,
    model: str,
    wanted: dict[str, int],
    actor: Actor,
) -> ProjectModelLimits:
    """Set limits; `wanted`: new values by name; what is not there stays. To be announced.

    Raises: NotFound (project), ArchivedError, InvalidField: a number that a plan would make void.
    """
    await lock_project(conn, org_id=org_id, project_id=project_id)
    allowed = await limits_of_plans(conn, org_id=org_id, project_id=project_id)
    for field, value in wanted.items():
        ceiling = getattr(allowed, field)
        if not 0 <= value <= MAX_LIMIT:
            raise InvalidField(field, f"must be 0 to {MAX_LIMIT}")
        if ceiling is not None and value > ceiling:
            raise InvalidField(field, f"must be at most {ceiling}, which the plan allows")
    known = await limits_of_models(conn, org_id=org_id, project_id=project_id)
    before = known.get(model, NO_LIMITS)
    if model not in known and len(known) >= MAX_MODELS:
        raise InvalidField("model", f"a project has limits of at most {MAX_MODELS} models")
    row: dict[str, Any] = {"org_id": org_id, "project_id": project_id, "model": model, **wanted}
    added = insert(project_rate_limits).values(**row)
    if wanted:
        added = added.on_conflict_do_update(index_elements=["project_id", "model"], set_=wanted)
    else:
        added = added.on_conflict_do_nothing()
    await conn.execute(added)
    after = msgspec.structs.replace(before, **wanted)
    if after != before:
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action="rate_limit.updated",
            target=f"rl-{model}",
            before={"project_id": project_id, "model": model, **msgspec.structs.asdict(before)},
            after={"project_id": project_id, "model": model, **msgspec.structs.asdict(after)},
        )
    return after
