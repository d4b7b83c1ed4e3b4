"""Makes a toolbox of the MCP bridge: the model's calls take the way of a client's calls, with every
check on it. A tool is called as by a client of revision 2026-07-28 that can be asked nothing
itself: neither sampled nor questioned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from billing.money import Pico
from gateway.principal import Principal
from gateway.tools.toolbox import (
    ApprovalState,
    CallOutcome,
    ListFailed,
    NeedsApproval,
    RefusedCall,
    ToolResult,
)
from gateway.wire.openai_responses.tool_rounds import OfferedTool

if TYPE_CHECKING:
    from mcp_bridge.caller import Caller
    from mcp_bridge.protocol.rpc import RpcError
    from mcp_bridge.routing.endpoint import Endpoint
    from mcp_bridge.server.bridge import Bridge
    from mcp_bridge.trust.approvals import Approval, Approvals

MAX_PAGES = 100
MAX_TOOLS = 512
"""A model is shown at most this many tools of one server: the rest of its list is left out."""
LIST_TIMEOUT_S = 30.0
SPENT_S = 400 * 86_400.0
"""Longer than what asked for an approval is kept (`response_lifetime_days`)."""
OMITTED = "[{kind}: not shown]"


class BridgeToolbox:
    """A toolbox over the MCP bridge. `once`: whether something of an org happens for the first time
    (`CallMemory.once`). `approvals_of`: the org's queue, in which somebody answers in their own
    name. `price_of`: the price of a call that is answered, or may have been."""

    def __init__(
        self,
        bridge: Bridge,
        info: dict[str, Any],
        caller_of: Callable[[Principal], Caller],
        once: Callable[[str, str, float], Awaitable[bool]],
        approvals_of: Callable[[Principal], Approvals],
        price_of: Callable[[Principal, str], Pico],
    ) -> None:
        self._bridge, self._info, self._caller_of = bridge, info, caller_of
        self._once, self._approvals_of = once, approvals_of
        self._price_of = price_of
        self._ids = count(1)

    def labels(self, *, org_id: str, project_id: str, user_id: str | None) -> tuple[str, ...]:
        endpoint = self._bridge.endpoint(org_id, user_id=user_id, project_id=project_id)
        return () if endpoint is None else tuple(each.name for each in endpoint.upstreams)

    def knows(self, principal: Principal, server_label: str) -> bool:
        return self._endpoint(principal, server_label) is not None

    async def offered(self, principal: Principal, server_label: str) -> tuple[OfferedTool, ...]:
        from mcp_bridge.protocol.rpc import RpcError

        found: list[OfferedTool] = []
        params: dict[str, Any] = {}
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                for _ in range(MAX_PAGES):
                    page = await self._ask(principal, server_label, "tools/list", params)
                    room = MAX_TOOLS - len(found)
                    listed = (page.get("tools") or ())[:room]
                    found += [to_tool(server_label, each) for each in listed]
                    cursor = page.get("nextCursor")
                    if not isinstance(cursor, str) or len(found) >= MAX_TOOLS:
                        break
                    params = {"cursor": cursor}
                if not found:  # as a list looks where nobody answers, too
                    await self._describe(principal, server_label)
        except (RpcError, TimeoutError) as error:
            raise ListFailed("The server does not say which tools it has.") from error
        return tuple(found)

    async def call(
        self,
        principal: Principal,
        tool: OfferedTool,
        arguments: dict[str, Any],
        timeout_s: float,
        *,
        part_of: str | None = None,
    ) -> CallOutcome:
        from mcp_bridge.protocol.envelope import param_headers
        from mcp_bridge.protocol.rpc import APPROVAL_NEEDED, RpcError

        params = {"name": tool.alias, "arguments": arguments}
        headers = param_headers(tool.input_schema, arguments)
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._ask(
                    principal, tool.server_label, "tools/call", params, headers, part_of
                )
        except RpcError as error:
            if error.code == APPROVAL_NEEDED:
                return await self._needs_approval(principal, tool, error)
            return RefusedCall(message=error.message, code=error.code)
        except TimeoutError:
            return RefusedCall(
                message="No answer in time; whether it was done is not known.",
                cost_pico=self._price_of(principal, tool.server_label),
            )
        cost_pico = self._price_of(principal, tool.server_label)
        if result.get("resultType") == "input_required":
            said = "The server asks for something that cannot be asked here."
            return RefusedCall(message=said, cost_pico=cost_pico)
        is_error = result.get("isError") is True
        return ToolResult(text=text_of(result), is_error=is_error, cost_pico=cost_pico)

    async def _needs_approval(
        self, principal: Principal, tool: OfferedTool, error: RpcError
    ) -> NeedsApproval | RefusedCall:
        """Return what a call waits for. Only our own queue asks: a server can claim such a thing of
        itself."""
        data = error.data if isinstance(error.data, dict) else {}
        found = await self._asked(principal, str(data.get("approvalId")))
        if found is None or (found.call.server, found.tool) != (tool.server_label, tool.name):
            return RefusedCall(message=error.message, code=error.code)
        return NeedsApproval(
            message=f"{error.message} ({found.id})",
            id=found.id,
            by_caller=found.call.decider == "caller",
        )

    async def _asked(self, principal: Principal, approval_id: str) -> Approval | None:
        """Return the approval if it is for a call of this caller."""
        found = await self._approvals_of(principal).look(principal.org_id, approval_id)
        if found is None or found.call.caller != self._caller_of(principal).principal:
            return None
        return found

    async def approval(self, principal: Principal, approval_id: str) -> ApprovalState:
        found = await self._asked(principal, approval_id)
        if found is None:
            return "unknown"
        match found.state:
            case "expired":
                return "unknown"
            case "pending" if found.call.decider == "caller":
                return "pending_caller"
        return found.state

    async def decide(self, principal: Principal, approval_id: str, approve: bool) -> ApprovalState:
        if await self.approval(principal, approval_id) == "pending_caller":
            by = self._caller_of(principal).principal
            queue = self._approvals_of(principal)
            # Where somebody else was faster it stands as they said.
            await queue.decide(principal.org_id, approval_id, approve=approve, by=by)
        return await self.approval(principal, approval_id)

    async def spend(self, principal: Principal, request_id: str) -> bool:
        return await self._once(principal.org_id, f"approval:{request_id}", SPENT_S)

    async def _ask(
        self,
        principal: Principal,
        server_label: str,
        method: str,
        params: dict[str, Any],
        headers: dict[str, str] | None = None,
        part_of: str | None = None,
    ) -> dict[str, Any]:
        """Raises: RpcError."""
        from mcp_bridge.protocol.envelope import Envelope
        from mcp_bridge.protocol.eras import MODERN
        from mcp_bridge.protocol.translation import to_modern_params

        endpoint = self._endpoint(principal, server_label)
        if endpoint is None:
            from mcp_bridge.protocol.rpc import INVALID_PARAMS, RpcError

            raise RpcError(INVALID_PARAMS, f"Unknown server: {server_label}")
        envelope = Envelope(version=MODERN, capabilities={}, info=self._info)
        asked = to_modern_params(params, envelope)
        message = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": asked}
        sent = [(name.lower(), value) for name, value in (headers or {}).items()]
        caller = msgspec.structs.replace(self._caller_of(principal), part_of=part_of)
        return await self._bridge.modern.answer(
            caller, endpoint, envelope, message, sent, drop_notification
        )

    async def _describe(self, principal: Principal, server_label: str) -> None:
        """Ask a server what it is. Raises: RpcError, if it does not answer."""
        from mcp_bridge.protocol.envelope import Envelope
        from mcp_bridge.protocol.eras import MODERN

        endpoint = self._endpoint(principal, server_label)
        if endpoint is not None:
            envelope = Envelope(version=MODERN, capabilities={}, info=self._info)
            caller = self._caller_of(principal)
            await self._bridge.modern.context(caller, endpoint, envelope).describe()

    def _endpoint(self, principal: Principal, server_label: str) -> Endpoint | None:
        """Return the endpoint of one server, whose tools are named by its label. None: there is no
        such server."""
        endpoint = self._bridge.endpoint(
            principal.org_id, user_id=principal.user_id, project_id=principal.project_id
        )
        if endpoint is None:
            return None
        found = tuple(each for each in endpoint.upstreams if each.name == server_label)
        if not found:
            return None
        return msgspec.structs.replace(endpoint, upstreams=found, keeps_names=False)


async def drop_notification(_message: Any) -> None:
    """Drop progress and logs."""


class ListedTool(msgspec.Struct, rename="camel"):
    """The fields of a tool that a model is shown; the rest of its JSON is skipped."""

    name: str
    description: Any = None
    input_schema: Any = None
    annotations: Any = None


def to_tool(server_label: str, item: Any) -> OfferedTool:
    """Read a tool. `item`: of a page of a list, JSON or what was read of it."""
    if isinstance(item, msgspec.Raw):
        listed = msgspec.json.decode(item, type=ListedTool)
    else:
        listed = msgspec.convert(item, ListedTool)
    schema, annotations, description = listed.input_schema, listed.annotations, listed.description
    return OfferedTool(
        server_label=server_label,
        name=listed.name.removeprefix(f"{server_label}__"),
        description=description if isinstance(description, str) else None,
        input_schema=schema if isinstance(schema, dict) else {},
        annotations=annotations if isinstance(annotations, dict) else {},
    )


def text_of(result: dict[str, Any]) -> str:
    """Return what a model can read of a result, without hidden characters."""
    from mcp_bridge.text_safety.hidden_text import stripped

    content = result.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part_text(part) for part in parts if isinstance(part, dict)]
    if not texts and "structuredContent" in result:
        texts.append(msgspec.json.encode(result["structuredContent"]).decode())
    return stripped("\n".join(texts))


def part_text(part: dict[str, Any]) -> str:
    resource = part.get("resource")
    for holder in (part, resource if isinstance(resource, dict) else {}):
        if isinstance(holder.get("text"), str):
            return str(holder["text"])
    if part.get("type") == "resource_link":
        return str(part.get("uri", ""))
    return OMITTED.format(kind=part.get("type", "content"))
