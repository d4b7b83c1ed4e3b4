"""Decides which tools of a request the model is shown: those that its conversation has come to.

A tool with `defer_loading` is left out until a result refers to it, a turn of the system adds it
or `tool_choice` names it. All that are shown stand together in the prompt, in the order of the
request: templates have no other place for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gateway.generate_request import PromptPlace, Tool
from gateway.wire.anthropic.messages import (
    Conversation,
    DefinedTool,
    OneTool,
    ReferredTool,
    SystemTurn,
    ToolAddition,
    ToolReferenceBlock,
    ToolRemoval,
    ToolResultBlock,
    UserTurn,
)
from gateway.wire.constraints.to_tool_use import named_once
from gateway.wire.shared.cache_control import Block, marks_of

SCHEMA = "input_schema"


def offered_tools(request: Conversation) -> dict[str, Tool]:
    """Return the tools that the model is shown, by name. Raises BadField."""
    declared = request.tools or []
    found = named_once(declared, "tools[{}]", schema=SCHEMA)
    shown = {tool.name for tool in declared if not tool.defer_loading}
    if isinstance(request.tool_choice, OneTool):
        shown.add(request.tool_choice.name)
    for path, change in changes_of(request):
        match change:
            case ToolReferenceBlock():
                shown.add(change.tool_name)
            case ToolRemoval():
                shown.discard(change.tool.name)
            case ToolAddition(tool=DefinedTool(definition=tool)):
                found |= named_once([tool], f"{path}.tool.definition", schema=SCHEMA)
                shown.add(tool.name)
            case ToolAddition(tool=ReferredTool(name=name)):
                shown.add(name)
    return {name: tool for name, tool in found.items() if name in shown}


def changes_of(
    request: Conversation,
) -> Iterator[tuple[str, ToolReferenceBlock | ToolAddition | ToolRemoval]]:
    """Return what loads, adds or removes a tool, in its order, each with its path."""
    for number, message in enumerate(request.messages):
        if not isinstance(message, SystemTurn | UserTurn) or isinstance(message.content, str):
            continue
        for index, block in enumerate(message.content):
            path = f"messages[{number}].content[{index}]"
            if isinstance(block, ToolAddition | ToolRemoval):
                yield path, block
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for part in block.content:
                    if isinstance(part, ToolReferenceBlock):
                        yield path, part


def tool_blocks(request: Conversation, shown: Collection[str]) -> Iterator[Block]:
    """Return the cache blocks of the declared tools that are shown."""
    num_tools = 0
    for index, tool in enumerate(request.tools or ()):
        if tool.name in shown:
            num_tools += 1
            place = PromptPlace(num_tools=num_tools)
            yield Block(place, marks_of(tool, f"tools[{index}]"))
