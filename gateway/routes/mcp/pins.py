"""/v1/admin/mcp/servers: what MCP servers offer that is not approved, and the yes to it.

The tag of an offer is of what waits to the byte: a yes with `If-Match` is to what was looked at, or
to nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway.mcp.service.service import configured
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.telemetry.metrics import UPSTREAM_STATES
from gateway.tenancy.errors import InvalidField
from gateway.wire.admin.mcp_pins import (
    MAX_SHOWN,
    McpApproveBody,
    McpChange,
    McpDifference,
    McpFinding,
    McpNeverShown,
    McpOfferQuery,
    McpRevokeBody,
    McpServer,
    McpServerHealth,
    McpServerOffer,
    McpServers,
    NamedOffer,
)
from gateway.wire.shared.resource import view_of

if TYPE_CHECKING:
    from gateway.mcp.admin.pins_admin import PinsAdmin, ServerOffer
    from mcp_bridge.pinning import Change, Key
    from mcp_bridge.trust.meaning import Comparison
    from mcp_bridge.trust.scan import Finding
    from mcp_bridge.upstream.circuit_breaker import UpstreamHealth

FIRST_PAGE = McpOfferQuery()
MAX_PAGE_BYTES = 1 << 20
"""The bytes of the definitions on one page, but for the last of them."""


def to_server(seen: ServerOffer, found: Sequence[UpstreamHealth] = ()) -> McpServer:
    unlooked = "approved" if seen.approved else "unapproved"
    return view_of(
        McpServer,
        seen.config,
        state="trusted" if seen.config.trust == "all" else unlooked,
        approved=seen.approved,
        health=to_health([one for one in found if one.upstream == seen.config.name]),
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


async def show_page(
    pins: PinsAdmin, seen: ServerOffer, query: McpOfferQuery = FIRST_PAGE
) -> McpServerOffer:
    """Compare a page by meaning, too, where a model is at hand. Raises: InvalidField."""
    span = await asyncio.to_thread(page_of, seen, query)
    compared = await pins.compare(seen.waits[slice(*span)])
    return await asyncio.to_thread(to_offer, seen, span, compared)


def page_of(seen: ServerOffer, query: McpOfferQuery = FIRST_PAGE) -> tuple[int, int]:
    """Return where a page begins and ends; hashes every change before it, so it runs in a thread.
    Raises: InvalidField."""
    first = 0
    if query.after is not None:
        cursors = (at for at, one in enumerate(seen.waits, 1) if cursor_of(one) == query.after)
        first = next(cursors, 0)
        if not first:
            raise InvalidField(
                "after", "what waits is something else now: begin with its first page"
            )
    return first, end_of_page(seen.waits, first, query.limit)


def to_offer(
    seen: ServerOffer, span: tuple[int, int], compared: Comparison | None = None
) -> McpServerOffer:
    """Compare each change of a page (`page_of`) to the byte, and scan it; runs in a thread."""
    first, end = span
    meant = {} if compared is None else compared.findings
    page = [
        to_change(change, findings + (meant.get(change.now.digest, ()) if change.now else ()))
        for change, findings in seen.found(first, end)
    ]
    last = seen.waits[end - 1] if end < len(seen.waits) else None
    return msgspec.structs.replace(
        to_summary(seen),
        changes=page,
        next=None if last is None else cursor_of(last),
        notes=[compared.note] if compared is not None and compared.note else [],
    )


def end_of_page(changes: Sequence[Change], first: int, limit: int) -> int:
    """Return where a page ends that begins at `first`: after `limit` changes, or so many bytes."""
    size = 0
    for at, change in enumerate(changes[first : first + limit], first + 1):
        size += sum(len(pin.body) for pin in (change.was, change.now) if pin is not None)
        if size > MAX_PAGE_BYTES:
            return at
    return min(first + limit, len(changes))


def cursor_of(change: Change) -> str:
    return hashlib.sha256(f"{change.kind}\n{change.name}".encode()).hexdigest()[:32]


def to_summary(seen: ServerOffer) -> McpServerOffer:
    """Show an offer without its changes, of which its digest is."""
    state = "waiting" if seen.waits else "approved"
    if seen.config.trust == "all":
        state = "trusted"
    return view_of(
        McpServerOffer,
        seen,
        name=seen.config.name,
        state=state if seen.problem is None else "unreachable",
        waiting=len(seen.waits),
        changes=[],
        never=[view_of(McpNeverShown, one) for one in seen.never[:MAX_SHOWN]],
    )


def to_change(change: Change, findings: tuple[Finding, ...]) -> McpChange:
    from mcp_bridge.pinning import differences

    was, now = ({} if pin is None else pin.value() for pin in (change.was, change.now))
    return view_of(
        McpChange,
        change,
        was=None if change.was is None else change.was.digest,
        now=None if change.now is None else change.now.digest,
        differences=[view_of(McpDifference, one) for one in differences(was, now)],
        findings=[view_of(McpFinding, one) for one in findings],
    )


def named_in(body: NamedOffer) -> frozenset[Key] | None:
    """None: all. Raises: InvalidField."""
    from gateway.mcp.admin.pins_admin import keys_of

    if not body.is_one:
        raise InvalidField("tools", "name tools, prompts or instructions, or say that all is meant")
    if body.all:
        return None
    return keys_of(body.tools or (), body.prompts or (), body.instructions is not None)


servers = AdminResource[McpServerOffer](
    path="/v1/admin/mcp/servers",
    id_name="server",
    tag="MCP administration",
    change=needs("admin:mcp"),
    view=McpServerOffer,
    checks_ids=False,
    unsteady=("changes", "next", "notes"),
)


@servers.get(
    "List the MCP servers, and how much of each is approved", path=servers.path, answer=McpServers
)
async def list_servers(request: AdminRequest) -> McpServers:
    service = request.services.mcp
    if service is None:
        return McpServers(data=[])
    found, health = await service.pins.known(request.org_id), service.health(request.org_id)
    return McpServers(data=[to_server(one, health) for one in found])


@servers.route(
    "GET",
    servers.one,
    "What a server offers now that is not approved; it is asked for this",
    needs=servers.change,
    query=McpOfferQuery,
)
async def show_offer(request: AdminRequest, query: McpOfferQuery) -> McpServerOffer:
    """Raises: NotFound, InvalidField."""
    pins, again = configured(request.services.mcp).pins, query.after is not None
    seen = await pins.see(request.org_id, request.id, again=again)
    return await show_page(pins, seen, query)


@servers.act(
    "/approve",
    "Approve what a server offers now; every worker shows it within a second",
    body=McpApproveBody,
)
async def approve_offer(request: AdminRequest, wanted: McpApproveBody) -> McpServerOffer:
    """Raises: NotFound, InvalidField, Conflict (no answer of it), PreconditionFailed."""
    pins = configured(request.services.mcp).pins
    seen = await pins.approve(
        request.org_id,
        request.id,
        named_in(wanted),
        actor=request.actor,
        check=lambda found: request.check(to_summary(found)),
    )
    return await show_page(pins, seen)


@servers.act(
    "/revoke",
    "Take an approval back; no worker shows or calls it a second later",
    body=McpRevokeBody,
    answer=McpServer,
    conditional=False,
)
async def revoke_offer(request: AdminRequest, wanted: McpRevokeBody) -> McpServer:
    """Raises: NotFound, InvalidField."""
    seen = await configured(request.services.mcp).pins.revoke(
        request.org_id, request.id, named_in(wanted), actor=request.actor
    )
    return to_server(seen)


routes = [list_servers, show_offer, approve_offer, revoke_offer]
