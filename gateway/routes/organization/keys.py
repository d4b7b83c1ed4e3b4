"""/v1/organization/projects/{project_id}/api_keys and /v1/organization/admin_api_keys: which keys
there are and whose they are. OpenAI's shapes; what OpenAI has no call for is in `/v1/admin/keys`.

To delete a key is to revoke it: every worker refuses it within a second, and its row stays for
bills to name. The tag of a key speaks of its scopes too, which OpenAI's shape leaves out, and not
of when it was used.
"""

from __future__ import annotations

from typing import Any

from litestar import Response
from msgspec import UnsetType
from msgspec.structs import replace

from gateway.principal import SCOPE_ADMIN, SCOPE_USAGE_READ
from gateway.routes.organization.service_accounts import refuse_admin
from gateway.routes.shared.access import needs, needs_in_project
from gateway.routes.shared.resource import (
    AdminRequest,
    AdminResource,
    require_give,
    to_cursor,
    to_moment,
)
from gateway.tenancy import projects
from gateway.tenancy.keys import changes as key_changes
from gateway.tenancy.keys import owned_keys
from gateway.tenancy.keys.keys import KeyRow, create_key
from gateway.tenancy.keys.owned_keys import KeyOwner, OwnedKey
from gateway.wire.organization import organization as wire
from gateway.wire.organization.organization import DeletedObject
from gateway.wire.shared.resource import view_of

ADMIN_KEY_SCOPES = (SCOPE_ADMIN, SCOPE_USAGE_READ)


def to_key(key: OwnedKey) -> wire.ProjectKey:
    access = "active" if key.active else "inactive"
    owner = to_owner(key.owner)
    return view_of(
        wire.ProjectKey, key, redacted_value=key.hint, owner=owner, owner_project_access=access
    )


def to_owner(owner: KeyOwner | None) -> wire.ApiKeyOwner:
    if owner is None:
        return wire.ApiKeyOwner()
    role = owner.project_role
    if owner.email is not None:
        user = view_of(wire.KeyOwnerUser, owner, role=role)
        return wire.ApiKeyOwner(type="user", user=user)
    account = view_of(wire.KeyOwnerServiceAccount, owner, role=role)
    return wire.ApiKeyOwner(type="service_account", service_account=account)


def to_admin_key(key: OwnedKey) -> wire.AdminKey:
    owner = to_admin_owner(key.owner)
    return view_of(wire.AdminKey, key, redacted_value=key.hint, owner=owner)


def to_admin_owner(owner: KeyOwner | None) -> wire.AdminKeyOwner:
    if owner is None:
        return wire.AdminKeyOwner()
    kind = "organization.user" if owner.kind == "user" else "organization.service_account"
    return view_of(wire.AdminKeyOwner, owner, type=owner.kind, object=kind)


keys = AdminResource[OwnedKey](
    path="/v1/organization/projects/{project_id:str}/api_keys",
    id_name="api_key_id",
    tag="API keys",
    change=needs_in_project("admin:keys"),
    view=wire.ProjectKey,
    show=to_key,
    unseen=lambda key: (key.scopes,),
    unsteady=("last_used_at",),
)
admin_keys = AdminResource[OwnedKey](
    path="/v1/organization/admin_api_keys",
    id_name="key_id",
    tag="Admin API keys",
    change=needs(SCOPE_ADMIN),
    view=wire.AdminKey,
    show=to_admin_key,
    unseen=lambda key: (key.scopes,),
    unsteady=("last_used_at",),
)


def _where(request: AdminRequest) -> dict[str, str]:
    ids = request.ids
    return {
        "org_id": request.org_id,
        "project_id": ids["project_id"],
        "key_id": ids["api_key_id"],
    }


@keys.page("List a project's keys", wire.ProjectKeysQuery)
async def list_keys(
    request: AdminRequest, query: wire.ProjectKeysQuery
) -> tuple[list[OwnedKey], bool]:
    async with request.transaction() as conn:
        await projects.get_project(conn, **request.where)
        return await owned_keys.list_project_keys(
            conn, **request.where, access=query.owner_project_access, cursor=to_cursor(query)
        )


