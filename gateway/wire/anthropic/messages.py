"""Anthropic's messages as structs: what is honoured of a request.

Pure shapes: no conversion, no HTTP. As in `openai` a field that is absent here is unknown, and one
of type `None` is known and cannot be honoured. The limits are Anthropic's, or where it has none
those of `openai`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.wire.constraints.format_structs import StrictStruct
from gateway.wire.constraints.tool_structs import MAX_NAME_CHARS, ToolName
from gateway.wire.openai.chat import (
    MAX_MESSAGES,
    PositiveInt,
    Probability,
    StopStrings,
    Unsupported,
)
from gateway.wire.shared.cache_control import CacheControl
from gateway.wire.shared.refusals import MAX_INT64

MIN_BUDGET_TOKENS = 1024
MAX_TOOLS = 1024
"""Agents bring those of many servers."""
MAX_CLEARED_TOOLS = 1024
"""Names in one list of an edit of the context."""
MAX_SCOPE_CHARS = 64
ToolNames = Annotated[list[ToolName], Meta(max_length=MAX_CLEARED_TOOLS)]
NotNegative = Annotated[int, Meta(ge=0, le=MAX_INT64)]
ThinkingDisplay = Literal["summarized", "omitted"]
CallId = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]

SERVER_TOOLS = frozenset(
    {
        *("web_search_20250305", "web_search_20260209", "web_search_20260318"),
        *("web_fetch_20250910", "web_fetch_20260209", "web_fetch_20260309", "web_fetch_20260318"),
        *("code_execution_20250522", "code_execution_20250825"),
        *("code_execution_20260120", "code_execution_20260521"),
        *("tool_search_tool_bm25_20251119", "tool_search_tool_regex_20251119"),
        *("tool_search_tool_bm25", "tool_search_tool_regex", "mcp_toolset"),
    }
)
THEIR_TOOLS = frozenset(
    {
        *("bash_20241022", "bash_20250124", "memory_20250818"),
        *("text_editor_20241022", "text_editor_20250124"),
        *("text_editor_20250429", "text_editor_20250728"),
        *("computer_20241022", "computer_20250124", "computer_20251124"),
        *("computer_toolset_20260801", "browser_toolset_20260801"),
    }
)
"""Run by the client, and known by their names to the vendor's own models alone."""
MEDIA = frozenset({"image", "document", "search_result"})
SERVER_BLOCKS = frozenset(
    {
        *("server_tool_use", "container_upload", "tool_search_tool_result"),
        *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
        *("mcp_tool_use", "mcp_tool_result", "compaction"),
    }
)
NOT_YET = {
    "messages[].content[].type": MEDIA | SERVER_BLOCKS,
    "messages[].content[].content[].type": MEDIA | {"browser_state"},
    "tools[].type": SERVER_TOOLS | THEIR_TOOLS,
    "tools[].allowed_callers[]": frozenset(
        {"code_execution_20250825", "code_execution_20260120", "code_execution_20260521"}
    ),
    "thinking.type": frozenset({"between_tools"}),
    "speed": frozenset({"fast"}),
    "context_management.edits[].type": frozenset({"compact_20260112"}),
}
"""Values that Anthropic knows and that cannot be honoured here: refused as such."""


# ---- what a message holds


class ScopedCacheControl(CacheControl):
    scope: Annotated[str, Meta(max_length=MAX_SCOPE_CHARS)] | None = None
    """The circle in which the vendor shares a kept prompt; here it stays within the organization.
    """


class TextBlock(StrictStruct, tag_field="type", tag="text"):
    text: str
    cache_control: ScopedCacheControl | None = None
    citations: Annotated[list[None], Meta(max_length=0)] | None = None
    """The citations of an earlier answer, which has none."""


