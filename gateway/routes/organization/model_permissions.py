"""/v1/organization/projects/{id}/model_permissions: which models a project may use, in OpenAI's
shape.

A project without such a list may use all models, which is a deny list of none.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.keys.model_permissions import read_model_permissions, update_model_permissions
from gateway.tenancy.keys.restrictions import Mode, ModelPermissions
from gateway.wire.admin.keys import Texts


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


permissions = AdminResource[ModelPermissions](
    path="/v1/organization/projects/{project_id:str}/model_permissions",
    tag="Projects",
    change=needs("admin:projects"),
    view=Permissions,
    show=lambda found: Permissions(mode=found.mode or "deny_list", model_ids=found.models),
    checks_ids=False,
)


@permissions.get("The models a project may use")
async def retrieve_permissions(request: AdminRequest) -> ModelPermissions:
    async with request.transaction() as conn:
        return await read_model_permissions(conn, request.id, org_id=request.org_id)


@permissions.create(
    "List the models a project may use, or may not", ModelPermissionsUpdate, status=200
)
async def replace_permissions(
    request: AdminRequest, wanted: ModelPermissionsUpdate
) -> ModelPermissions:
    return await update(request, wanted.mode, wanted.model_ids)


@permissions.delete("Let a project use all models", answer=PermissionsDeleted, conditional=False)
async def delete_permissions(request: AdminRequest) -> PermissionsDeleted:
    await update(request, None, [])
    return PermissionsDeleted()


async def update(request: AdminRequest, mode: Mode | None, models: list[str]) -> ModelPermissions:
    return await update_model_permissions(
        request.db,
        request.redis,
        request.id,
        org_id=request.org_id,
        mode=mode,
        models=models,
        actor=request.actor,
    )


routes = [retrieve_permissions, replace_permissions, delete_permissions]
