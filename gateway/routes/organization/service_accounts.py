"""/v1/organization/projects/{project_id}/service_accounts: programs that use a project, and their
keys. OpenAI's shapes. A key stands in the answer that made it, this once.
"""

from __future__ import annotations

from datetime import datetime

from litestar import Response, delete, get, post
from litestar.params import FromPath
from msgspec import UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.permissions import SCOPE_ADMIN_READ
from gateway.principal import SCOPE_INFERENCE
from gateway.request_errors import BadField
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
    require_unbound,
    show_once,
    to_cursor,
    to_listing,
    to_moment,
)
from gateway.routes.shared.conditional import answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing
from gateway.tenancy import projects
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.keys import service_accounts
from gateway.tenancy.keys.keys import ADMIN_PREFIX, CreatedKey, create_key, prefix_of
from gateway.tenancy.keys.service_accounts import ServiceAccount
from gateway.wire.organization import organization as wire
from gateway.wire.organization.organization import DeletedObject, ListQuery, read_query, to_unix

ACCOUNTS = "/v1/organization/projects/{project_id:str}/service_accounts"
ACCOUNT = ACCOUNTS + "/{service_account_id:str}"
CHANGE = needs_in_project("admin:members")
READ = needs(SCOPE_ADMIN_READ)
DEFAULT_SCOPES = (SCOPE_INFERENCE,)
DEFAULT_KEY_NAME = "Secret Key"
"""As OpenAI names it."""


def to_account(account: ServiceAccount) -> wire.ServiceAccountObject:
    return wire.ServiceAccountObject(
        id=account.id,
        name=account.name,
        role=account.project_role,
        created_at=to_unix(account.created_at),
    )


def to_created_key(made: CreatedKey) -> wire.ServiceAccountKey:
    return wire.ServiceAccountKey(
        id=made.row.id,
        name=made.row.name,
        value=made.secret,
        created_at=to_unix(made.row.created_at),
        expires_at=wire.to_unix_or_none(made.row.expires_at),
    )


@get(
    ACCOUNTS,
    opt=READ,
    tags=["Service accounts"],
    summary="List a project's service accounts",
    operation_class=describes(query=ListQuery, answer=Listing[wire.ServiceAccountObject]),
)
async def list_accounts(
    request: AuthenticatedRequest, project_id: FromPath[str]
) -> Response[bytes]:
    where = {"org_id": request.user.org_id, "project_id": check_id("project_id", project_id)}
    query = read_query(request.url.query, ListQuery)
    async with reading(request) as conn:
        await projects.get_project(conn, **where)
        found, more = await service_accounts.list_service_accounts(
            conn, **where, cursor=to_cursor(query)
        )
    return answer(request, to_listing([to_account(each) for each in found], more))


@post(
    ACCOUNTS,
    opt=CHANGE,
    status_code=200,
    tags=["Service accounts"],
    summary="Create a service account, with a key unless told otherwise",
    operation_class=describes(
        body=wire.ServiceAccountCreate,
        answer=wire.CreatedServiceAccount,
        idempotent=True,
    ),
)
async def create_account(
    request: AuthenticatedRequest, project_id: FromPath[str]
) -> Response[bytes]:
    where = {"org_id": request.user.org_id, "project_id": check_id("project_id", project_id)}
    body = await body_of(request, wire.ServiceAccountCreate)
    alone = body.create_service_account_only is True
    if alone and body.expires_in_seconds is not None:
        raise BadField(
            "'expires_in_seconds' is of a key, and 'create_service_account_only' makes none.",
            param="expires_in_seconds",
        )
    async with reading(request) as conn:
        made = await service_accounts.create_service_account(
            conn,
            **where,
            name=body.name,
            project_role="none" if alone else "member",
            actor=actor_of(request),
        )
        expires_at = to_moment(body.expires_in_seconds)
        key = None if alone else await _make_key(request, conn, made, expires_at=expires_at)
    shown = wire.CreatedServiceAccount(
        id=made.id,
        name=made.name,
        role="none" if alone else "member",
        created_at=to_unix(made.created_at),
        api_key=None if key is None else to_created_key(key),
    )
    return show_once(request, shown)


async def _make_key(
    request: AuthenticatedRequest,
    conn: AsyncConnection,
    account: ServiceAccount,
    *,
    name: str = DEFAULT_KEY_NAME,
    scopes: tuple[str, ...] = DEFAULT_SCOPES,
    expires_at: datetime | None = None,
) -> CreatedKey:
    pepper_id, pepper = services(request).authenticator.pepper
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
        actor=actor_of(request),
        by=request.user,
    )


