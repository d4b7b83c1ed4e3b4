"""/v1/admin/planner: how many engines the planner of the answering home wants of each model, and
why, and on which devices they run. For operators: engines are the installation's."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from litestar import Request

from gateway.fleet.planner.view import PlacedEngine, PlannedChange, PlannedModel
from gateway.routes.shared.access import needs, services
from gateway.routes.shared.operations import RouteGroup

admin = RouteGroup(tag="Fleet", opt=needs("operator:models"))


class PlannerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["planner"] = "planner"
    mode: str
    """off, dry-run or on."""
    at: int | None
    """When it decided last (Unix seconds). Null: it has nothing to decide."""
    models: list[PlannedModel]
    changes: list[PlannedChange]
    """The last ones, the newest first; the audit log has all of them."""
    engines: list[PlacedEngine] = []
    """Those that run or start on devices which `[fleet.planner] devices` names."""


@admin.get("/v1/admin/planner", "What the planner of replicas wants, and why", answer=PlannerAnswer)
async def retrieve_planner(request: Request[Any, Any, Any]) -> PlannerAnswer:
    configuration = services(request).configuration
    view = services(request).planner_view()
    if view is None:
        mode = "off" if configuration is None else configuration.settings.fleet.planner.mode
        return PlannerAnswer(mode=mode, at=None, models=[], changes=[])
    return PlannerAnswer(
        mode=view.mode,
        at=view.at,
        models=view.models,
        changes=view.changes,
        engines=view.engines,
    )


routes = [retrieve_planner]
