"""The `mcp` tool of OpenAI's requests, as a struct, and what it says of each tool of a server.

Only servers that this gateway knows are named, by their label: what would lead elsewhere is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta

from gateway.request_errors import BadField
from gateway.wire.constraints.format_structs import StrictStruct
from gateway.wire.openai.chat import Unsupported

MAX_LABEL_CHARS = 64
MAX_NAMED = 512
"""Tools that one field names."""
MAX_NAME_CHARS = 128
Label = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Names = Annotated[list[Name], Meta(max_length=MAX_NAMED)]


class AnnotatedTool(Protocol):
    """A tool of a server, as far as a request says something of it."""

    @property
    def name(self) -> str: ...

    @property
    def annotations(self) -> Mapping[str, Any]: ...


class McpToolFilter(StrictStruct):
    tool_names: Names | None = None
    read_only: bool | None = None
    """As the server says of its tools by `readOnlyHint`."""

    def takes(self, tool: AnnotatedTool) -> bool:
        if self.tool_names is not None and tool.name not in self.tool_names:
            return False
        return self.read_only in (None, tool.annotations.get("readOnlyHint") is True)


class McpApprovalFilter(StrictStruct):
    always: McpToolFilter | None = None
    never: McpToolFilter | None = None
    """The tools that need no approval; all others do."""


class McpTool(StrictStruct, tag_field="type", tag="mcp"):
    server_label: Label
    """The label of a server that this gateway knows."""
    allowed_tools: Names | McpToolFilter | None = None
    require_approval: Literal["always", "never"] | McpApprovalFilter | None = None
    """null: always, as OpenAI's."""
    server_description: str | None = None
    allowed_callers: Unsupported = None
    authorization: Unsupported = None
    cache_control: Unsupported = None
    connector_id: Unsupported = None
    defer_loading: Unsupported = None
    headers: Unsupported = None
    server_url: Unsupported = None
    tunnel_id: Unsupported = None

    def allows(self, tool: AnnotatedTool) -> bool:
        match self.allowed_tools:
            case None:
                return True
            case McpToolFilter() as wanted:
                return wanted.takes(tool)
            case names:
                return tool.name in names

    def asks(self, tool: AnnotatedTool) -> bool:
        """Return whether somebody has to approve a call of it: yes, unless the request says no."""
        match self.require_approval:
            case "never":
                return False
            case McpApprovalFilter(always=always, never=never) if never is not None:
                return (always is not None and always.takes(tool)) or not never.takes(tool)
        return True


class McpChoice(StrictStruct, tag_field="type", tag="mcp"):
    """A `tool_choice`: the model calls a tool of this server, in the first round."""

    server_label: Label
    """The label of a server among `tools`."""
    name: Name | None = None
    """The tool's name at its server; null: any that is allowed."""

    def takes(self, server_label: str, tool: AnnotatedTool) -> bool:
        return server_label == self.server_label and self.name in (None, tool.name)

    def check(self, tools: Iterable[Any] | None) -> None:
        """Raises BadField."""
        if all(each.server_label != self.server_label for _, each in only_mcp(tools)):
            param = "tool_choice.server_label"
            raise BadField(
                f"Invalid value for '{param}': no tool in 'tools' is of that server.", param=param
            )


def labelled_once(tools: Iterable[tuple[int, McpTool]]) -> dict[str, McpTool]:
    """Return the servers by label, each with its index in `tools` of the request. Raises
    BadField."""
    found: dict[str, McpTool] = {}
    for index, tool in tools:
        if tool.server_label in found:
            param = f"tools[{index}].server_label"
            raise BadField(f"Invalid value for '{param}': two tools have it.", param=param)
        found[tool.server_label] = tool
    return found


def only_mcp(tools: Iterable[Any] | None) -> list[tuple[int, McpTool]]:
    """Yield the `mcp` tools with their indices."""
    return [(index, each) for index, each in enumerate(tools or ()) if isinstance(each, McpTool)]


def without_mcp(tools: Iterable[Any] | None) -> list[Any]:
    return [each for each in tools or () if not isinstance(each, McpTool)]
