"""/v1/admin/mcp: calls of MCP servers that wait for a person, and an org's rules for calls.

Which of a server's offer is approved is said in `pins`, or on the command line (`tollgate
mcp`).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from litestar import Response, get, post, put
from litestar.params import FromPath

from gateway.db import tenant
from gateway.mcp.approvals import PostgresApprovals, select_approvals, to_approval
from gateway.mcp.tables import approvals as table
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import Precondition, answer, if_match, tag_of, tagged
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, keyset, to_listing
from gateway.routes.shared.resource import check_id
from gateway.tenancy.errors import Conflict, NotAllowed, NotFound
from gateway.wire.admin.mcp_rules import (
    McpApproval,
    McpApprovalArguments,
    McpApprovalsQuery,
    McpRule,
    McpRules,
    McpRulesBody,
)
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import decode_kept
from mcp_bridge.caller import Caller
from mcp_bridge.errors import ApprovalRefused
from mcp_bridge.trust.approvals import Approval, Approvals, Outcome, decided, expired

SCOPE = "admin:mcp"
APPROVALS = "/v1/admin/mcp/approvals"
APPROVAL = APPROVALS + "/{approval_id:str}"
RULES = "/v1/admin/mcp/rules"
TAGS = ["MCP administration"]

_rules_decoder = msgspec.json.Decoder(McpRulesBody)


def to_view(approval: Approval) -> McpApproval:
    late = expired(approval, time.time())
    approval = approval if late is None else late.approval
    call, caller = approval.call, Caller.of(approval.call.caller)
    return McpApproval(
        id=approval.id,
        state=approval.state,
        server=call.server,
        tool=approval.tool,
        project_id=caller.project_id,
        subject_id=caller.subject,
        client_id=caller.client,
        pin=call.pin,
        arguments_digest=call.arguments_digest,
        policy_version=call.policy_version,
        requested_at=int(approval.requested_at_s),
        expires_at=int(approval.expires_at_s),
        decider=call.decider,
        decided_by=(caller.client if approval.decided_by == call.caller else approval.decided_by)
        or None,
        call_id=approval.used_by or None,
    )


@get(
    APPROVALS,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the calls that a person was asked about",
    operation_class=describes(query=McpApprovalsQuery, answer=Listing[McpApproval]),
)
async def list_approvals(request: AuthenticatedRequest) -> Response[bytes]:
    query, org_id = parse_query(request.url.query, McpApprovalsQuery), request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        rows = await conn.execute(keyset(select_approvals(org_id, query.state), table.c.id, query))
        found = [to_view(to_approval(row.body)) for row in rows]
    return answer(request, to_listing(found, query))


@get(
    APPROVAL,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="A call that a person was asked about",
    operation_class=describes(answer=McpApproval),
)
async def show_approval(
    request: AuthenticatedRequest, approval_id: FromPath[str]
) -> Response[bytes]:
    store = PostgresApprovals(services(request).db)
    found = await store.get(request.user.org_id, check_id("approval_id", approval_id))
    if found is None:
        raise NotFound("approval_id", f"no approval {approval_id}")
    return answer(request, to_view(found))


@get(
    APPROVAL + "/arguments",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="The arguments of a call that waits, for who decides",
    operation_class=describes(answer=McpApprovalArguments),
)
async def show_arguments(
    request: AuthenticatedRequest, approval_id: FromPath[str]
) -> Response[bytes]:
    store = PostgresApprovals(services(request).db, shown=services(request).asked_arguments)
    approval_id = check_id("approval_id", approval_id)
    found = await store.arguments(request.user.org_id, approval_id, time.time())
    if found is None:
        raise NotFound("approval_id", f"no arguments are kept of {approval_id}")
    arguments = msgspec.json.decode(found)
    return answer(request, McpApprovalArguments(approval_id=approval_id, arguments=arguments))


@post(
    APPROVAL + "/approve",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Say yes to a call: it goes out once, when it is made again in time",
    operation_class=describes(answer=McpApproval, idempotent=True, conditional=True),
)
async def approve(request: AuthenticatedRequest, approval_id: FromPath[str]) -> Response[bytes]:
    return await decide(request, approval_id, yes=True)


@post(
    APPROVAL + "/deny",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Say no to a call",
    operation_class=describes(answer=McpApproval, idempotent=True, conditional=True),
)
async def deny(request: AuthenticatedRequest, approval_id: FromPath[str]) -> Response[bytes]:
    return await decide(request, approval_id, yes=False)


async def decide(request: AuthenticatedRequest, approval_id: str, *, yes: bool) -> Response[bytes]:
    """Raises: NotFound, NotAllowed (who asks does not answer), Conflict, PreconditionFailed."""
    precondition, principal = if_match(request), request.user
    store = PostgresApprovals(services(request).db, actor_of(request))

    def step(before: Approval, now_s: float) -> Outcome:
        precondition.check(to_view(before))
        own = Caller.of(before.call.caller).client in (principal.key_id, principal.client_id)
        by = before.call.caller if own else principal.key_id
        return decided(before, approve=yes, by=by, now_s=now_s)

    approvals = Approvals(store, now_s=time.time, new_id=str, new_nonce=str)
    try:
        found = await approvals.move(principal.org_id, check_id("approval_id", approval_id), step)
    except ApprovalRefused as error:
        raise Conflict("approval_id", str(error)) from None
    if found == "unknown":
        raise NotFound("approval_id", f"no approval {approval_id}")
    if found == "own_request":
        raise NotAllowed("approval_id", "who asks for a call cannot approve it")
    if isinstance(found, str) or found.state == "expired":
        raise Conflict("approval_id", "it was answered already, or its time is over")
    return answer(request, to_view(found))


@get(
    RULES,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="The rules for calls of MCP servers",
    operation_class=describes(answer=McpRules),
)
async def show_rules(request: AuthenticatedRequest) -> Response[bytes]:
    from gateway.mcp.rules import read_rules

    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        return answer(request, to_rules(await read_rules(conn, org_id=org_id)))


@put(
    RULES,
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Replace all rules for calls; every worker keeps to them within a second",
    operation_class=describes(body=McpRulesBody, answer=McpRules, conditional=True),
)
async def replace(request: AuthenticatedRequest) -> Response[bytes]:
    from gateway.mcp.admin.rule_warnings import warnings_of
    from gateway.mcp.known import announce
    from gateway.mcp.rules import replace_rules
    from mcp_bridge.trust.policy import ToolRule

    precondition: Precondition = if_match(request)
    wanted = decode_kept(_rules_decoder, await plain_body(request)).rules
    found, org_id = services(request), request.user.org_id
    async with tenant(found.db, org_id) as conn:
        rules = msgspec.convert(msgspec.to_builtins(wanted), list[ToolRule])
        made = await replace_rules(
            conn,
            org_id=org_id,
            rules=rules,
            actor=actor_of(request),
            check=lambda before: precondition.check(to_rules(before)),
        )
        servers = () if found.mcp is None else found.mcp.pins.of_org(org_id)
        warnings = await warnings_of(conn, org_id=org_id, rules=rules, servers=servers)
    await announce(found.redis, org_id)
    view = to_rules(made)
    return tagged(msgspec.structs.replace(view, warnings=warnings), tag_of(view))


def to_rules(rules: Any) -> McpRules:
    """Return `mcp_bridge.trust.call_records.Rules` as clients see them."""
    written = msgspec.convert(msgspec.to_builtins(rules.rules), list[McpRule])
    return McpRules(version=rules.version, rules=written)


routes = [list_approvals, show_approval, show_arguments, approve, deny, show_rules, replace]
