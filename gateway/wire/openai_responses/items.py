"""The items of OpenAI's Responses API, as structs: the questions, answers and calls of a
conversation.

What a client sends may leave out what we know (`In...`); what we keep and answer has all of it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.text.output_parser.grammars.forced_calls import TEXT_ARGUMENT
from gateway.generation_events import TokenInfo
from gateway.wire.constraints.format_structs import StrictStruct
from gateway.wire.constraints.tool_structs import ToolName
from gateway.wire.openai.chat import Unsupported
from gateway.wire.openai_responses.client_tools import (
    MAX_FUNCTIONS,
    ClientTool,
    HostedTool,
    NamespaceTool,
    alias_of,
)
from gateway.wire.openai_responses.mcp_tools import Label

MAX_ID_CHARS = 128
MAX_ITEMS = 10_000
"""The bound on items of one request and all that it continues."""
MAX_ITEM_PARTS = 10_000
MAX_LISTED = 10_000
"""Tools of one list."""

ItemId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Role = Literal["user", "assistant", "system", "developer"]
Phase = Literal["commentary", "final_answer"]
McpStatus = Literal["in_progress", "completed", "incomplete", "calling", "failed"]


# ---- as a client sends them


class InText(StrictStruct, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: Unsupported = None


class InOutputText(StrictStruct, tag_field="type", tag="output_text"):
    """A text of an earlier answer, as the client sends it back."""

    text: str
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None
    logprobs: Any = None
    parsed: Any = None
    """A client library's parsed copy; ignored."""


class InMessage(StrictStruct, tag_field="type", tag="message"):
    role: Role
    content: str | Annotated[list[InText | InOutputText], Meta(max_length=MAX_ITEM_PARTS)]
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Phase | None = None


class InCall(StrictStruct, tag_field="type", tag="function_call"):
    call_id: ItemId
    name: ToolName
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None
    namespace: ToolName | None = None
    """The group that the request has its tool in."""
    caller: Unsupported = None
    in_background: Unsupported = msgspec.field(default=None, name="async")
    parsed_arguments: Any = None


class InCallOutput(StrictStruct, tag_field="type", tag="function_call_output"):
    call_id: ItemId
    output: str | Annotated[list[InText], Meta(max_length=MAX_ITEM_PARTS)]
    id: ItemId | None = None
    status: ItemStatus | None = None
    name: str | None = None
    namespace: ToolName | None = None
    caller: Unsupported = None


class InCustomCall(StrictStruct, tag_field="type", tag="custom_tool_call"):
    """A call of a tool that takes a text."""

    call_id: ItemId
    name: ToolName
    input: str
    id: ItemId | None = None
    status: ItemStatus | None = None
    namespace: ToolName | None = None
    caller: Unsupported = None
    in_background: Unsupported = msgspec.field(default=None, name="async")


class InCustomOutput(StrictStruct, tag_field="type", tag="custom_tool_call_output"):
    call_id: ItemId
    output: str | Annotated[list[InText], Meta(max_length=MAX_ITEM_PARTS)]
    id: ItemId | None = None
    status: ItemStatus | None = None
    name: str | None = None
    caller: Unsupported = None


class ShellAction(StrictStruct, tag_field="type", tag="exec"):
    command: Annotated[list[str], Meta(max_length=MAX_ITEM_PARTS)]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class InShellCall(StrictStruct, tag_field="type", tag="local_shell_call"):
    """A command that the client ran for a model."""

    action: ShellAction
    call_id: ItemId
    id: ItemId | None = None
    status: ItemStatus | None = None


class InShellOutput(StrictStruct, tag_field="type", tag="local_shell_call_output"):
    output: str
    id: ItemId | None = None
    """The call's, where `call_id` is absent."""
    call_id: ItemId | None = None
    status: ItemStatus | None = None


class InCompaction(StrictStruct, tag_field="type", tag="compaction"):
    """A summary that stands in place of a conversation: `/v1/responses/compact` made it."""

    encrypted_content: str
    id: ItemId | None = None
    created_by: str | None = None


class InAdditionalTools(StrictStruct, tag_field="type", tag="additional_tools"):
    """Tools of this request, beside its `tools`."""

    tools: Annotated[list[ClientTool | NamespaceTool | HostedTool], Meta(max_length=MAX_FUNCTIONS)]
    id: ItemId | None = None
    role: Role | None = None


class SummaryText(StrictStruct, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(StrictStruct, tag_field="type", tag="reasoning_text"):
    text: str


class InReasoning(StrictStruct, tag_field="type", tag="reasoning"):
    summary: list[SummaryText]
    id: ItemId | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    """The text that it has, sealed by an earlier answer."""
    status: ItemStatus | None = None


class ItemReference(StrictStruct, tag_field="type", tag="item_reference"):
    """A reference to a stored item by its id."""

    id: ItemId


class McpListedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as its MCP server describes it."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None = None


class McpExecutionError(
    msgspec.Struct, frozen=True, tag_field="type", tag="mcp_tool_execution_error"
):
    """The tool says that it failed, or it was not called."""

    content: Any


class McpProtocolError(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="mcp_protocol_error"
):
    code: int
    message: str


class McpHttpError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="http_error"):
    """An error in an answer that was made elsewhere."""

    code: int
    message: str


McpError = McpExecutionError | McpProtocolError | McpHttpError


