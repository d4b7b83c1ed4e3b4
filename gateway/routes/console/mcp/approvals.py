"""Shows /console/mcp/approvals: calls of tools that wait for a person, with their arguments, and
answers them."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
from litestar import Response

from gateway.console.hidden import visible
from gateway.console.tables import Table, TableColumn
from gateway.mcp.admin.decisions import AskedCall, decide, read_asked
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.routes.console.mcp.names import find_names
from gateway.wire.admin.mcp_rules import ApprovalState

page = ConsolePage(name="mcp/approvals", title="Approvals", below="mcp")
STATES: tuple[ApprovalState, ...] = get_args(ApprovalState)
TONES = {
    "pending": "wait",
    "approved": "ok",
    "denied": "err",
    "used": "plain",
    "expired": "plain",
}


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    state: Any = request.value("state", known=(*STATES, "all")) or "pending"
    decides = request.can("admin:mcp")
    async with request.transaction() as conn:
        asked, more = await read_asked(
            conn,
            org_id=request.org_id,
            state=None if state == "all" else state,
            cursor=request.cursor("asc" if state == "pending" else "desc"),
            shown=request.services.asked_arguments if decides else None,
        )
        ids = [
            each
            for one in asked
            for each in (one.caller.client, one.caller.project_id, one.caller.subject)
        ]
        named = await find_names(conn, request.org_id, ids)
    table = Table(
        "Calls that a person was asked about",
        asked,
        TableColumn("State", state_of, kind="tag"),
        TableColumn("Server", lambda one: one.approval.call.server),
        TableColumn("Tool", lambda one: visible(one.approval.tool)),
        TableColumn("By", lambda one: named(one.caller.client)),
        TableColumn("For", lambda one: named(one.caller.subject)),
        TableColumn("Project", lambda one: named(one.caller.project_id)),
        TableColumn("Asked", lambda one: one.approval.requested_at_s, kind="time"),
        TableColumn("Until", lambda one: one.approval.expires_at_s, kind="time"),
        TableColumn("Answered by", lambda one: named(one.approval.decided_by) or None),
        TableColumn("Id", "id", kind="id"),
    )
    return request.render(
        "mcp/approvals",
        table=table,
        more=asked[-1].id if more else None,
        state=state,
        states=[each for each in STATES if each != "pending"],
        asked=asked,
        named=named,
        arguments_of=arguments_of,
        decides=decides,
    )


def state_of(asked: AskedCall) -> tuple[str, str]:
    return asked.approval.state, TONES[asked.approval.state]


def arguments_of(asked: AskedCall) -> str | None:
    """Return the arguments as a person reads them; None: none are kept."""
    if asked.arguments is None:
        return None
    found = msgspec.json.decode(asked.arguments)
    return json.dumps(found, indent=2, ensure_ascii=False)


@page.post("/{approval_id:str}/approve", needs="admin:mcp", again=show)
async def approve(request: ConsoleRequest) -> Response[bytes]:
    return await answer(request, yes=True)


@page.post("/{approval_id:str}/deny", needs="admin:mcp", again=show)
async def deny(request: ConsoleRequest) -> Response[bytes]:
    return await answer(request, yes=False)


async def answer(request: ConsoleRequest, *, yes: bool) -> Response[bytes]:
    made = await decide(
        request.db,
        org_id=request.user.org_id,
        approval_id=request.ids["approval_id"],
        yes=yes,
        by=request.user.key_id,
        client=request.user.client_id,
        actor=request.actor,
    )
    call = f"{made.call.server} {visible(made.tool)}"
    if yes:
        return request.done(f"{call} goes out once, when it is made again in time.")
    return request.done(f"{call} was denied.", tone="wait")


routes = page.routes
