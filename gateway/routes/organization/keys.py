"""/v1/organization/projects/{project_id}/api_keys and /v1/organization/admin_api_keys: which keys
there are and whose they are. OpenAI's shapes; what OpenAI has no call for is in `/v1/admin/keys`.

To delete a key is to revoke it: every worker refuses it within a second, and its row stays for
bills to name. The tag of a key speaks of its scopes too, which OpenAI's shape leaves out, and not
of when it was used.
"""

from __future__ import annotations

from typing import Any

from litestar import Response, delete, get, post
from litestar.params import FromPath
from msgspec import UnsetType
from msgspec.structs import replace

from gateway.permissions import SCOPE_ADMIN_READ
from gateway.principal import SCOPE_ADMIN, SCOPE_USAGE_READ
from gateway.routes.organization.service_accounts import refuse_admin
from gateway.routes.shared.access import (
    AuthenticatedRequest,
    actor_of,
    needs,
    needs_in_project,
    services,
)
from gateway.routes.shared.common_requests import (
    body_of,
    changing_for,
    check_id,
    reading,
    require_give,
    to_cursor,
    to_listing,
    to_moment,
)
from gateway.routes.shared.conditional import Precondition, answer, if_match, tag_of, tagged
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing
from gateway.tenancy import projects
from gateway.tenancy.keys import changes as key_changes
from gateway.tenancy.keys import owned_keys
from gateway.tenancy.keys.keys import KeyRow, create_key
from gateway.tenancy.keys.owned_keys import KeyOwner, OwnedKey
from gateway.tenancy.pages import Cursor
from gateway.wire.organization import organization as wire
from gateway.wire.organization.organization import (
    DeletedObject,
    read_query,
    to_unix,
    to_unix_or_none,
)

KEYS = "/v1/organization/projects/{project_id:str}/api_keys"
KEY = KEYS + "/{api_key_id:str}"
ADMIN_KEYS = "/v1/organization/admin_api_keys"
ADMIN_KEY = ADMIN_KEYS + "/{key_id:str}"
CHANGE = needs_in_project("admin:keys")
READ = needs(SCOPE_ADMIN_READ)
ADMIN_KEY_SCOPES = (SCOPE_ADMIN, SCOPE_USAGE_READ)


def to_key(key: OwnedKey) -> wire.ProjectKey:
    return wire.ProjectKey(
        id=key.id,
        name=key.name,
        redacted_value=key.hint,
        created_at=to_unix(key.created_at),
        last_used_at=to_unix_or_none(key.last_used_at),
        expires_at=to_unix_or_none(key.expires_at),
        owner=to_owner(key.owner),
        owner_project_access="active" if key.active else "inactive",
    )


def configured(key: OwnedKey) -> OwnedKey:
    """Leave out when a key was used: that changes nothing that anybody could overwrite."""
    return replace(key, last_used_at=None)


def check_key(precondition: Precondition, key: OwnedKey) -> None:
    """Raises: PreconditionFailed."""
    precondition.check(to_key(configured(key)), key.scopes)


def show_key(key: OwnedKey) -> Response[bytes]:
    return tagged(to_key(key), tag_of(to_key(configured(key)), key.scopes))


def to_owner(owner: KeyOwner | None) -> wire.ApiKeyOwner:
    if owner is None:
        return wire.ApiKeyOwner()
    common: dict[str, Any] = {
        "id": owner.id,
        "name": owner.name,
        "role": owner.project_role,
        "created_at": to_unix(owner.created_at),
    }
    if owner.email is not None:
        return wire.ApiKeyOwner(type="user", user=wire.KeyOwnerUser(**common, email=owner.email))
    account = wire.KeyOwnerServiceAccount(**common)
    return wire.ApiKeyOwner(type="service_account", service_account=account)


