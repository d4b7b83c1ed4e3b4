"""Defines where a tool loop finds its tools and has them called. Knows no HTTP and no model."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from billing.money import Pico
from gateway.principal import Principal
from gateway.wire.openai_responses.tool_rounds import OfferedTool


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    is_error: bool = False
    """The tool says that it failed."""
    cost_pico: Pico = 0


class NeedsApproval(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a call that needs a person by the rules of the organization; it was not
    called."""

    message: str
    id: str
    """The id by which the approval is answered."""
    by_caller: bool = False
    """True if the caller answers; otherwise an administrator does."""


class RefusedCall(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a call that was not made, or of which nobody knows what came."""

    message: str
    code: int = -32603
    """The error code of JSON-RPC."""
    cost_pico: Pico = 0
    """The price of the call, if it may have been made."""


CallOutcome = ToolResult | NeedsApproval | RefusedCall
ApprovalState = Literal["unknown", "pending", "pending_caller", "approved", "denied", "used"]
"""`pending_caller`: it waits for the caller's own answer. `unknown`: it was never asked, by another
caller, or too long ago; the call, made again, asks anew."""


class ListFailed(Exception):
    """A server does not say which tools it has. The text is for the client."""


class Toolbox(Protocol):
    def labels(self, *, org_id: str, project_id: str, user_id: str | None) -> tuple[str, ...]:
        """Return the labels of the servers that somebody may name."""
        ...

    def knows(self, principal: Principal, server_label: str) -> bool: ...

    async def offered(self, principal: Principal, server_label: str) -> tuple[OfferedTool, ...]:
        """Return the tools in the server's order. Raises: ListFailed."""
        ...

    async def call(
        self,
        principal: Principal,
        tool: OfferedTool,
        arguments: dict[str, Any],
        timeout_s: float,
        *,
        part_of: str | None = None,
    ) -> CallOutcome:
        """Call a tool. `part_of`: the request by whose id it is found on the bill. Cancelled if
        nobody waits for it any more; then the server is told as far as its protocol can tell."""
        ...

    async def approval(self, principal: Principal, approval_id: str) -> ApprovalState:
        """Return the state of what the rules asked for (`NeedsApproval.id`)."""
        ...

    async def decide(self, principal: Principal, approval_id: str, approve: bool) -> ApprovalState:
        """Record the caller's own answer to what is `pending_caller`; return the state after it."""
        ...

    async def spend(self, principal: Principal, request_id: str) -> bool:
        """Use an approval that was asked for by that id; False: it was used before, on whatever
        branch of a conversation."""
        ...
