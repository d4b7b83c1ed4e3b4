"""Describes one round of a tool loop: what the model wrote, what it called, what came of it.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from billing.pricing.rating import RatedLine, RatedUsage
from gateway.generate_request import GenerateRequest, Tool, ToolUse
from gateway.generation_events import MeteredUsage
from gateway.request_errors import BadField
from gateway.tools.toolbox import CallOutcome, NeedsApproval, ToolResult
from gateway.wire.constraints.to_tool_use import offered
from gateway.wire.openai_responses.items import (
    McpCall,
    McpExecutionError,
    McpProtocolError,
)
from gateway.wire.openai_responses.mcp_history import shown
from gateway.wire.openai_responses.mcp_tools import McpChoice
from gateway.wire.openai_responses.tool_rounds import ModelCall, OfferedTool, Round, told_apart
from mcp_bridge.protocol.rpc import APPROVAL_NEEDED, INVALID_PARAMS

NO_SUCH_TOOL = INVALID_PARAMS
"""As of a tool that a server does not know."""
CUT_OFF = "\n[cut off: the result is longer]"


def to_call(
    made: ModelCall,
    outcome: CallOutcome,
    max_bytes: int,
    request_id: str | None = None,
    *,
    waits: bool = False,
) -> McpCall:
    """Make the wire form of a call. `request_id`: of the request for approval that it answers, or
    stands for while it `waits`."""
    label, name = told_apart(made.alias)
    output: str | None = None
    error: McpExecutionError | McpProtocolError | None = None
    match outcome:
        case ToolResult(is_error=False):
            output = bounded(outcome.text, max_bytes)
        case ToolResult():
            text = bounded(outcome.text, max_bytes)
            error = McpExecutionError([{"type": "text", "text": text}])
        case NeedsApproval():
            error = McpProtocolError(code=APPROVAL_NEEDED, message=outcome.message)
        case _:
            error = McpProtocolError(code=outcome.code, message=bounded(outcome.message, max_bytes))
    return McpCall(
        id=made.id,
        server_label=label,
        name=name,
        arguments=made.text,
        output=output,
        error=error,
        status="incomplete" if waits else "completed" if error is None else "failed",
        approval_request_id=request_id,
    )


def bounded(text: str, max_bytes: int) -> str:
    raw = text.encode(errors="replace")
    if len(raw) <= max_bytes:
        return text
    return raw[:max_bytes].decode(errors="ignore") + CUT_OFF


def messages_of(round_: Round, called: Mapping[str, McpCall]) -> list[dict[str, Any]]:
    """Return messages for a model's template: its own, and one for each result, in order."""
    message: dict[str, Any] = {"role": "assistant", "content": round_.text}
    if round_.reasoning:
        message["reasoning_content"] = round_.reasoning
    message["tool_calls"] = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.alias, "arguments": call.text or "{}"},
        }
        for call in round_.calls
    ]
    results = [
        {
            "role": "tool",
            "content": shown(called[call.id]),
            "tool_call_id": call.id,
            "name": call.alias,
        }
        for call in round_.calls
    ]
    return [message, *results]


def tools_of(
    own: ToolUse | None, found: Iterable[OfferedTool], choice: Any, parallel: bool
) -> ToolUse | None:
    """Return the request's own functions, followed by what servers offer. Raises: BadField."""
    found = tuple(found)
    if choice == "none" or not (choice is None or isinstance(choice, str | McpChoice)):
        return own  # none at all; or only what is named, which is a function
    picked = chosen(choice, found) if isinstance(choice, McpChoice) else ()
    by_name = {tool.name: tool for tool in (own.tools if own is not None else ())}
    for each in found:
        if each.alias in by_name:
            raise BadField(
                f"Invalid value for 'tools': the function '{each.alias}' has the name of a tool of"
                f" the server '{each.server_label}'.",
                param="tools",
                detail="A function has the name of a server's tool.",
            )
        by_name[each.alias] = to_tool(each)
    if not by_name:
        return own
    forced = tuple(by_name) if choice == "required" else ()
    if isinstance(choice, McpChoice):
        forced, parallel = picked, parallel and choice.name is None
    return offered(by_name, forced, parallel=parallel)


def chosen(choice: McpChoice, found: Iterable[OfferedTool]) -> tuple[str, ...]:
    """Return the chosen tools by the names that the model knows. Raises: BadField, if there is
    none."""
    names = tuple(each.alias for each in found if choice.takes(each.server_label, each))
    if names:
        return names
    if choice.name is None:
        param, why = "tool_choice.server_label", "the server offers no tool that may be called"
    else:
        param, why = "tool_choice.name", "no tool that may be called has that name"
    raise BadField(f"Invalid value for '{param}': {why}.", param=param)


def to_tool(found: OfferedTool) -> Tool:
    function: dict[str, Any] = {"name": found.alias}
    if found.description is not None:
        function["description"] = found.description
    function["parameters"] = found.input_schema
    return Tool(
        name=found.alias,
        shown={"type": "function", "function": function},
        parameters=found.input_schema,
    )


def with_prompt(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    assert request.prompt is not None
    prompt = msgspec.structs.replace(request.prompt, **changes)
    return msgspec.structs.replace(request, prompt=prompt)


def total(one: MeteredUsage, other: MeteredUsage) -> MeteredUsage:
    """Add up the usage of rounds."""
    names = MeteredUsage.__struct_fields__
    sums = {name: getattr(one, name) + getattr(other, name) for name in names}
    return MeteredUsage(**(sums | {"estimated": one.estimated or other.estimated}))


def fold(one: RatedUsage | None, other: RatedUsage | None) -> RatedUsage | None:
    """Add up what rounds cost: a line for each component and price."""
    if one is None or other is None:
        return one or other
    lines: dict[tuple[str, str], RatedLine] = {}
    for line in (*one.lines, *other.lines):
        key = (line.component, line.price_id)
        before = lines.get(key)
        if before is not None:
            line = msgspec.structs.replace(
                before,
                quantity=before.quantity + line.quantity,
                amount_pico=before.amount_pico + line.amount_pico,
            )
        lines[key] = line
    return RatedUsage(
        lines=tuple(lines.values()),
        amount_pico=one.amount_pico + other.amount_pico,
        unpriced=tuple(dict.fromkeys((*one.unpriced, *other.unpriced))),
    )
