"""A project's own limits by model, as authentication reads them: one more column of its query.

`rate_limits` sets what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from gateway.principal import Plan
from gateway.tenancy.member_tables import project_rate_limits


def limits_by_model(project_id: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Select the limits for `to_plans`; NULL where the project has none."""
    own = project_rate_limits.c
    values = sa.func.jsonb_build_array(own.tokens_per_minute, own.requests_per_minute)
    found = sa.select(sa.func.jsonb_object_agg(own.model, values))
    return found.where(own.project_id == project_id).scalar_subquery()


def to_plans(found: Mapping[str, list[int | None]] | None) -> dict[str, Plan]:
    """Return the plans by model; a plan of one model is named for it."""
    return {
        model: Plan(name=model, tokens_per_minute=tokens, requests_per_minute=requests)
        for model, (tokens, requests) in (found or {}).items()
    }