@get(
    ACCOUNT,
    opt=READ,
    tags=["Service accounts"],
    summary="One service account",
    operation_class=describes(answer=wire.ServiceAccountObject),
)
async def retrieve_account(
    request: AuthenticatedRequest, project_id: FromPath[str], service_account_id: FromPath[str]
) -> Response[bytes]:
    where = _where(request, project_id, service_account_id)
    async with reading(request) as conn:
        found = await service_accounts.get_service_account(conn, **where)
    return answer(request, to_account(found))


@post(
    ACCOUNT,
    opt=CHANGE,
    status_code=200,
    tags=["Service accounts"],
    summary="Change a service account's name or role in the project",
    operation_class=describes(
        body=wire.ServiceAccountUpdate,
        answer=wire.ServiceAccountObject,
        idempotent=True,
        conditional=True,
    ),
)
async def update_account(
    request: AuthenticatedRequest, project_id: FromPath[str], service_account_id: FromPath[str]
) -> Response[bytes]:
    where = _where(request, project_id, service_account_id)
    body, precondition = await body_of(request, wire.ServiceAccountUpdate), if_match(request)
    if not isinstance(body.role, UnsetType):
        require_unbound(request.user)
    async with changing_for(request, service_account_id) as conn:
        seen = await service_accounts.lock_service_account(conn, **where)
        precondition.check(to_account(seen))
        made = await service_accounts.update_service_account(
            conn,
            **where,
            name=None if isinstance(body.name, UnsetType) else body.name,
            project_role=None if isinstance(body.role, UnsetType) else body.role,
            actor=actor_of(request),
        )
    return answer(request, to_account(made))


@delete(
    ACCOUNT,
    opt=CHANGE,
    status_code=200,
    tags=["Service accounts"],
    summary="Remove a service account; its keys are revoked",
    operation_class=describes(answer=DeletedObject, conditional=True),
)
async def delete_account(
    request: AuthenticatedRequest, project_id: FromPath[str], service_account_id: FromPath[str]
) -> Response[bytes]:
    where = _where(request, project_id, service_account_id)
    precondition = if_match(request)
    async with changing_for(request, service_account_id) as conn:
        seen = await service_accounts.lock_service_account(conn, **where)
        precondition.check(to_account(seen))
        await service_accounts.archive_service_account(conn, **where, actor=actor_of(request))
    kind = "organization.project.service_account.deleted"
    return answer(request, DeletedObject(id=service_account_id, object=kind))


@post(
    ACCOUNT + "/api_keys",
    opt=needs_in_project("admin:keys"),
    status_code=200,
    tags=["Service accounts"],
    summary="Create one more key of a service account",
    operation_class=describes(
        body=wire.ServiceAccountKeyCreate,
        answer=wire.ServiceAccountKey,
        idempotent=True,
    ),
)
async def create_account_key(
    request: AuthenticatedRequest, project_id: FromPath[str], service_account_id: FromPath[str]
) -> Response[bytes]:
    where = _where(request, project_id, service_account_id)
    body = await body_of(request, wire.ServiceAccountKeyCreate)
    scopes = DEFAULT_SCOPES if isinstance(body.scopes, UnsetType) else tuple(body.scopes)
    refuse_admin(scopes)
    require_give(request.user, scopes)
    async with reading(request) as conn:
        account = await service_accounts.lock_service_account(conn, **where)
        made = await _make_key(
            request,
            conn,
            account,
            name=DEFAULT_KEY_NAME if isinstance(body.name, UnsetType) else body.name,
            scopes=scopes,
            expires_at=to_moment(body.expires_in_seconds),
        )
    return show_once(request, to_created_key(made))


def refuse_admin(scopes: tuple[str, ...]) -> None:
    """Refuse an admin scope: a project's key is for its models. Raises: InvalidField."""
    if prefix_of(scopes) == ADMIN_PREFIX:
        raise InvalidField(
            "scopes", "keys of administration are made at /v1/organization/admin_api_keys"
        )


def _where(
    request: AuthenticatedRequest, project_id: str, service_account_id: str
) -> dict[str, str]:
    return {
        "org_id": request.user.org_id,
        "project_id": check_id("project_id", project_id),
        "service_account_id": check_id("service_account_id", service_account_id),
    }


routes = [
    list_accounts,
    create_account,
    retrieve_account,
    update_account,
    delete_account,
    create_account_key,
]
