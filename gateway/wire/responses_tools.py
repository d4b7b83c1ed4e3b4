"""What the tools of a `Response` ask of a model: which it is shown, and which of them, if any, it
must call.

Above: `from_responses`. Below: the shapes in `responses`; `tools`, which does it for chat.
"""

from __future__ import annotations

from typing import Any

from gateway.wire.request import Tool, ToolUse
from gateway.wire.responses import AllowedTools, FunctionChoice, FunctionTool, ResponseRequest
from gateway.wire.tools import check_is_object, named_twice, only_with_tools, text_size, unnamed


def tool_use(request: ResponseRequest) -> ToolUse | None:
    """None: the model is shown none. Raises BadField."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise only_with_tools("tool_choice")
        return None
    by_name = named_once(request.tools)
    if choice == "none":
        return None
    forced: tuple[str, ...] = ()
    match choice:
        case "required":
            forced = tuple(by_name)
        case FunctionChoice():
            forced = (known(choice.name, by_name, "tool_choice.name"),)
        case AllowedTools():
            by_name = allowed(choice, by_name)
            forced = tuple(by_name) if choice.mode == "required" else ()
    parallel = request.parallel_tool_calls is not False and not isinstance(choice, FunctionChoice)
    return ToolUse(
        tools=tuple(by_name.values()),
        forced=forced,
        parallel=parallel,
        num_chars=sum(text_size(tool) for tool in by_name.values()),
    )


def named_once(tools: list[FunctionTool]) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        if tool.name in found:
            raise named_twice(f"tools[{index}].name")
        param = f"tools[{index}].parameters"
        check_is_object(tool.parameters, param)
        found[tool.name] = Tool(
            name=tool.name,
            shown=shown(tool),
            parameters=tool.parameters,
            strict=bool(tool.strict),
            param=param,
        )
    return found


def shown(tool: FunctionTool) -> dict[str, Any]:
    """As a chat's template expects it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def known(name: str, by_name: dict[str, Tool], param: str) -> str:
    if name not in by_name:
        raise unnamed(param)
    return name


def allowed(choice: AllowedTools, by_name: dict[str, Tool]) -> dict[str, Tool]:
    """As the tools are ordered, so that the order in which they are allowed changes no prompt."""
    param = "tool_choice.tools[{}].name"
    names = {
        known(each.name, by_name, param.format(index)) for index, each in enumerate(choice.tools)
    }
    return {name: tool for name, tool in by_name.items() if name in names}
