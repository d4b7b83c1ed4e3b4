"""OpenAI's `POST /v1/responses` as structs: what is honoured of a request.

Pure shapes. As in `openai`: a field that is absent here is unknown, one of type `None` is known and
cannot be honoured, so that only null passes; what has no place in Responses and vLLM's servers take
beside it is marked so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from gateway.generate_request import ReasoningEffort, ServiceTier
from gateway.wire.constraints.format_structs import (
    FormName,
    JsonObjectFormat,
    SchemaObject,
    StrictStruct,
    TextFormat,
)
from gateway.wire.constraints.tool_structs import MAX_TOOLS, ToolName
from gateway.wire.openai.chat import (
    MAX_TOP_LOGPROBS,
    Metadata,
    ModelName,
    PositiveInt,
    Probability,
    RepetitionPenalty,
    StopString,
    StopStrings,
    Unsupported,
)
from gateway.wire.openai_responses.client_tools import ClientTool, HostedTool, NamespaceTool
from gateway.wire.openai_responses.items import MAX_ITEMS, InItem, ItemId
from gateway.wire.openai_responses.mcp_tools import McpChoice, McpTool

Included = Literal[
    "message.output_text.logprobs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]
"""All but the first and the last are of items that no answer here has."""
LOGPROBS: Included = "message.output_text.logprobs"
SEALED: Included = "reasoning.encrypted_content"
MAX_INCLUDES = 32

NOT_YET = {
    "input[].type": frozenset(
        {
            "apply_patch_call",
            "apply_patch_call_output",
            "code_interpreter_call",
            "computer_call",
            "computer_call_output",
            "file_search_call",
            "image_generation_call",
            "shell_call",
            "shell_call_output",
            "tool_search_call",
            "tool_search_output",
            "web_search_call",
        }
    ),
    "input[].content[].type": frozenset({"input_image", "input_file", "input_audio", "refusal"}),
    "input[].output[].type": frozenset({"input_image", "input_file"}),
    "service_tier": frozenset({"scale", "ultrafast"}),
    "tool_choice.type": frozenset(
        {
            "apply_patch",
            "code_interpreter",
            "computer",
            "computer_use_preview",
            "file_search",
            "image_generation",
            "programmatic_tool_calling",
            "shell",
            "web_search_preview",
        }
    ),
    "tools[].type": frozenset(
        {
            "apply_patch",
            "code_interpreter",
            "computer",
            "computer_use_preview",
            "file_search",
            "local_shell",
            "programmatic_tool_calling",
            "shell",
        }
    ),
    "truncation": frozenset({"auto"}),
}
"""Values that OpenAI knows and that cannot be honoured here: refused as such."""


class ResponseNamedFunction(StrictStruct):
    type: Literal["function", "custom"]
    name: ToolName


class FunctionChoice(StrictStruct, tag_field="type", tag="function"):
    name: ToolName


class CustomChoice(StrictStruct, tag_field="type", tag="custom"):
    name: ToolName


class ResponseAllowedTools(StrictStruct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseNamedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = (
    Literal["none", "auto", "required"]
    | FunctionChoice
    | CustomChoice
    | ResponseAllowedTools
    | McpChoice
)


class SchemaFormat(StrictStruct, tag_field="type", tag="json_schema"):
    name: FormName
    schema: SchemaObject
    description: str | None = None
    strict: bool | None = None
    """Kept to whether or not it is said."""


Verbosity = Literal["low", "medium", "high"]
ReasoningSummary = Literal["auto", "concise", "detailed"]


class TextConfig(StrictStruct):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Verbosity | None = None
    """A hint, of which no model here is told."""


class ReasoningConfig(StrictStruct):
    effort: ReasoningEffort | None = None
    summary: ReasoningSummary | None = None
    """As the model has one, and ours have none: what was thought is shown itself."""
    generate_summary: Unsupported = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """The thoughts that a model reads again are its chat template's affair."""
    mode: Unsupported = None


class ResponseStreamOptions(StrictStruct):
    include_obfuscation: bool | None = None


class ConversationId(StrictStruct):
    id: ItemId


RequestTool = ClientTool | NamespaceTool | HostedTool | McpTool
RequestTools = Annotated[list[RequestTool], Meta(max_length=MAX_TOOLS)]


class ResponseRequest(StrictStruct):
    """The body of `POST /v1/responses`."""

    model: ModelName = ""
    input: str | Annotated[list[InItem], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    tools: RequestTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: PositiveInt | None = None
    max_tool_calls: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[Included], Meta(max_length=MAX_INCLUDES)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: ItemId | None = None
    conversation: ItemId | ConversationId | None = None

    # Labels, which the answer repeats.
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    client_metadata: dict[str, Any] | None = None
    """Codex's, about itself."""

    # vLLM's
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | StopStrings | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None

    access_programs: Unsupported = None
    context_management: Unsupported = None
    image: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
