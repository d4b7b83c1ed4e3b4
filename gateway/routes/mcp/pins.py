"""/v1/admin/mcp/servers: what MCP servers offer that is not approved, and the yes to it.

The tag of an offer is of what waits to the byte: a yes with `If-Match` is to what was looked at, or
to nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath

from gateway.mcp.service.service import pins_of
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import Precondition, answer, if_match
from gateway.routes.shared.operations import describes
from gateway.telemetry import UPSTREAM_STATES
from gateway.tenancy.errors import InvalidField
from gateway.wire.admin.mcp_pins import (
    MAX_SHOWN,
    McpApproveBody,
    McpChange,
    McpDifference,
    McpFinding,
    McpNeverShown,
    McpRevokeBody,
    McpServer,
    McpServerHealth,
    McpServerOffer,
    McpServers,
    NamedOffer,
)
from gateway.wire.shared.refusals import decode_kept

if TYPE_CHECKING:
    from gateway.mcp.admin.pins_admin import ServerOffer
    from mcp_bridge.pinning import Change, Key
    from mcp_bridge.trust.scan import Finding
    from mcp_bridge.upstream.circuit_breaker import UpstreamHealth

SCOPE = "admin:mcp"
SERVERS = "/v1/admin/mcp/servers"
SERVER = SERVERS + "/{server:str}"
TAGS = ["MCP administration"]

_approve_decoder = msgspec.json.Decoder(McpApproveBody)
_revoke_decoder = msgspec.json.Decoder(McpRevokeBody)


def to_server(seen: ServerOffer, found: Sequence[UpstreamHealth] = ()) -> McpServer:
    unlooked = "approved" if seen.approved else "unapproved"
    return msgspec.convert(
        {
            "name": seen.config.name,
            "state": "trusted" if seen.config.trust == "all" else unlooked,
            "transport": seen.config.transport,
            "approved": seen.approved,
            "health": to_health([one for one in found if one.upstream == seen.config.name]),
        },
        McpServer,
    )


def to_health(found: Sequence[UpstreamHealth]) -> McpServerHealth | None:
    if not found:
        return None
    worst = max(found, key=lambda one: (UPSTREAM_STATES.index(one.state), one.failures_in_a_row))
    now = time.time()
    answered = [one.answered_s for one in found if one.answered_s is not None]
    return McpServerHealth(
        state=worst.state,
        connections=len(found),
        failures_in_a_row=worst.failures_in_a_row,
        last_failure=worst.last_failure,
        failing_since=None if worst.failing_s is None else int(now - worst.failing_s),
        last_answer_at=int(now - min(answered)) if answered else None,
        retry_at=int(now + worst.retry_after_s) if worst.retry_after_s else None,
    )


def to_offer(seen: ServerOffer) -> McpServerOffer:
    """Compare each change to the byte; runs in a thread."""
    state = "waiting" if seen.waits else "approved"
    if seen.config.trust == "all":
        state = "trusted"
    said = {
        "name": seen.config.name,
        "state": state if seen.problem is None else "unreachable",
        "problem": seen.problem,
        "approved": seen.approved,
        "waiting": len(seen.waits),
        "digest": seen.digest,
        "changes": [to_change(*one) for one in seen.waits[:MAX_SHOWN]],
        "never": [
            McpNeverShown(kind=one.kind, name=one.name, path=one.path, reason=one.reason)
            for one in seen.never[:MAX_SHOWN]
        ],
    }
    return msgspec.convert(said, McpServerOffer)


def to_change(change: Change, findings: tuple[Finding, ...]) -> McpChange:
    from mcp_bridge.pinning import differences

    was, now = ({} if pin is None else pin.value() for pin in (change.was, change.now))
    said = {
        "state": change.state,
        "kind": change.kind,
        "name": change.name,
        "was": None if change.was is None else change.was.digest,
        "now": None if change.now is None else change.now.digest,
        "differences": [
            McpDifference(path=one.path, was=one.was, now=one.now) for one in differences(was, now)
        ],
        "findings": [
            McpFinding(code=one.code, path=one.path, severity=one.severity, detail=one.detail)
            for one in findings
        ],
    }
    return msgspec.convert(said, McpChange)


def named_in(body: NamedOffer) -> frozenset[Key] | None:
    """None: all. Raises: InvalidField."""
    from gateway.mcp.admin.pins_admin import keys_of

    if not body.is_one:
        raise InvalidField("tools", "name tools, prompts or instructions, or say that all is meant")
    if body.all:
        return None
    return keys_of(body.tools or (), body.prompts or (), body.instructions is not None)


@get(
    SERVERS,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the MCP servers, and how much of each is approved",
    operation_class=describes(answer=McpServers),
)
async def list_servers(request: AuthenticatedRequest) -> Response[bytes]:
    door = services(request).mcp
    if door is None:
        return answer(request, McpServers(data=[]))
    org_id = request.user.org_id
    found, health = await door.pins.known(org_id), door.health(org_id)
    return answer(request, McpServers(data=[to_server(one, health) for one in found]))


@get(
    SERVER,
    opt=needs(SCOPE),
    tags=TAGS,
    summary="What a server offers now that is not approved; it is asked for this",
    operation_class=describes(answer=McpServerOffer),
)
async def show_offer(request: AuthenticatedRequest, server: FromPath[str]) -> Response[bytes]:
    seen = await pins_of(services(request).mcp).see(request.user.org_id, server)
    return answer(request, await asyncio.to_thread(to_offer, seen))


@post(
    SERVER + "/approve",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Approve what a server offers now; every worker shows it within a second",
    operation_class=describes(
        body=McpApproveBody, answer=McpServerOffer, idempotent=True, conditional=True
    ),
)
async def approve_offer(request: AuthenticatedRequest, server: FromPath[str]) -> Response[bytes]:
    """Raises: NotFound, InvalidField, Conflict (no answer of it), PreconditionFailed."""
    precondition: Precondition = if_match(request)
    body = decode_kept(_approve_decoder, await plain_body(request))
    seen = await pins_of(services(request).mcp).approve(
        request.user.org_id,
        server,
        named_in(body),
        actor=actor_of(request),
        check=lambda found: precondition.check(to_offer(found)),
    )
    return answer(request, await asyncio.to_thread(to_offer, seen))


@post(
    SERVER + "/revoke",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Take an approval back; no worker shows or calls it a second later",
    operation_class=describes(body=McpRevokeBody, answer=McpServer, idempotent=True),
)
async def revoke_offer(request: AuthenticatedRequest, server: FromPath[str]) -> Response[bytes]:
    """Raises: NotFound, InvalidField."""
    body = decode_kept(_revoke_decoder, await plain_body(request))
    seen = await pins_of(services(request).mcp).revoke(
        request.user.org_id, server, named_in(body), actor=actor_of(request)
    )
    return answer(request, to_server(seen))


routes = [list_servers, show_offer, approve_offer, revoke_offer]
