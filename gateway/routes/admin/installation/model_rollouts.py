"""/v1/admin/models/rollouts: versions on their way to everybody, step by step. For operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway.db import tenant
from gateway.registry import rollout as states
from gateway.registry import rollout_changes as verbs
from gateway.registry.changes import find_version, to_rollout
from gateway.registry.comparison import Outcomes
from gateway.registry.rollout import MAX_STEPS, MOST_AT_LEAST, ModelRollout
from gateway.registry.tables import rollouts as rollouts_table
from gateway.routes.admin.installation.model_versions import (
    OPERATORS,
    ModelsPageQuery,
    Named,
    config_of,
    serves,
)
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.errors import Conflict, InvalidField
from gateway.wire.shared.resource import view_of

Percent = Annotated[int, Meta(ge=1, le=100)]
STEPS: tuple[int, ...] = (5,)
AT_LEAST = 500
WATCH = 500


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """`share`: the percentage of organizations that get the new version now. `new` and `old`: how
    requests ended at this step, of those who got the new version at it and of those who have the
    old one. `part_of_proof`: how much of the evidence there
    is that takes it back, 0 to 1."""

    object: str = "model_rollout"
    id: str
    model: str
    from_version: int
    to_version: int
    state: str
    reason: str
    share: int
    steps: tuple[int, ...]
    step: int
    """The index of the step; -1: the first organizations are only watched."""
    at_least: int
    watch: int
    new: Outcomes
    old: Outcomes
    part_of_proof: float
    created_at: int


class NewRollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`steps`: percentages of the organizations. `at_least`: requests of either version that end
    before the next step. `watch`: as many are watched before the first step."""

    model: Named
    version: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    steps: Annotated[tuple[Percent, ...], Meta(min_length=1, max_length=MAX_STEPS)] = STEPS
    at_least: Annotated[int, Meta(ge=1, le=MOST_AT_LEAST)] = AT_LEAST
    watch: Annotated[int, Meta(ge=0, le=MOST_AT_LEAST)] = WATCH


def to_view(rollout: ModelRollout) -> RolloutView:
    progress = rollout.progress
    return view_of(
        RolloutView,
        rollout,
        share=rollout.percent,
        at_least=rollout.least,
        new=progress.new,
        old=progress.old,
        part_of_proof=round(progress.comparison.part_of_proof, 3),
    )


rollouts = AdminResource[ModelRollout](
    path="/v1/admin/models/rollouts",
    id_name="rollout_id",
    tag="Models",
    read=OPERATORS,
    change=OPERATORS,
    view=RolloutView,
    show=to_view,
    unsteady=("new", "old", "part_of_proof"),
    in_system=True,
)


def select_rollouts(_org_id: str, query: ModelsPageQuery) -> sa.Select[Any]:
    listed = sa.select(rollouts_table)
    return listed if query.model is None else listed.where(rollouts_table.c.model == query.model)


list_rollouts = rollouts.list_all(
    "List the rollouts of versions, the oldest first",
    ModelsPageQuery,
    select=select_rollouts,
    row=to_rollout,
    key=rollouts_table.c.id,
    name="list_rollouts",
)


@rollouts.get("One rollout")
async def retrieve_rollout(request: AdminRequest) -> ModelRollout:
    async with request.reading() as conn:
        return await verbs.get_rollout(conn, request.id)


@rollouts.create("Begin to give a version of a model to everybody, step by step", NewRollout)
async def create_rollout(request: AdminRequest, wanted: NewRollout) -> ModelRollout:
    async with tenant(request.system_db, request.org_id) as conn:
        version = await find_version(conn, wanted.model, wanted.version)
        if not serves(request, version.served_by):
            raise InvalidField(
                "version", f"version {version.version} of {version.model!r} does not serve now"
            )
        return await verbs.start_rollout(
            conn,
            model=wanted.model,
            version=wanted.version,
            steps=wanted.steps,
            least=wanted.at_least,
            watch=wanted.watch,
            operator_org=request.org_id,
            actor=request.actor,
            suites=config_of(request, wanted.model).evaluations,
        )


async def change(
    request: AdminRequest, wanted: Callable[[ModelRollout], ModelRollout]
) -> ModelRollout:
    async with tenant(request.system_db, request.org_id) as conn:
        return await verbs.change_rollout(
            conn, request.id, wanted, actor=request.actor, check=request.check
        )


@rollouts.act("/pause", "Keep the share of a rollout as it is")
async def pause_rollout(request: AdminRequest) -> ModelRollout:
    return await change(request, states.paused)


@rollouts.act("/resume", "Let a paused rollout go on")
async def resume_rollout(request: AdminRequest) -> ModelRollout:
    return await change(request, states.resumed)


@rollouts.act("/abort", "Give everybody the old version again")
async def abort_rollout(request: AdminRequest) -> ModelRollout:
    return await change(request, states.aborted)


@rollouts.act("/complete", "Give everybody the new version")
async def complete_rollout(request: AdminRequest) -> ModelRollout:
    async with request.reading() as conn:
        found = await verbs.get_rollout(conn, request.id)
        version = await find_version(conn, found.model, found.to_version)
    if found.is_active and not serves(request, version.served_by):
        raise Conflict(
            "version", f"version {version.version} of {found.model!r} does not serve now"
        )
    return await change(request, states.completed)


routes = [
    *(list_rollouts, retrieve_rollout, create_rollout),
    *(pause_rollout, resume_rollout, abort_rollout, complete_rollout),
]