@get(
    KEYS,
    opt=READ,
    tags=["API keys"],
    summary="List a project's keys",
    operation_class=describes(query=wire.ProjectKeysQuery, answer=Listing[wire.ProjectKey]),
)
async def list_keys(request: AuthenticatedRequest, project_id: FromPath[str]) -> Response[bytes]:
    where = {"org_id": request.user.org_id, "project_id": check_id("project_id", project_id)}
    query = read_query(request.url.query, wire.ProjectKeysQuery)
    async with reading(request) as conn:
        await projects.get_project(conn, **where)
        found, more = await owned_keys.list_project_keys(
            conn, **where, access=query.owner_project_access, cursor=to_cursor(query)
        )
    return answer(request, to_listing([to_key(each) for each in found], more))


@get(
    KEY,
    opt=READ,
    tags=["API keys"],
    summary="One key of a project",
    operation_class=describes(answer=wire.ProjectKey),
)
async def retrieve_key(
    request: AuthenticatedRequest, project_id: FromPath[str], api_key_id: FromPath[str]
) -> Response[bytes]:
    where = _where(request, project_id, api_key_id)
    async with reading(request) as conn:
        found = await owned_keys.get_key(conn, **where)
    return show_key(found)


@post(
    KEY,
    opt=CHANGE,
    status_code=200,
    tags=["API keys"],
    summary="Replace a key's scopes, or set when it expires",
    operation_class=describes(
        body=wire.ProjectKeyUpdate,
        answer=wire.ProjectKey,
        idempotent=True,
        conditional=True,
    ),
)
async def update_key(
    request: AuthenticatedRequest, project_id: FromPath[str], api_key_id: FromPath[str]
) -> Response[bytes]:
    where = _where(request, project_id, api_key_id)
    body, precondition = await body_of(request, wire.ProjectKeyUpdate), if_match(request)
    changes: dict[str, Any] = {}
    if not isinstance(body.scopes, UnsetType):
        refuse_admin(tuple(body.scopes))
        require_give(request.user, body.scopes)
        changes["scopes"] = body.scopes
    if not isinstance(body.expires_in_seconds, UnsetType):
        changes["expires_at"] = to_moment(body.expires_in_seconds)
    found, org_id = services(request), request.user.org_id
    async with reading(request) as conn:
        await projects.lock_project(conn, org_id=org_id, project_id=project_id)
        seen = await owned_keys.get_key(conn, **where)

    def check(row: KeyRow) -> None:
        locked = {name: getattr(row, name) for name in ("name", "hint", "scopes", "expires_at")}
        check_key(precondition, replace(seen, **locked))

    await key_changes.update_key(
        found.db,
        found.redis,
        api_key_id,
        changes,
        org_id=org_id,
        actor=actor_of(request),
        check=check,
        by=request.user,
    )
    async with reading(request) as conn:
        changed = await owned_keys.get_key(conn, **where)
    return show_key(changed)


@delete(
    KEY,
    opt=CHANGE,
    status_code=200,
    tags=["API keys"],
    summary="Revoke a project's key",
    operation_class=describes(answer=DeletedObject, conditional=True),
)
async def delete_key(
    request: AuthenticatedRequest, project_id: FromPath[str], api_key_id: FromPath[str]
) -> Response[bytes]:
    where = _where(request, project_id, api_key_id)
    precondition = if_match(request)
    async with changing_for(request, api_key_id) as conn:
        check_key(precondition, await owned_keys.lock_key(conn, **where))
        await owned_keys.delete_key(conn, **where, actor=actor_of(request))
    return answer(
        request, DeletedObject(id=api_key_id, object="organization.project.api_key.deleted")
    )


def _where(request: AuthenticatedRequest, project_id: str, api_key_id: str) -> dict[str, str]:
    return {
        "org_id": request.user.org_id,
        "project_id": check_id("project_id", project_id),
        "key_id": check_id("api_key_id", api_key_id),
    }


# ---- keys of administration


def to_admin_key(key: OwnedKey) -> wire.AdminKey:
    return wire.AdminKey(
        id=key.id,
        name=key.name,
        redacted_value=key.hint,
        created_at=to_unix(key.created_at),
        last_used_at=to_unix_or_none(key.last_used_at),
        expires_at=to_unix_or_none(key.expires_at),
        owner=to_admin_owner(key.owner),
    )


def tag_of_admin_key(key: OwnedKey) -> str:
    return tag_of(to_admin_key(configured(key)), key.scopes)


