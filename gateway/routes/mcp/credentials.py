"""/v1/mcp/credentials/{server} and /v1/mcp/tenant_credentials/{server}: what an MCP server is shown
of a user, and of a tenant for all who have none of their own.

Values are written and never read.
"""

from __future__ import annotations

import msgspec
from litestar import Response, delete, get, put
from litestar.params import FromPath

from gateway.mcp.service.service import vault_of
from gateway.permissions import SCOPE_ADMIN_READ, SCOPE_MCP_CALL
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.tenancy.errors import NotAllowed
from gateway.vault.credentials import UpstreamCredential
from gateway.wire.shared.refusals import decode_kept

SCOPE = "admin:clients"
OWN = "/v1/mcp/credentials/{server:str}"
TENANTS = "/v1/mcp/tenant_credentials/{server:str}"


class McpCredentialBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    values: dict[str, str]
    """By the name of a header or, for a server that is a process, of a variable."""


class McpCredentialView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "mcp.credential"
    id: str
    server: str
    kind: str
    names: list[str]
    version: int
    user_id: str | None
    created_at: int
    """Unix seconds."""


class McpCredentialDeleted(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "mcp.credential.deleted"
    id: str
    deleted: bool = True


DECODER = msgspec.json.Decoder(McpCredentialBody)


def to_view(found: UpstreamCredential) -> McpCredentialView:
    return McpCredentialView(
        id=found.id,
        server=found.upstream,
        kind=found.kind,
        names=found.names,
        version=found.version,
        user_id=found.user_id,
        created_at=int(found.created_at.timestamp()),
    )


def user_of(request: AuthenticatedRequest) -> str:
    """Raises: NotAllowed, for a credential that is nobody's own."""
    user_id = request.user.user_id
    if user_id is None:
        raise NotAllowed("user", "only a user who is signed in has credentials of their own here")
    return user_id


def project_of(request: AuthenticatedRequest, user_id: str | None) -> str | None:
    """Return the project of a user's own credential; whoever manages the tenant's manages those of
    all its projects."""
    return None if user_id is None else request.user.project_id


async def show_of(
    request: AuthenticatedRequest, server: str, user_id: str | None
) -> Response[bytes]:
    vault, project_id = vault_of(services(request).mcp), project_of(request, user_id)
    found = await vault.find(request.user.org_id, server, user_id, project_id=project_id)
    return answer(request, to_view(found))


async def keep_of(
    request: AuthenticatedRequest, server: str, user_id: str | None
) -> Response[bytes]:
    body = decode_kept(DECODER, await plain_body(request))
    vault, actor = vault_of(services(request).mcp), actor_of(request)
    project_id = project_of(request, user_id)
    kept = await vault.put(
        request.user.org_id, server, user_id, body.values, actor, project_id=project_id
    )
    return answer(request, to_view(kept))


async def delete_of(
    request: AuthenticatedRequest, server: str, user_id: str | None
) -> Response[bytes]:
    vault, actor = vault_of(services(request).mcp), actor_of(request)
    project_id = project_of(request, user_id)
    gone = await vault.delete(request.user.org_id, server, user_id, actor, project_id=project_id)
    return answer(request, McpCredentialDeleted(id=gone.id))


@get(
    OWN,
    opt=needs(SCOPE_MCP_CALL),
    tags=["MCP"],
    summary="Show what a server is shown of the user",
    operation_class=describes(answer=McpCredentialView),
)
async def show_own(request: AuthenticatedRequest, server: FromPath[str]) -> Response[bytes]:
    return await show_of(request, server, user_of(request))


@put(
    OWN,
    opt=needs(SCOPE_MCP_CALL),
    tags=["MCP"],
    summary="Give a server a credential of the user",
    operation_class=describes(body=McpCredentialBody, answer=McpCredentialView),
)
async def keep_own(request: AuthenticatedRequest, server: FromPath[str]) -> Response[bytes]:
    return await keep_of(request, server, user_of(request))


@delete(
    OWN,
    opt=needs(SCOPE_MCP_CALL),
    tags=["MCP"],
    status_code=200,
    summary="Forget the user's credential",
    operation_class=describes(answer=McpCredentialDeleted),
)
async def delete_own(request: AuthenticatedRequest, server: FromPath[str]) -> Response[bytes]:
    return await delete_of(request, server, user_of(request))


@get(
    TENANTS,
    opt=needs(SCOPE_ADMIN_READ),
    tags=["MCP"],
    summary="Show what a server is shown of the tenant",
    operation_class=describes(answer=McpCredentialView),
)
async def show_tenants(request: AuthenticatedRequest, server: FromPath[str]) -> Response[bytes]:
    return await show_of(request, server, None)


@put(
    TENANTS,
    opt=needs(SCOPE),
    tags=["MCP"],
    summary="Give a server a credential of the tenant",
    operation_class=describes(body=McpCredentialBody, answer=McpCredentialView),
)
async def keep_tenants(request: AuthenticatedRequest, server: FromPath[str]) -> Response[bytes]:
    return await keep_of(request, server, None)


@delete(
    TENANTS,
    opt=needs(SCOPE),
    tags=["MCP"],
    status_code=200,
    summary="Forget the tenant's credential",
    operation_class=describes(answer=McpCredentialDeleted),
)
async def delete_tenants(request: AuthenticatedRequest, server: FromPath[str]) -> Response[bytes]:
    return await delete_of(request, server, None)


routes = [show_own, keep_own, delete_own, show_tenants, keep_tenants, delete_tenants]
