"""/v1/admin/mcp/taints: who heard something from a server that taints, and how that is lifted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from litestar import Response, get, post
from litestar.params import FromPath

from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.mcp.rules import SCOPE, TAGS
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.routes.shared.resource import check_id
from gateway.tenancy.errors import NotAllowed
from gateway.wire.admin.mcp_taints import McpTaint, McpTaints

if TYPE_CHECKING:
    from gateway.mcp.calls import Taint

TAINTS = "/v1/admin/mcp/taints"
LIFT = TAINTS + "/{client_id:str}/lift"


@get(
    TAINTS,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="Whose calls ask a person, after what a server said that taints",
    operation_class=describes(answer=McpTaints),
)
async def list_taints(request: AuthenticatedRequest) -> Response[bytes]:
    from gateway.mcp.calls import taints_of

    redis, org_id = services(request).redis, request.user.org_id
    return answer(request, to_view(await taints_of(redis, org_id=org_id, now_s=time.time())))


@post(
    LIFT,
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Lift what taints a key or OAuth client, of all for whom it acts",
    operation_class=describes(answer=McpTaints, idempotent=True),
)
async def lift_taint(request: AuthenticatedRequest, client_id: FromPath[str]) -> Response[bytes]:
    """Raises: NotFound, NotAllowed (of one's own)."""
    from gateway.mcp.admin.taints_admin import lifting
    from gateway.mcp.calls import lift

    principal, found = request.user, services(request)
    client = check_id("client_id", client_id)
    if client in (principal.key_id, principal.client_id):
        raise NotAllowed("client_id", "who is tainted cannot lift it")
    org_id = principal.org_id
    async with tenant(found.db, org_id) as conn:
        taints = await lifting(
            conn, found.redis, org_id=org_id, client=client, actor=actor_of(request)
        )
    await lift(found.redis, org_id=org_id, taints=taints)
    return answer(request, to_view(taints))


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


routes = [list_taints, lift_taint]
