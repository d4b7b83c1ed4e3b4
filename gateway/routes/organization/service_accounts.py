"""/v1/organization/projects/{project_id}/service_accounts: programs that use a project, and their
keys. OpenAI's shapes. A key stands in the answer that made it, this once.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from litestar import Response
from msgspec import UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.principal import SCOPE_INFERENCE
from gateway.request_errors import BadField
from gateway.routes.shared.access import needs_in_project
from gateway.routes.shared.resource import (
    AdminRequest,
    AdminResource,
    require_give,
    require_unbound,
    show_once,
    to_cursor,
    to_moment,
)
from gateway.tenancy import projects
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.keys import service_accounts as verbs
from gateway.tenancy.keys.keys import ADMIN_PREFIX, CreatedKey, create_key, prefix_of
from gateway.tenancy.keys.service_accounts import ServiceAccount
from gateway.wire.organization import organization as wire
from gateway.wire.organization.organization import DeletedObject, ListQuery
from gateway.wire.shared.resource import view_of

DEFAULT_SCOPES = (SCOPE_INFERENCE,)
DEFAULT_KEY_NAME = "Secret Key"
"""The name that OpenAI gives it."""

accounts = AdminResource[ServiceAccount](
    path="/v1/organization/projects/{project_id:str}/service_accounts",
    id_name="service_account_id",
    tag="Service accounts",
    change=needs_in_project("admin:members"),
    view=wire.ServiceAccountObject,
    show=lambda account: view_of(wire.ServiceAccountObject, account, role=account.project_role),
)


def to_created_key(made: CreatedKey) -> wire.ServiceAccountKey:
    return view_of(wire.ServiceAccountKey, made.row, value=made.secret)


@accounts.page("List a project's service accounts", ListQuery)
async def list_accounts(
    request: AdminRequest, query: ListQuery
) -> tuple[list[ServiceAccount], bool]:
    async with request.transaction() as conn:
        await projects.get_project(conn, **request.where)
        return await verbs.list_service_accounts(conn, **request.where, cursor=to_cursor(query))


@accounts.create(
    "Create a service account, with a key unless told otherwise",
    wire.ServiceAccountCreate,
    answer=wire.CreatedServiceAccount,
    status=200,
)
async def create_account(
    request: AdminRequest, wanted: wire.ServiceAccountCreate
) -> Response[bytes]:
    alone = wanted.create_service_account_only is True
    if alone and wanted.expires_in_seconds is not None:
        raise BadField(
            "'expires_in_seconds' is of a key, and 'create_service_account_only' makes none.",
            param="expires_in_seconds",
        )
    role: Literal["none", "member"] = "none" if alone else "member"
    async with request.transaction() as conn:
        made = await verbs.create_service_account(
            conn, **request.where, name=wanted.name, project_role=role, actor=request.actor
        )
        expires_at = to_moment(wanted.expires_in_seconds)
        key = None if alone else await _make_key(request, conn, made, expires_at=expires_at)
    api_key = None if key is None else to_created_key(key)
    return show_once(request, view_of(wire.CreatedServiceAccount, made, role=role, api_key=api_key))


async def _make_key(
    request: AdminRequest,
    conn: AsyncConnection,
    account: ServiceAccount,
    *,
    name: str = DEFAULT_KEY_NAME,
    scopes: tuple[str, ...] = DEFAULT_SCOPES,
    expires_at: datetime | None = None,
) -> CreatedKey:
    pepper_id, pepper = request.services.authenticator.pepper
    return await create_key(
        conn,
        org_id=account.org_id,
        project_id=account.project_id,
        service_account_id=account.id,
        name=name,
        scopes=scopes,
        pepper=pepper,
        pepper_id=pepper_id,
        expires_at=expires_at,
        actor=request.actor,
        by=request.user,
    )


retrieve_account = accounts.retrieve(
    "One service account", verbs.get_service_account, name="retrieve_account"
)


@accounts.update(
    "Change a service account's name or role in the project",
    wire.ServiceAccountUpdate,
    method="POST",
)
async def update_account(request: AdminRequest, values: dict[str, Any]) -> ServiceAccount:
    if "role" in values:
        require_unbound(request.user)
    async with request.announced(request.id) as conn:
        request.check(await verbs.lock_service_account(conn, **request.where))
        return await verbs.update_service_account(
            conn,
            **request.where,
            name=values.get("name"),
            project_role=values.get("role"),
            actor=request.actor,
        )


@accounts.delete("Remove a service account; its keys are revoked", answer=DeletedObject)
async def delete_account(request: AdminRequest) -> DeletedObject:
    async with request.announced(request.id) as conn:
        request.check(await verbs.lock_service_account(conn, **request.where))
        await verbs.archive_service_account(conn, **request.where, actor=request.actor)
    kind = "organization.project.service_account.deleted"
    return DeletedObject(id=request.id, object=kind)


@accounts.act(
    "/api_keys",
    "Create one more key of a service account",
    needs=needs_in_project("admin:keys"),
    body=wire.ServiceAccountKeyCreate,
    answer=wire.ServiceAccountKey,
    conditional=False,
)
async def create_account_key(
    request: AdminRequest, wanted: wire.ServiceAccountKeyCreate
) -> Response[bytes]:
    scopes = DEFAULT_SCOPES if isinstance(wanted.scopes, UnsetType) else tuple(wanted.scopes)
    refuse_admin(scopes)
    require_give(request.user, scopes)
    async with request.transaction() as conn:
        account = await verbs.lock_service_account(conn, **request.where)
        made = await _make_key(
            request,
            conn,
            account,
            name=DEFAULT_KEY_NAME if isinstance(wanted.name, UnsetType) else wanted.name,
            scopes=scopes,
            expires_at=to_moment(wanted.expires_in_seconds),
        )
    return show_once(request, to_created_key(made))


def refuse_admin(scopes: tuple[str, ...]) -> None:
    """Refuse an admin scope: a project's key is for its models. Raises: InvalidField."""
    if prefix_of(scopes) == ADMIN_PREFIX:
        raise InvalidField(
            "scopes", "keys of administration are made at /v1/organization/admin_api_keys"
        )


routes = [
    list_accounts,
    create_account,
    retrieve_account,
    update_account,
    delete_account,
    create_account_key,
]
