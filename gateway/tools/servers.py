"""Finds which servers a request names, whether its caller may call them, and what they approved.
Every refusal names its field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.auth.errors import MissingScope
from gateway.permissions import SCOPE_MCP_CALL, may
from gateway.principal import Principal
from gateway.request_errors import BadField
from gateway.tools.approvals import AnsweredRequest
from gateway.tools.loop import ToolLoops
from gateway.wire.openai_responses.items import (
    Item,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
)
from gateway.wire.openai_responses.mcp_history import round_of, waits
from gateway.wire.openai_responses.mcp_tools import McpTool, labelled_once, only_mcp
from gateway.wire.openai_responses.tool_rounds import ModelCall
from gateway.wire.shared.refusals import unsupported


def known_servers(
    loops: ToolLoops | None, principal: Principal, tools: Iterable[Any] | None
) -> Mapping[str, McpTool]:
    """Return the servers by label; none: nothing is called here. Raises: BadField, MissingScope."""
    found = only_mcp(tools)
    servers = labelled_once(found)
    if servers and not may(principal, SCOPE_MCP_CALL, project_id=principal.project_id):
        raise MissingScope(SCOPE_MCP_CALL)
    for index, tool in found:
        if loops is None or not loops.toolbox.knows(principal, tool.server_label):
            param = f"tools[{index}].server_label"
            raise BadField(
                f"Invalid value for '{param}': no server of that name is registered here.",
                param=param,
            )
    return servers


def refuse_servers(tools: Iterable[Any] | None, why: str) -> None:
    """Raises: BadField."""
    for index, _ in only_mcp(tools):
        raise unsupported(f"tools[{index}].type", f"`mcp` is not supported here: {why}")


def labels_of(items: Iterable[Item]) -> frozenset[str]:
    """Return the labels of servers whose tools were listed among the items."""
    return frozenset(
        item.server_label for item in items if isinstance(item, McpListTools) and not item.error
    )


def answered_requests(
    before: Iterable[Item], given: Iterable[Item], servers: Mapping[str, McpTool]
) -> tuple[AnsweredRequest, ...]:
    """Return what `given` says of the requests for approval among all items, each once. Raises:
    BadField."""
    before, given = list(before), list(given)
    requests = {item.id: item for item in (*before, *given) if isinstance(item, McpApprovalRequest)}
    answered = {
        item.approval_request_id for item in before if isinstance(item, McpApprovalResponse)
    }
    answered |= {
        item.approval_request_id
        for item in (*before, *given)
        if isinstance(item, McpCall) and item.approval_request_id is not None and not waits(item)
    }
    found: list[AnsweredRequest] = []
    for index, item in enumerate(given):
        if not isinstance(item, McpApprovalResponse):
            continue
        param, id_ = f"input[{index}].approval_request_id", item.approval_request_id
        request = requests.get(id_)
        if request is None:
            raise BadField(f"No approval request with id '{id_}'.", param=param)
        if id_ in answered:
            raise BadField(f"The approval request '{id_}' was answered already.", param=param)
        answered.add(id_)
        if item.approve and request.server_label not in servers:
            raise BadField(
                f"'tools' has no server '{request.server_label}', whose call is approved.",
                param="tools",
            )
        made = ModelCall(request.alias, len(found), round_of(id_), text=request.arguments)
        found.append(AnsweredRequest(id=id_, made=made, approve=item.approve))
    return tuple(found)
