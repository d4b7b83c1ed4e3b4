"""The tools of OpenAI's chat completions, as structs: which there are, which the model may or must
call, and the calls that it made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from gateway.wire.constraints.format_structs import StrictStruct
from gateway.wire.shared.cache_control import CacheControl

MAX_TOOLS = 128
"""OpenAI's."""
MAX_TOOL_CALLS = 128
"""The bound on the calls of one message."""
MAX_NAME_CHARS = 128
"""OpenAI allows 64; names of MCP tools are longer."""

ToolName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class FunctionDefinition(StrictStruct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema. Absent: it takes none."""
    strict: bool | None = None
    """Arguments are kept to the schema. Where a call is forced they are in any case."""


class FunctionTool(StrictStruct):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl | None = None


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


class NamedFunction(StrictStruct):
    name: ToolName


class NamedTool(StrictStruct, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(StrictStruct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(StrictStruct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice


class CalledFunction(StrictStruct):
    name: ToolName
    arguments: str
    """As the model wrote them: JSON, if it did well."""
    parsed_arguments: Any = None
    """A client library's parsed copy of the arguments; ignored."""


class ToolCall(StrictStruct):
    """A call of an earlier answer, as the client sends it back."""

    id: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None
    """A stream's; not read here."""


ToolCalls = Annotated[list[ToolCall], Meta(min_length=1, max_length=MAX_TOOL_CALLS)]
