"""/v1/admin/mcp: calls of MCP servers that wait for a person, and an org's rules for calls.

Which of a server's offer is approved is said in `pins`, or on the command line (`tollgate
mcp`).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from litestar import Response

from gateway.mcp.admin import decisions
from gateway.mcp.approvals import PostgresApprovals, select_approvals, to_approval
from gateway.mcp.tables import approvals as table
from gateway.routes.shared.access import needs
from gateway.routes.shared.conditional import tagged
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.errors import NotFound
from gateway.wire.admin.mcp_rules import (
    McpApproval,
    McpApprovalArguments,
    McpApprovalsQuery,
    McpRule,
    McpRules,
    McpRulesBody,
)
from gateway.wire.shared.resource import view_of
from mcp_bridge.caller import Caller
from mcp_bridge.trust.approvals import Approval, expired


def to_view(approval: Approval) -> McpApproval:
    late = expired(approval, time.time())
    approval = approval if late is None else late.approval
    call, caller = approval.call, Caller.of(approval.call.caller)
    by_caller = approval.decided_by == call.caller
    return view_of(
        McpApproval,
        call,
        id=approval.id,
        state=approval.state,
        tool=approval.tool,
        project_id=caller.project_id,
        subject_id=caller.subject,
        client_id=caller.client,
        requested_at=int(approval.requested_at_s),
        expires_at=int(approval.expires_at_s),
        decided_by=(caller.client if by_caller else approval.decided_by) or None,
        call_id=approval.used_by or None,
    )


def to_rules(rules: Any) -> McpRules:
    """Return `mcp_bridge.trust.call_records.Rules` as clients see them."""
    written = msgspec.convert(msgspec.to_builtins(rules.rules), list[McpRule])
    return McpRules(version=rules.version, rules=written)


approvals = AdminResource[Approval](
    path="/v1/admin/mcp/approvals",
    id_name="approval_id",
    tag="MCP administration",
    change=needs("admin:mcp"),
    view=McpApproval,
    show=to_view,
)
rules = AdminResource[Any](
    path="/v1/admin/mcp/rules",
    tag="MCP administration",
    change=needs("admin:mcp"),
    view=McpRules,
    show=to_rules,
)

list_approvals = approvals.list_all(
    "List the calls that a person was asked about",
    McpApprovalsQuery,
    select=lambda org_id, query: select_approvals(org_id, query.state),
    row=lambda row: to_approval(row.body),
    key=table.c.id,
    name="list_approvals",
)


@approvals.get("A call that a person was asked about")
async def show_approval(request: AdminRequest) -> Approval:
    found = await PostgresApprovals(request.db).get(request.org_id, request.id)
    if found is None:
        raise NotFound("approval_id", f"no approval {request.id}")
    return found


@approvals.route(
    "GET",
    approvals.one + "/arguments",
    "The arguments of a call that waits, for who decides",
    needs=approvals.change,
    answer=McpApprovalArguments,
)
async def show_arguments(request: AdminRequest) -> McpApprovalArguments:
    store = PostgresApprovals(request.db, shown=request.services.asked_arguments)
    found = await store.arguments(request.org_id, request.id, time.time())
    if found is None:
        raise NotFound("approval_id", f"no arguments are kept of {request.id}")
    return McpApprovalArguments(approval_id=request.id, arguments=msgspec.json.decode(found))


@approvals.act("/approve", "Say yes to a call: it goes out once, when it is made again in time")
async def approve(request: AdminRequest) -> Approval:
    return await decide(request, yes=True)


@approvals.act("/deny", "Say no to a call")
async def deny(request: AdminRequest) -> Approval:
    return await decide(request, yes=False)


async def decide(request: AdminRequest, *, yes: bool) -> Approval:
    return await decisions.decide(
        request.db,
        org_id=request.user.org_id,
        approval_id=request.id,
        yes=yes,
        by=request.user.key_id,
        client=request.user.client_id,
        actor=request.actor,
        check=request.check,
    )


@rules.get("The rules for calls of MCP servers")
async def show_rules(request: AdminRequest) -> Any:
    from gateway.mcp.rules import read_rules

    async with request.transaction() as conn:
        return await read_rules(conn, org_id=request.org_id)


@rules.replace(
    "Replace all rules for calls; every worker keeps to them within a second", McpRulesBody
)
async def replace(request: AdminRequest, wanted: McpRulesBody) -> Response[bytes]:
    from gateway.mcp.admin.rule_warnings import warnings_of
    from gateway.mcp.known import announce
    from gateway.mcp.rules import replace_rules
    from mcp_bridge.trust.policy import ToolRule

    org_id, service = request.org_id, request.services.mcp
    new = msgspec.convert(msgspec.to_builtins(wanted.rules), list[ToolRule])
    async with request.transaction() as conn:
        made = await replace_rules(
            conn, org_id=org_id, rules=new, actor=request.actor, check=request.check
        )
        servers = () if service is None else service.pins.of_org(org_id)
        warnings = await warnings_of(conn, org_id=org_id, rules=new, servers=servers)
    await announce(request.redis, org_id)
    view = to_rules(made)
    return tagged(msgspec.structs.replace(view, warnings=warnings), rules.etag(made))


routes = [list_approvals, show_approval, show_arguments, approve, deny, show_rules, replace]
