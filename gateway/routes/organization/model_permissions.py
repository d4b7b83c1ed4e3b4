"""/v1/organization/projects/{id}/model_permissions: which models a project may use, in OpenAI's
shape.

A project without such a list may use all models, which is a deny list of none.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import Response, delete, get, post
from litestar.params import FromPath

from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.tenancy.keys.model_permissions import read_model_permissions, update_model_permissions
from gateway.tenancy.keys.restrictions import Mode, ModelPermissions
from gateway.wire.admin.keys import Texts
from gateway.wire.shared.refusals import decode_kept

PATH = "/v1/organization/projects/{project_id:str}/model_permissions"
SCOPE_ADMIN_PROJECTS = "admin:projects"
TAG = "Projects"


class ModelPermissionsUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Mode
    model_ids: Texts


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "project.model_permissions"
    mode: Mode
    model_ids: list[str]


class PermissionsDeleted(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "project.model_permissions.deleted"
    deleted: Literal[True] = True


wanted_decoder = msgspec.json.Decoder(ModelPermissionsUpdate)


def to_wire(found: ModelPermissions) -> Permissions:
    return Permissions(mode=found.mode or "deny_list", model_ids=found.models)


@get(
    PATH,
    opt=needs(SCOPE_ADMIN_READ),
    tags=[TAG],
    summary="The models a project may use",
    operation_class=describes(answer=Permissions),
)
async def retrieve_permissions(
    request: AuthenticatedRequest, project_id: FromPath[str]
) -> Response[bytes]:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        found = await read_model_permissions(conn, project_id, org_id=org_id)
    return answer(request, to_wire(found))


@post(
    PATH,
    opt=needs(SCOPE_ADMIN_PROJECTS),
    status_code=200,
    tags=[TAG],
    summary="List the models a project may use, or may not",
    operation_class=describes(body=ModelPermissionsUpdate, answer=Permissions, idempotent=True),
)
async def replace_permissions(
    request: AuthenticatedRequest, project_id: FromPath[str]
) -> Response[bytes]:
    wanted = decode_kept(wanted_decoder, await plain_body(request))
    found = services(request)
    made = await update_model_permissions(
        found.db,
        found.redis,
        project_id,
        org_id=request.user.org_id,
        mode=wanted.mode,
        models=wanted.model_ids,
        actor=actor_of(request),
    )
    return answer(request, to_wire(made))


@delete(
    PATH,
    opt=needs(SCOPE_ADMIN_PROJECTS),
    status_code=200,
    tags=[TAG],
    summary="Let a project use all models",
    operation_class=describes(answer=PermissionsDeleted),
)
async def delete_permissions(
    request: AuthenticatedRequest, project_id: FromPath[str]
) -> Response[bytes]:
    found = services(request)
    await update_model_permissions(
        found.db,
        found.redis,
        project_id,
        org_id=request.user.org_id,
        mode=None,
        actor=actor_of(request),
    )
    return answer(request, PermissionsDeleted())


routes = [retrieve_permissions, replace_permissions, delete_permissions]