class InMcpListTools(StrictStruct, tag_field="type", tag="mcp_list_tools"):
    """A list of tools in an earlier answer; the server is asked again which tools there are now."""

    id: ItemId
    server_label: Label
    tools: Annotated[list[McpListedTool], Meta(max_length=MAX_LISTED)]
    error: str | None = None


class InMcpCall(StrictStruct, tag_field="type", tag="mcp_call"):
    id: ItemId
    server_label: Label
    name: ToolName
    arguments: str
    output: str | None = None
    error: McpError | None = None
    status: McpStatus | None = None
    approval_request_id: ItemId | None = None


class InMcpApprovalRequest(StrictStruct, tag_field="type", tag="mcp_approval_request"):
    id: ItemId
    server_label: Label
    name: ToolName
    arguments: str


class InMcpApprovalResponse(StrictStruct, tag_field="type", tag="mcp_approval_response"):
    approval_request_id: ItemId
    approve: bool
    id: ItemId | None = None
    reason: str | None = None


InItem = (
    InMessage
    | InCall
    | InCallOutput
    | InCustomCall
    | InCustomOutput
    | InShellCall
    | InShellOutput
    | InCompaction
    | InAdditionalTools
    | InReasoning
    | ItemReference
    | InMcpListTools
    | InMcpCall
    | InMcpApprovalRequest
    | InMcpApprovalResponse
)


def with_type(item: Any) -> Any:
    """Add the type that OpenAI lets a message leave out, or a reference that is nothing but its
    id."""
    if isinstance(item, dict) and item.get("type") is None:
        kind = "item_reference" if item.keys() <= {"id", "type"} else "message"
        return {**item, "type": kind}
    return item


# ---- as they are kept and answered


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[None, ...] = ()
    logprobs: tuple[TokenInfo, ...] = ()


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Role
    content: tuple[Text | OutputText, ...]
    phase: Phase | UnsetType = UNSET


class FunctionCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET

    @property
    def alias(self) -> str:
        """Return the name under which the model knows its tool."""
        return alias_of(self.name, self.namespace)


class CallOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    id: str
    status: ItemStatus
    call_id: str
    output: str | tuple[Text, ...]


class CustomCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """A call of a tool that takes a text."""

    id: str
    status: ItemStatus | UnsetType = UNSET
    """As a client sent it: OpenAI's answers have none."""
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET

    @property
    def alias(self) -> str:
        return alias_of(self.name, self.namespace)

    @property
    def arguments(self) -> str:
        """Return the arguments of the function that the model knows it as."""
        return json.dumps({TEXT_ARGUMENT: self.input}, ensure_ascii=False)


class CustomOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"
):
    id: str
    status: ItemStatus
    call_id: str
    output: str | tuple[Text, ...]


class ShellCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="local_shell_call"
):
    id: str
    status: ItemStatus
    call_id: str
    action: ShellAction

    alias = "local_shell"

    @property
    def arguments(self) -> str:
        folder = self.action.working_directory
        where = {} if folder is None else {"working_directory": folder}
        return json.dumps({"command": self.action.command, **where}, ensure_ascii=False)


class ShellOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="local_shell_call_output"
):
    id: str
    status: ItemStatus
    output: str
    call_id: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning, whole; nobody writes a summary of it here."""

    id: str
    status: ItemStatus
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] = ()
    encrypted_content: str | UnsetType = UNSET
    """The same sealed, where it was asked for: a client that keeps no reasoning sends it back."""


class McpListTools(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="mcp_list_tools"
):
    """The tools of a server that the model could call. `error`: why it could call none."""

    id: str
    server_label: str
    tools: tuple[McpListedTool, ...]
    error: str | None = None


class McpCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="mcp_call"):
    id: str
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: McpError | None = None
    status: McpStatus
    approval_request_id: str | None = None

    @property
    def alias(self) -> str:
        """Return the name under which the model knows the tool, or made it up."""
        return f"{self.server_label}__{self.name}" if self.server_label else self.name


class McpApprovalRequest(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="mcp_approval_request"
):
    """A call that waits for somebody's yes."""

    id: str
    server_label: str
    name: str
    arguments: str

    @property
    def alias(self) -> str:
        return f"{self.server_label}__{self.name}"


class McpApprovalResponse(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="mcp_approval_response"
):
    id: str
    approval_request_id: str
    approve: bool
    reason: str | None = None


class CompactionItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="compaction"):
    """A summary of what came before, sealed."""

    id: str
    encrypted_content: str


McpItem = McpListTools | McpCall | McpApprovalRequest | McpApprovalResponse
ClientCall = FunctionCall | CustomCall | ShellCall
"""The calls that the client answers."""
ClientOutput = CallOutput | CustomOutput | ShellOutput
Item = Message | ClientCall | ClientOutput | ReasoningItem | McpItem
PREFIXES: dict[type, str] = {
    Message: "msg_",
    FunctionCall: "fc_",
    CallOutput: "fco_",
    CustomCall: "ctc_",
    CustomOutput: "ctco_",
    ShellCall: "lsh_",
    ShellOutput: "lsho_",
    ReasoningItem: "rs_",
    CompactionItem: "cmp_",
    McpListTools: "mcpl_",
    McpCall: "mcp_",
    McpApprovalRequest: "mcpr_",
    McpApprovalResponse: "mcprr_",
}
"""The prefixes of ids, by item type."""