def to_admin_owner(owner: KeyOwner | None) -> wire.AdminKeyOwner:
    if owner is None:
        return wire.AdminKeyOwner()
    return wire.AdminKeyOwner(
        type=owner.kind,
        object="organization.user" if owner.kind == "user" else "organization.service_account",
        id=owner.id,
        name=owner.name,
        created_at=to_unix(owner.created_at),
        role=owner.role,
    )


@get(
    ADMIN_KEYS,
    opt=READ,
    tags=["Admin API keys"],
    summary="List the admin keys",
    operation_class=describes(query=wire.AdminKeysQuery, answer=Listing[wire.AdminKey]),
)
async def list_admin_keys(request: AuthenticatedRequest) -> Response[bytes]:
    query = read_query(request.url.query, wire.AdminKeysQuery)
    cursor = Cursor(after=query.after, limit=query.limit, order=query.order)
    async with reading(request) as conn:
        found, more = await owned_keys.list_admin_keys(
            conn, org_id=request.user.org_id, cursor=cursor
        )
    return answer(request, to_listing([to_admin_key(each) for each in found], more))


@post(
    ADMIN_KEYS,
    opt=needs(SCOPE_ADMIN),
    status_code=200,
    tags=["Admin API keys"],
    summary="Create an admin key",
    operation_class=describes(
        body=wire.AdminKeyCreate, answer=wire.CreatedAdminKey, idempotent=True
    ),
)
async def create_admin_key(request: AuthenticatedRequest) -> Response[bytes]:
    body, user = await body_of(request, wire.AdminKeyCreate), request.user
    pepper_id, pepper = services(request).authenticator.pepper
    require_give(user, ADMIN_KEY_SCOPES)
    seconds = body.expires_in_seconds
    async with reading(request) as conn:
        made = await create_key(
            conn,
            org_id=user.org_id,
            project_id=None,
            user_id=user.user_id,
            service_account_id=user.service_account_id,
            name=body.name,
            scopes=ADMIN_KEY_SCOPES,
            pepper=pepper,
            pepper_id=pepper_id,
            expires_at=None if isinstance(seconds, UnsetType) else to_moment(seconds),
            actor=actor_of(request),
            by=user,
        )
        key = await owned_keys.get_key(
            conn, org_id=user.org_id, key_id=made.row.id, project_id=None
        )
    shown = to_admin_key(key)
    fields = {name: getattr(shown, name) for name in shown.__struct_fields__}
    once = wire.CreatedAdminKey(**fields, value=made.secret)
    return tagged(once, tag_of_admin_key(key), headers={"cache-control": "no-store"})


@get(
    ADMIN_KEY,
    opt=READ,
    tags=["Admin API keys"],
    summary="Show an admin key",
    operation_class=describes(answer=wire.AdminKey),
)
async def retrieve_admin_key(
    request: AuthenticatedRequest, key_id: FromPath[str]
) -> Response[bytes]:
    check_id("key_id", key_id)
    async with reading(request) as conn:
        found = await owned_keys.get_key(
            conn, org_id=request.user.org_id, key_id=key_id, project_id=None
        )
    return tagged(to_admin_key(found), tag_of_admin_key(found))


@delete(
    ADMIN_KEY,
    opt=needs(SCOPE_ADMIN),
    status_code=200,
    tags=["Admin API keys"],
    summary="Revoke a key of administration",
    operation_class=describes(answer=DeletedObject, conditional=True),
)
async def delete_admin_key(request: AuthenticatedRequest, key_id: FromPath[str]) -> Response[bytes]:
    check_id("key_id", key_id)
    precondition = if_match(request)
    where = {"org_id": request.user.org_id, "key_id": key_id}
    async with changing_for(request, key_id) as conn:
        seen = await owned_keys.lock_key(conn, **where, project_id=None)
        precondition.check(to_admin_key(configured(seen)), seen.scopes)
        await owned_keys.delete_key(conn, **where, project_id=None, actor=actor_of(request))
    return answer(request, DeletedObject(id=key_id, object="organization.admin_api_key.deleted"))


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
