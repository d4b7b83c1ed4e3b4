"""Reads the calls of MCP tools that a client sends back as items, and shows them to the model.

A result is shown between marks that its server could not know: they are made of the id of the call,
so that the same call looks the same whenever it is shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import msgspec

from gateway.ids import uuid7_hex
from gateway.wire.openai_responses.items import (
    PREFIXES,
    InMcpApprovalRequest,
    InMcpApprovalResponse,
    InMcpCall,
    InMcpListTools,
    Item,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpExecutionError,
    McpItem,
    McpListTools,
)
from gateway.wire.shared.resource import view_of

InMcpItem = InMcpListTools | InMcpCall | InMcpApprovalRequest | InMcpApprovalResponse
CALLS = (McpCall, McpApprovalRequest)
Answers = Mapping[str, str]
"""By the id of a request for approval: what the model is shown as the result of its call."""

NOT_APPROVED = "This call was not approved."
NOT_YET_APPROVED = "This call waits for somebody to approve it."
NONCE_CHARS = 16
ROUND_CHARS = 8
"""This many characters at the end of a call's id are the same for all calls that the model made in
one answer."""


def to_mcp_item(item: InMcpItem, new_id: Callable[[str], str]) -> McpItem:
    match item:
        case InMcpListTools():
            return view_of(McpListTools, item, tools=tuple(item.tools))
        case InMcpCall():
            return view_of(McpCall, item, status=item.status or "completed")
        case InMcpApprovalRequest():
            return view_of(McpApprovalRequest, item)
        case InMcpApprovalResponse():
            return view_of(
                McpApprovalResponse, item, id=item.id or new_id(PREFIXES[McpApprovalResponse])
            )


def call_id(prefix: str, round_: str) -> str:
    return f"{prefix}{uuid7_hex()}{round_}"


def round_of(id_: str) -> str:
    return id_[-ROUND_CHARS:]


def answers_of(items: Iterable[Item]) -> Answers:
    """Return the answers to the requests for approval among the items."""
    found: dict[str, str] = {}
    for item in items:
        match item:
            case McpApprovalResponse(approve=False):
                reason = f" {item.reason}" if item.reason else ""
                found[item.approval_request_id] = NOT_APPROVED + reason
            case McpCall(approval_request_id=str(id_)) if not waits(item):
                found[id_] = shown(item)
    return found


def waits(item: Item) -> bool:
    """A call that was begun, and by the rules needs the approval that it names."""
    return (
        isinstance(item, McpCall)
        and item.approval_request_id is not None
        and item.status == "incomplete"
    )


def in_place_of(items: Iterable[Item]) -> frozenset[str]:
    """Return the ids of requests for approval for which a call stands that was begun."""
    calls = (item for item in items if isinstance(item, McpCall) and waits(item))
    return frozenset(call.approval_request_id or "" for call in calls)


def waiting(item: McpCall | McpApprovalRequest, answers: Answers) -> dict[str, Any]:
    """The message that answers a call."""
    if isinstance(item, McpApprovalRequest) or waits(item):
        asked = item.id if isinstance(item, McpApprovalRequest) else item.approval_request_id
        text = answers.get(asked or "", NOT_YET_APPROVED)
    else:
        text = shown(item)
    return {"role": "tool", "content": text, "tool_call_id": item.id, "name": item.alias}


def shown(call: McpCall) -> str:
    """Return the text that the model is shown as its result."""
    from mcp_bridge.provenance import Provenance, for_model  # where servers are asked alone

    origin = Provenance(
        server=call.server_label, tool=call.name, pin="", call_id=call.id, received_at_s=0.0
    )
    content = [{"type": "text", "text": result_text(call)}]
    nonces = nonces_of(call.id)
    return for_model({"content": content}, origin, lambda: next(nonces))


def nonces_of(id_: str) -> Iterator[str]:
    for number in count():
        yield hashlib.sha256(f"{id_} {number}".encode()).hexdigest()[:NONCE_CHARS]


def result_text(call: McpCall) -> str:
    if call.error is None:
        return call.output or ""
    error = call.error
    said = error.content if isinstance(error, McpExecutionError) else error.message
    if isinstance(said, list):
        said = "\n".join(str(part.get("text", "")) for part in said if isinstance(part, dict))
    return f"Error: {said if isinstance(said, str) else msgspec.json.encode(said).decode()}"
