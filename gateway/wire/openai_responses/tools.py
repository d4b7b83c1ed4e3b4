"""Checks the tools of a `Response`: which ones the model is shown, and which of them it must
call."""

from __future__ import annotations

from gateway.generate_request import ToolUse
from gateway.wire.constraints.to_tool_use import (
    allowed,
    known,
    named_once,
    offered,
    only_with_tools,
)
from gateway.wire.openai_responses.mcp_tools import McpChoice, without_mcp
from gateway.wire.openai_responses.request import (
    FunctionChoice,
    ResponseAllowedTools,
    ResponseRequest,
)


def tool_use(request: ResponseRequest) -> ToolUse | None:
    """Return the tools that the model is shown; None: it is shown none. Raises BadField."""
    choice = request.tool_choice
    functions = without_mcp(request.tools)
    if isinstance(choice, McpChoice):
        choice.check(request.tools)
    if not functions and request.tools:
        return None
    if not functions:
        if choice not in (None, "none", "auto"):
            raise only_with_tools("tool_choice")
        return None
    by_name = named_once(functions, "tools[{}]")
    if choice == "none":
        return None
    forced: tuple[str, ...] = ()
    match choice:
        case "required":
            forced = tuple(by_name)
        case FunctionChoice():
            forced = (known(choice.name, by_name, "tool_choice.name"),)
        case ResponseAllowedTools():
            names = (each.name for each in choice.tools)
            by_name = allowed(names, by_name, "tool_choice.tools[{}].name")
            forced = tuple(by_name) if choice.mode == "required" else ()
    parallel = request.parallel_tool_calls is not False and not isinstance(choice, FunctionChoice)
    return offered(by_name, forced, parallel=parallel)
