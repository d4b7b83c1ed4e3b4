"""/v1/admin/mcp/taints: who heard something from a server that taints, and how that is lifted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.errors import NotAllowed

if TYPE_CHECKING:
    from gateway.mcp.calls import Taint


class McpTaint(msgspec.Struct, frozen=True, kw_only=True):
    """A taint: the calls with side effects of its caller ask a person first."""

    object: str = "mcp.taint"
    client_id: str
    """The key or OAuth client."""
    subject_id: str
    """The user, service account or key that it acts for."""
    project_id: str
    servers: list[str]
    """The servers whose results taint a session."""
    expires_at: int
    """In Unix seconds, if they say nothing more."""


class McpTaints(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[McpTaint]


def to_view(taints: list[Taint]) -> McpTaints:
    shown = [
        McpTaint(
            client_id=each.caller.client,
            subject_id=each.caller.subject,
            project_id=each.caller.project_id,
            servers=list(each.servers),
            expires_at=int(each.until_s),
        )
        for each in taints
    ]
    return McpTaints(data=shown)


taints = AdminResource["list[Taint]"](
    path="/v1/admin/mcp/taints",
    id_name="client_id",
    tag="MCP administration",
    change=needs("admin:mcp"),
    view=McpTaints,
    show=to_view,
)


@taints.get(
    "Whose calls ask a person, after what a server said that taints",
    path=taints.path,
)
async def list_taints(request: AdminRequest) -> list[Taint]:
    from gateway.mcp.calls import taints_of

    return await taints_of(request.redis, org_id=request.org_id, now_s=time.time())


@taints.act(
    "/lift", "Lift what taints a key or OAuth client, of all for whom it acts", conditional=False
)
async def lift_taint(request: AdminRequest) -> list[Taint]:
    """Raises: NotFound, NotAllowed (of one's own)."""
    from gateway.mcp.calls import lift, lifting

    org_id = request.org_id
    if request.id in (request.user.key_id, request.user.client_id):
        raise NotAllowed("client_id", "who is tainted cannot lift it")
    async with request.transaction() as conn:
        found = await lifting(
            conn, request.redis, org_id=org_id, client=request.id, actor=request.actor
        )
    await lift(request.redis, org_id=org_id, taints=found)
    return found


routes = [list_taints, lift_taint]
