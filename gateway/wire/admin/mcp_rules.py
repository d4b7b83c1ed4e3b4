"""/v1/admin/mcp: what clients write and read.

Moments are Unix seconds. A rule stands here as it is written; what it has to be besides is said in
`mcp_bridge.trust.policy`, whose struct has the same fields and is loaded where rules are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.wire.shared.page_query import PageQuery

ApprovalState = Literal["pending", "approved", "denied", "used", "expired"]
MAX_RULES = 1_000
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Window = Annotated[int, Meta(ge=1, le=31 * 24 * 3600)]


class McpApprovalsQuery(PageQuery):
    """The query of approvals. `state`: as it stands; what nobody answered or used in time is
    expired once it is looked at again."""

    state: ApprovalState | None = None


class McpApproval(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a person was asked about: good for this call of this caller, once."""

    object: str = "mcp.approval"
    id: str
    state: ApprovalState
    server: str
    tool: str
    project_id: str
    subject_id: str
    """The user, service account or key that the call is for."""
    client_id: str
    """The key or OAuth client that makes it; it cannot answer, unless the rules leave it to it."""
    decider: Literal["administrator", "caller"]
    """The person whose answer the rules want. If it is the caller, an administrator may answer,
    too."""
    pin: str
    """The digest of the tool as it was approved."""
    arguments_digest: str
    policy_version: str
    requested_at: int
    expires_at: int
    decided_by: str | None
    call_id: str | None
    """The id of the call that it was used for."""


class McpApprovalArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a call that waits, as its caller wrote them: text of a model, for a person
    to read and for nothing else."""

    object: str = "mcp.approval.arguments"
    approval_id: str
    arguments: dict[str, Any]


class McpCallLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    calls: Count
    window_s: Window


class McpSpendLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    amount_pico: Annotated[int, Meta(ge=0, le=10**18)]
    """Pico-USD: 10**12 are a dollar, and a million the most."""
    window_s: Window


class McpRule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A rule; see docs/mcp.md."""

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    effect: Literal["allow", "ask", "deny"]
    level: Literal["org", "project", "key"] = "org"
    of: Annotated[str, Meta(max_length=128)] = ""
    tools: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=100)] = ("*",)
    annotations: dict[str, bool] = {}
    when: Text = ""
    decider: Literal["administrator", "caller"] = "administrator"
    """The person who answers if the rule asks: `caller` leaves it to the caller
    (docs/mcp-tools.md)."""
    rate: McpCallLimit | None = None
    budget: McpSpendLimit | None = None


class McpRulesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All rules."""

    rules: Annotated[list[McpRule], Meta(max_length=MAX_RULES)]


class McpRules(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "mcp.rules"
    version: str
    """The version that approvals are bound to: a change of the rules ends them."""
    rules: list[McpRule]
    warnings: list[str] = []
    """Warnings of a replacement: rules that name no configured server, no project or no key."""
