"""Defines where a tool loop finds its tools and has them called, and a fake of it. Knows no HTTP
and no model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
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
    """By which it is answered."""
    by_caller: bool = False
    """It is whoever called that answers; else an administrator."""


class RefusedCall(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a call that was not made, or of which nobody knows what came."""

    message: str
    code: int = -32603
    """Of JSON-RPC."""
    cost_pico: Pico = 0
    """Where it may have been done."""


CallOutcome = ToolResult | NeedsApproval | RefusedCall
ApprovalState = Literal["unknown", "pending", "pending_caller", "approved", "denied", "used"]
"""`pending_caller`: it waits for the caller's own answer. `unknown`: it was never asked, by another
caller, or too long ago; the call, made again, asks anew."""


class ListFailed(Exception):
    """A server does not say which tools it has. The text is for the client."""


class Toolbox(Protocol):
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


Act = Callable[[dict[str, Any]], Awaitable[CallOutcome]]


class FakeToolbox:
    """A toolbox of functions that remembers what was called."""

    def __init__(
        self, servers: Mapping[str, Sequence[tuple[OfferedTool, Act]] | ListFailed]
    ) -> None:
        self._servers = servers
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.cancelled: list[str] = []
        self.spent: set[tuple[str, str]] = set()
        self.approvals: dict[str, ApprovalState] = {}
        """Of what tools asked for; what changes them stands for the rules."""

    def knows(self, principal: Principal, server_label: str) -> bool:
        return server_label in self._servers

    async def offered(self, principal: Principal, server_label: str) -> tuple[OfferedTool, ...]:
        found = self._servers[server_label]
        if isinstance(found, ListFailed):
            raise found
        return tuple(tool for tool, _ in found)

    async def call(
        self,
        principal: Principal,
        tool: OfferedTool,
        arguments: dict[str, Any],
        timeout_s: float,
        *,
        part_of: str | None = None,
    ) -> CallOutcome:
        found = self._servers[tool.server_label]
        assert not isinstance(found, ListFailed)
        act = next(act for each, act in found if each.name == tool.name)
        self.called.append((tool.alias, arguments))
        try:
            return await act(arguments)
        except BaseException:
            self.cancelled.append(tool.alias)
            raise

    async def approval(self, principal: Principal, approval_id: str) -> ApprovalState:
        return self.approvals.get(approval_id, "unknown")

    async def decide(self, principal: Principal, approval_id: str, approve: bool) -> ApprovalState:
        if self.approvals.get(approval_id) == "pending_caller":
            self.approvals[approval_id] = "approved" if approve else "denied"
        return await self.approval(principal, approval_id)

    async def spend(self, principal: Principal, request_id: str) -> bool:
        is_new = (principal.org_id, request_id) not in self.spent
        self.spent.add((principal.org_id, request_id))
        return is_new
