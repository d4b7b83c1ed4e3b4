"""What the tools of a request ask of our engine's model: which it is shown, and which of them, if
any, it must call.

Above: `from_openai`; `responses_tools`, which refuses in the same words. Below: the shapes in
`openai_tools`. How a call looks in a model's output is the model's own affair
(`engine.output_parser`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.fleet.errors import BadField
from gateway.wire.openai import ChatCompletionRequest
from gateway.wire.openai_tools import AllowedToolChoice, FunctionTool, NamedTool
from gateway.wire.request import Tool, ToolUse


def tool_use(request: ChatCompletionRequest) -> ToolUse | None:
    """None: the model is shown none. Raises BadField."""
    tools, choice = request.tools, request.tool_choice
    if not tools:
        refuse_without_tools(request)
        return None
    by_name = named_once(tools)
    if choice == "none":
        return None
    forced: tuple[str, ...] = ()
    match choice:
        case "required":
            forced = tuple(by_name)
        case NamedTool():
            forced = (known(choice, by_name, "tool_choice.function.name"),)
        case AllowedToolChoice():
            by_name = allowed(choice, by_name)
            forced = tuple(by_name) if choice.allowed_tools.mode == "required" else ()
    parallel = request.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return ToolUse(
        tools=tuple(by_name.values()),
        forced=forced,
        parallel=parallel,
        num_chars=sum(text_size(tool) for tool in by_name.values()),
    )


def refuse_without_tools(request: ChatCompletionRequest) -> None:
    """What says how tools are called, where there are none."""
    if request.tool_choice not in (None, "none", "auto"):
        raise only_with_tools("tool_choice")
    if request.parallel_tool_calls is not None and request.tools is None:
        raise only_with_tools("parallel_tool_calls")


def only_with_tools(param: str) -> BadField:
    return BadField(f"'{param}' is only allowed when 'tools' are specified.", param=param)


def named_twice(param: str) -> BadField:
    return BadField(f"Invalid value for '{param}': two tools have it.", param=param)


def unnamed(param: str) -> BadField:
    return BadField(f"Invalid value for '{param}': no tool has that name.", param=param)


def check_is_object(parameters: dict[str, Any] | None, param: str) -> None:
    """Raises BadField."""
    if parameters and parameters.get("type", "object") != "object":
        raise BadField(
            f"Invalid value for '{param}': arguments are an object, "
            "so the schema's type has to be 'object'.",
            param=param,
        )


def named_once(tools: list[FunctionTool]) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for index, each in enumerate(tools):
        function = each.function
        if function.name in found:
            raise named_twice(f"tools[{index}].function.name")
        param = f"tools[{index}].function.parameters"
        check_is_object(function.parameters, param)
        found[function.name] = Tool(
            name=function.name,
            shown=shown(each),
            parameters=function.parameters,
            strict=bool(function.strict),
            param=param,
        )
    return found


def shown(tool: FunctionTool) -> dict[str, Any]:
    """As chat templates expect it: what the client wrote, without what it left out and without
    `strict`, which no model was trained on."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    return {"type": "function", "function": function}


def known(choice: NamedTool, by_name: dict[str, Tool], param: str) -> str:
    name = choice.function.name
    if name not in by_name:
        raise unnamed(param)
    return name


def allowed(choice: AllowedToolChoice, by_name: dict[str, Tool]) -> dict[str, Tool]:
    """As the tools are ordered, so that the order in which they are allowed changes no prompt."""
    param = "tool_choice.allowed_tools.tools[{}].function.name"
    names = {
        known(each, by_name, param.format(index))
        for index, each in enumerate(choice.allowed_tools.tools)
    }
    return {name: tool for name, tool in by_name.items() if name in names}


def text_size(tool: Tool) -> int:
    """Characters of what the model is shown of it, about."""
    try:
        return len(msgspec.json.encode(tool.shown))
    except RecursionError as error:  # decoding it had a few frames more
        message = f"Invalid value for '{tool.param}': nested too deep."
        raise BadField(message, param=tool.param) from error