@keys.get("One key of a project")
async def retrieve_key(request: AdminRequest) -> OwnedKey:
    async with request.transaction() as conn:
        return await owned_keys.get_key(conn, **_where(request))


@keys.update("Replace a key's scopes, or set when it expires", wire.ProjectKeyUpdate, method="POST")
async def update_key(request: AdminRequest, values: dict[str, Any]) -> OwnedKey:
    changes: dict[str, Any] = {}
    if "scopes" in values:
        refuse_admin(tuple(values["scopes"]))
        require_give(request.user, values["scopes"])
        changes["scopes"] = values["scopes"]
    if "expires_in_seconds" in values:
        changes["expires_at"] = to_moment(values["expires_in_seconds"])
    where = _where(request)
    async with request.transaction() as conn:
        await projects.lock_project(
            conn, org_id=request.org_id, project_id=request.ids["project_id"]
        )
        seen = await owned_keys.get_key(conn, **where)

    def check(row: KeyRow) -> None:
        locked = {name: getattr(row, name) for name in ("name", "hint", "scopes", "expires_at")}
        request.check(replace(seen, **locked))

    await key_changes.update_key(
        request.db,
        request.redis,
        request.id,
        changes,
        org_id=request.org_id,
        actor=request.actor,
        check=check,
        by=request.user,
    )
    async with request.transaction() as conn:
        return await owned_keys.get_key(conn, **where)


@keys.delete("Revoke a project's key", answer=DeletedObject)
async def delete_key(request: AdminRequest) -> DeletedObject:
    where = _where(request)
    async with request.announced(request.id) as conn:
        request.check(await owned_keys.lock_key(conn, **where))
        await owned_keys.delete_key(conn, **where, actor=request.actor)
    return DeletedObject(id=request.id, object="organization.project.api_key.deleted")


# ---- keys of administration


@admin_keys.page("List the admin keys", wire.AdminKeysQuery)
async def list_admin_keys(
    request: AdminRequest, query: wire.AdminKeysQuery
) -> tuple[list[OwnedKey], bool]:
    async with request.transaction() as conn:
        return await owned_keys.list_admin_keys(
            conn, org_id=request.org_id, cursor=to_cursor(query)
        )


@admin_keys.create(
    "Create an admin key", wire.AdminKeyCreate, answer=wire.CreatedAdminKey, status=200
)
async def create_admin_key(request: AdminRequest, wanted: wire.AdminKeyCreate) -> Response[bytes]:
    user = request.user
    pepper_id, pepper = request.services.authenticator.pepper
    require_give(user, ADMIN_KEY_SCOPES)
    seconds = wanted.expires_in_seconds
    async with request.transaction() as conn:
        made = await create_key(
            conn,
            org_id=request.org_id,
            project_id=None,
            user_id=user.user_id,
            service_account_id=user.service_account_id,
            name=wanted.name,
            scopes=ADMIN_KEY_SCOPES,
            pepper=pepper,
            pepper_id=pepper_id,
            expires_at=None if isinstance(seconds, UnsetType) else to_moment(seconds),
            actor=request.actor,
            by=user,
        )
        key = await owned_keys.get_key(
            conn, org_id=request.org_id, key_id=made.row.id, project_id=None
        )
    once = view_of(wire.CreatedAdminKey, to_admin_key(key), value=made.secret)
    return admin_keys.respond_once(once, key)


@admin_keys.get("Show an admin key")
async def retrieve_admin_key(request: AdminRequest) -> OwnedKey:
    async with request.transaction() as conn:
        return await owned_keys.get_key(conn, **request.where, project_id=None)


@admin_keys.delete("Revoke an admin key", answer=DeletedObject)
async def delete_admin_key(request: AdminRequest) -> DeletedObject:
    async with request.announced(request.id) as conn:
        request.check(await owned_keys.lock_key(conn, **request.where, project_id=None))
        await owned_keys.delete_key(conn, **request.where, project_id=None, actor=request.actor)
    return DeletedObject(id=request.id, object="organization.admin_api_key.deleted")


routes = [
    list_keys,
    retrieve_key,
    update_key,
    delete_key,
    list_admin_keys,
    create_admin_key,
    retrieve_admin_key,
    delete_admin_key,
]
