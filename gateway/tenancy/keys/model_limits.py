"""A project's own limits by model, as authentication reads them: one more column of its query.

`rate_limits` sets what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from gateway.principal import PROJECT_LIMITS, Plan
from gateway.tenancy.keys.restrictions import plans_by_model
from gateway.tenancy.member_tables import project_rate_limits


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