class ThinkingBlock(StrictStruct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class RedactedThinkingBlock(StrictStruct, tag_field="type", tag="redacted_thinking"):
    data: str


class DirectCaller(StrictStruct, tag_field="type", tag="direct"):
    pass


class ToolUseBlock(StrictStruct, tag_field="type", tag="tool_use"):
    id: CallId
    name: ToolName
    input: dict[str, Any]
    cache_control: ScopedCacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: Unsupported = None


class ToolReferenceBlock(StrictStruct, tag_field="type", tag="tool_reference"):
    """A tool that a search of the client's has found: from here on the model is shown it."""

    tool_name: ToolName
    cache_control: ScopedCacheControl | None = None

    @property
    def text(self) -> str:
        """Return what the model reads of it, where it called the search."""
        return f"Loaded the tool {self.tool_name}."


class ToolResultBlock(StrictStruct, tag_field="type", tag="tool_result"):
    tool_use_id: CallId
    content: str | list[TextBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None
    cache_control: ScopedCacheControl | None = None
    toolset_name: Unsupported = None


class UserTurn(StrictStruct, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]


class AssistantTurn(StrictStruct, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


# ---- tools, also those that come and go within a conversation


class AnthropicTool(StrictStruct):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    """Arguments are kept to the schema. Where a call is forced they are in any case."""
    cache_control: ScopedCacheControl | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    """The model is not shown it until the conversation refers to it."""
    input_examples: Unsupported = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Return its schema under the name of the other surfaces."""
        return self.input_schema


class ReferredTool(StrictStruct, tag_field="type", tag="tool_reference"):
    name: ToolName


class DefinedTool(StrictStruct, tag_field="type", tag="tool_definition"):
    definition: AnthropicTool


class ToolAddition(StrictStruct, tag_field="type", tag="tool_addition"):
    tool: ReferredTool | DefinedTool
    cache_control: ScopedCacheControl | None = None


class ToolRemoval(StrictStruct, tag_field="type", tag="tool_removal"):
    tool: ReferredTool
    cache_control: ScopedCacheControl | None = None


class SystemTurn(StrictStruct, tag_field="role", tag="system"):
    content: str | list[TextBlock | ToolAddition | ToolRemoval]


Message = UserTurn | AssistantTurn | SystemTurn


# ---- what else a request has


class AutoChoice(StrictStruct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(StrictStruct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class OneTool(StrictStruct, tag_field="type", tag="tool"):
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoTool(StrictStruct, tag_field="type", tag="none"):
    pass


class ThinkingEnabled(StrictStruct, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=MIN_BUDGET_TOKENS, le=MAX_INT64)]
    display: ThinkingDisplay | None = None


class ThinkingAdaptive(StrictStruct, tag_field="type", tag="adaptive"):
    display: ThinkingDisplay | None = None


class ThinkingDisabled(StrictStruct, tag_field="type", tag="disabled"):
    pass


class JsonFormat(StrictStruct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(StrictStruct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(StrictStruct):
    user_id: str | None = None


class AllTurns(StrictStruct, tag_field="type", tag="all"):
    pass


class KeptTurns(StrictStruct, tag_field="type", tag="thinking_turns"):
    value: PositiveInt


class ClearThinking(StrictStruct, tag_field="type", tag="clear_thinking_20251015"):
    keep: Literal["all"] | KeptTurns | AllTurns | None = None


class InputTokensCount(StrictStruct, tag_field="type", tag="input_tokens"):
    value: NotNegative


class ToolUsesCount(StrictStruct, tag_field="type", tag="tool_uses"):
    value: NotNegative


class ClearToolUses(StrictStruct, tag_field="type", tag="clear_tool_uses_20250919"):
    trigger: InputTokensCount | ToolUsesCount | None = None
    keep: ToolUsesCount | None = None
    clear_at_least: InputTokensCount | None = None
    clear_tool_inputs: bool | ToolNames | None = None
    exclude_tools: ToolNames | None = None


class ContextManagement(StrictStruct):
    """Edits that shorten a long conversation before the model reads it: wishes, of which none is
    carried out here."""

    edits: Annotated[list[ClearThinking | ClearToolUses], Meta(max_length=8)] | None = None


# ---- requests


class Conversation(StrictStruct):
    """The fields that a prompt is made of."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | OneTool | NoTool | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    cache_control: ScopedCacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None
    mcp_servers: Unsupported = None
    user_profile_id: Unsupported = None


class CountTokensRequest(Conversation):
    """The body of `POST /v1/messages/count_tokens`."""


class MessagesRequest(Conversation, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: PositiveInt
    temperature: Probability | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT64)] | None = None
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    metadata: Metadata | None = None
    container: Unsupported = None
    diagnostics: Unsupported = None
    inference_geo: Unsupported = None

    # Of betas
    billing_policy: Unsupported = None
    compaction: Unsupported = None
    fallback_credit_token: Unsupported = None
    fallbacks: Unsupported = None
    output_format: Unsupported = None
    thread: Unsupported = None


class MessageTokensCount(msgspec.Struct, frozen=True):
    input_tokens: int
