"""/v1/admin/models/evaluations: what suites of evaluation said of versions. For operators."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway.db import tenant
from gateway.registry import evaluations as verbs
from gateway.registry.evaluations import MAX_EVIDENCE, Evaluation, to_evaluation
from gateway.registry.tables import evaluations as evaluations_table
from gateway.routes.admin.installation.model_versions import OPERATORS, ModelsPageQuery, Named
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.wire.shared.resource import view_of


class EvaluationView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "model_evaluation"
    id: str
    model: str
    version: int
    digest: str
    suite: str
    passed: bool
    evidence: str
    created_at: int


class NewEvaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`evidence`: what the suite said, or where its report is."""

    model: Named
    version: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    suite: Named
    passed: bool
    evidence: Annotated[str, Meta(max_length=MAX_EVIDENCE)] = ""


evaluations = AdminResource[Evaluation](
    path="/v1/admin/models/evaluations",
    id_name="evaluation_id",
    tag="Models",
    read=OPERATORS,
    change=OPERATORS,
    view=EvaluationView,
    show=lambda row: view_of(EvaluationView, row),
    in_system=True,
)


def select_evaluations(_org_id: str, query: ModelsPageQuery) -> sa.Select[Any]:
    listed = sa.select(evaluations_table)
    return listed if query.model is None else listed.where(evaluations_table.c.model == query.model)


list_evaluations = evaluations.list_all(
    "List what suites of evaluation said of versions, the oldest first",
    ModelsPageQuery,
    select=select_evaluations,
    row=to_evaluation,
    key=evaluations_table.c.id,
    name="list_evaluations",
)


@evaluations.get("One evaluation of a version")
async def retrieve_evaluation(request: AdminRequest) -> Evaluation:
    async with request.reading() as conn:
        return await verbs.get_evaluation(conn, request.id)


@evaluations.create("Record whether a version passed a suite of evaluation", NewEvaluation)
async def create_evaluation(request: AdminRequest, wanted: NewEvaluation) -> Evaluation:
    async with tenant(request.system_db, request.org_id) as conn:
        return await verbs.add_evaluation(
            conn,
            **msgspec.structs.asdict(wanted),
            operator_org=request.org_id,
            actor=request.actor,
        )


routes = [list_evaluations, retrieve_evaluation, create_evaluation]
