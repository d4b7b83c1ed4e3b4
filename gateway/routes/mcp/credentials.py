"""/v1/mcp/credentials/{server} and /v1/mcp/tenant_credentials/{server}: what an MCP server is shown
of a user, and of a tenant for all who have none of their own.

Values are written and never read.
"""

from __future__ import annotations

import msgspec

from gateway.mcp.service.service import configured
from gateway.permissions import SCOPE_MCP_CALL
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.errors import NotAllowed
from gateway.vault.credentials import UpstreamCredential
from gateway.wire.shared.resource import view_of

SCOPE = "admin:clients"


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


def to_view(found: UpstreamCredential) -> McpCredentialView:
    return view_of(McpCredentialView, found, server=found.upstream)


own = AdminResource[UpstreamCredential](
    path="/v1/mcp/credentials/{server:str}",
    tag="MCP",
    read=needs(SCOPE_MCP_CALL),
    change=needs(SCOPE_MCP_CALL),
    view=McpCredentialView,
    show=to_view,
    checks_ids=False,
)
tenants = AdminResource[UpstreamCredential](
    path="/v1/mcp/tenant_credentials/{server:str}",
    tag="MCP",
    change=needs(SCOPE),
    view=McpCredentialView,
    show=to_view,
    checks_ids=False,
)


def user_of(request: AdminRequest) -> str:
    """Raises: NotAllowed, for a credential that is nobody's own."""
    user_id = request.user.user_id
    if user_id is None:
        raise NotAllowed("user", "only a user who is signed in has credentials of their own here")
    return user_id


def project_of(request: AdminRequest, user_id: str | None) -> str | None:
    """Return the project of a user's own credential; whoever manages the tenant's manages those of
    all its projects."""
    return None if user_id is None else request.user.project_id


async def find(request: AdminRequest, user_id: str | None) -> UpstreamCredential:
    return await configured(request.services.mcp).vault.find(
        request.org_id, request.id, user_id, project_id=project_of(request, user_id)
    )


async def keep(
    request: AdminRequest, user_id: str | None, wanted: McpCredentialBody
) -> UpstreamCredential:
    return await configured(request.services.mcp).vault.put(
        request.org_id,
        request.id,
        user_id,
        wanted.values,
        request.actor,
        project_id=project_of(request, user_id),
    )


async def remove(request: AdminRequest, user_id: str | None) -> McpCredentialDeleted:
    project_id = project_of(request, user_id)
    gone = await configured(request.services.mcp).vault.delete(
        request.org_id, request.id, user_id, request.actor, project_id=project_id
    )
    return McpCredentialDeleted(id=gone.id)


@own.get("Show what a server is shown of the user")
async def show_own(request: AdminRequest) -> UpstreamCredential:
    return await find(request, user_of(request))


@own.replace("Give a server a credential of the user", McpCredentialBody, conditional=False)
async def keep_own(request: AdminRequest, wanted: McpCredentialBody) -> UpstreamCredential:
    return await keep(request, user_of(request), wanted)


@own.delete("Forget the user's credential", answer=McpCredentialDeleted, conditional=False)
async def delete_own(request: AdminRequest) -> McpCredentialDeleted:
    return await remove(request, user_of(request))


@tenants.get("Show what a server is shown of the tenant")
async def show_tenants(request: AdminRequest) -> UpstreamCredential:
    return await find(request, None)


@tenants.replace("Give a server a credential of the tenant", McpCredentialBody, conditional=False)
async def keep_tenants(request: AdminRequest, wanted: McpCredentialBody) -> UpstreamCredential:
    return await keep(request, None, wanted)


@tenants.delete("Forget the tenant's credential", answer=McpCredentialDeleted, conditional=False)
async def delete_tenants(request: AdminRequest) -> McpCredentialDeleted:
    return await remove(request, None)


routes = [show_own, keep_own, delete_own, show_tenants, keep_tenants, delete_tenants]
